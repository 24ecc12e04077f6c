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
from layerline.calib.scales import LEAST_SCALE, ZERO_RANGE_SCALE, greatest


class _QuantizeDequantize(torch.autograd.Function):
    """x / scale, limited and rounded to an integer or to float8, times scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: float, high: float, float8: bool) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.limits, ctx.float8 = (low, high), float8
        return _nearest((x / scale).clamp(low, high), float8) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (gradient,) = gradients
        x, scale = ctx.saved_tensors
        low, high = ctx.limits
        steps = x / scale
        inside = (steps >= low) & (steps <= high)
        to_scale = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, _nearest(steps, ctx.float8) - steps, steps.clamp(low, high))
            # LSQ's factor: the gradient of one scale sums over all elements.
            count = x.numel() / scale.numel()
            to_scale = (gradient * slope).sum_to_size(scale.shape) / math.sqrt(count * high)
        return gradient * inside, to_scale, None, None, None


def _nearest(steps: Tensor, float8: bool) -> Tensor:
    if float8:
        return steps.to(torch.float8_e4m3fn).to(steps.dtype)
    return torch.round(steps)


class FakeQuant(nn.Module):
    """Quantises and dequantises one value as an entry of a plan says, symmetrically to int8 or float8e4m3fn.

    Args:
        item: the entry; its scales are the first ones.
        rank: dimensions of the value, where its scales run along an axis.
        learned: whether the scales are trained. Otherwise those of a weight follow its greatest elements, as in a plan
            from calibration, and those of an activation stay.
    """

    def __init__(self, item: QuantValue, rank: int, *, learned: bool) -> None:
        super().__init__()
        self.is_weight = item.role == "weight"
        self.float8 = item.dtype == "float8e4m3fn"
        self.high = greatest(item.dtype)
        self.low = -self.high
        if not self.is_weight and not self.float8:
            self.low -= 1  # int8 activations use -128; weights stay symmetric
        self.axis = item.axis
        self.rank = rank
        # Whether learned scales get no gradient any more.
        self.frozen = False
        start = torch.tensor(np.array(item.scales, np.float32))
        self.start: Tensor
        self.register_buffer("start", start, persistent=False)
        self.log_scale: nn.Parameter | None = nn.Parameter(torch.zeros_like(start)) if learned else None

    def scale(self, x: Tensor) -> Tensor:
        """The present scales, float32, one for each channel or one alone."""
        if self.log_scale is not None:
            scale = (self.start * self.log_scale.exp()).clamp(min=LEAST_SCALE)
            return scale.detach() if self.frozen else scale
        if not self.is_weight:
            return self.start
        magnitudes = x.detach().double().abs()
        if self.axis is None:
            amax = magnitudes.amax().reshape(1)
        else:
            amax = magnitudes.movedim(self.axis, 0).reshape(x.shape[self.axis], -1).amax(1)
        scale = (amax / self.high).clamp(min=LEAST_SCALE)
        return torch.where(amax > 0, scale, ZERO_RANGE_SCALE).float()

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * self.rank
        if self.axis is not None:
            shape[self.axis] = -1
        scale = self.scale(x).reshape(shape)
        return _QuantizeDequantize.apply(x, scale, self.low, self.high, self.float8)  # type: ignore[no-any-return, no-untyped-call]
