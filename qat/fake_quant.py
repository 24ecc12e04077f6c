"""Fake quantisation that computes what QuantizeLinear and DequantizeLinear compute, with gradients.

x is divided by the scale, as ONNX does it; torch's own fake_quantize multiplies by the inverse, and then a value
half-way between two steps may fall on the other side. The gradient passes straight through inside the range; that of
the scale is LSQ's (Esser et al. 2020). The scale is learned as its logarithm, so that it stays positive and a step of
the optimizer changes it by a share of itself (Jain et al. 2020).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerline.calib.plan import QuantValue
from layerline.calib.scales import LEAST_SCALE, LEVELS, ZERO_RANGE_SCALE


class _Rounded(torch.autograd.Function):
    """round(x / scale), limited, times scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.limits = low, high
        return torch.round(x / scale).clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (gradient,) = gradients
        x, scale = ctx.saved_tensors
        low, high = ctx.limits
        steps = x / scale
        inside = (steps >= low) & (steps <= high)
        to_scale = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(steps) - steps, steps.clamp(low, high))
            # LSQ's factor: the gradient of one scale sums over all elements.
            count = x.numel() / scale.numel()
            to_scale = (gradient * slope).sum_to_size(scale.shape) / math.sqrt(count * high)
        return gradient * inside, to_scale, None, None


class FakeQuant(nn.Module):
    """Quantises and dequantises one value as an entry of a plan says.

    Args:
        item: the entry, symmetric int8; its scales are the first ones.
        rank: dimensions of the value, where its scales run along an axis.
        learned: whether the scales are trained. Otherwise those of a weight follow its greatest elements, as in a plan
            from calibration, and those of an activation stay.

    Attributes:
        frozen: whether learned scales get no gradient any more.
    """

    def __init__(self, item: QuantValue, rank: int, *, learned: bool) -> None:
        super().__init__()
        self.is_weight = item.role == "weight"
        self.low, self.high = (-LEVELS, LEVELS) if self.is_weight else (-LEVELS - 1, LEVELS)
        self.axis, self.rank = item.axis, rank
        self.frozen = False
        start = torch.tensor(np.array(item.scales, np.float32))
        self.start: Tensor
        self.register_buffer("start", start, persistent=False)
        self.log_scale: nn.Parameter | None = nn.Parameter(torch.zeros_like(start)) if learned else None

    def scale(self, x: Tensor) -> Tensor:
        """The present scales, float32, one for each channel or one alone."""
        if self.log_scale is not None:
            log_scale = self.log_scale.detach() if self.frozen else self.log_scale
            return (self.start * log_scale.exp()).clamp(min=LEAST_SCALE)
        if not self.is_weight:
            return self.start
        others = [dim for dim in range(x.ndim) if dim != self.axis] if self.axis is not None else []
        amax = x.detach().double().abs()
        amax = amax.amax(others) if others else amax.amax().reshape(-1)
        scale = (amax / LEVELS).clamp(min=LEAST_SCALE)
        return torch.where(amax > 0, scale, ZERO_RANGE_SCALE).float()

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * self.rank
        if self.axis is not None:
            shape[self.axis] = -1
        return _Rounded.apply(x, self.scale(x).reshape(shape), self.low, self.high)  # type: ignore[no-any-return, no-untyped-call]
