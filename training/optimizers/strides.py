"""Gradient, state and master of a parameter in the parameter's own order of memory. Torch's fused kernels walk through
memory in order, whatever the strides say: where those of a parameter, its gradient and its state differ, values of
other elements are taken, without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerline.training.model.tensor_forms import dense

_STRIDE = Tensor.stride


class Strides:
    """Puts what differs in order before a step."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor], stepped: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._params, self._stepped = optimizer, params, stepped
        self._settled: list[tuple[int, ...]] = []  # of the parameters, when their states were last looked at
        self._fused = False

    def settled(self, grads: Sequence[Tensor]) -> bool:
        """Whether all strides are as they were last settled; a quick test by the gradients and parameters alone."""
        now = self._settled
        return list(map(_STRIDE, grads)) == now and list(map(_STRIDE, self._params)) == now

    @torch.no_grad()
    def settle(self, *, anew: bool = False) -> None:
        """Before a step, with the gradients there: looks at states where a parameter moved, or a state was loaded."""
        now = list(map(_STRIDE, self._params))
        if anew or now != self._settled:
            parts = inner(self._optimizer)
            for param, stepped in zip(self._params, self._stepped, strict=True):
                if stepped is not param and _differs(stepped, param):
                    stepped.data = _ordered(stepped, param)
                for part in parts:
                    _order_state(part.state.get(stepped, {}), stepped)
            for part in parts:
                for group in part.param_groups:
                    # A parameter with gaps in its memory is beyond those kernels.
                    if group.get("fused") and not fusible(group["params"]):
                        group["fused"], group["foreach"] = False, True
            self._settled = now
            self._fused = fused(self._optimizer)
        if not self._fused:
            return
        for stepped, strides in zip(self._stepped, now, strict=True):
            grad = stepped.grad
            if grad is not None and grad.stride() != strides and _differs(grad, stepped):
                stepped.grad = _ordered(grad, stepped)


def inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside of one that wraps them, innermost first, and itself where it is one."""
    itself = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []
    inside: list[torch.optim.Optimizer] = []
    for value in getattr(optimizer, "__dict__", {}).values():
        candidates: list[Any] = [value]
        # A plain object may hold several; in an optimizer of torch such a container is state or groups.
        if isinstance(value, dict) and not itself:
            candidates = list(value.values())
        elif isinstance(value, list | tuple) and not itself:
            candidates = list(value)
        for candidate in candidates:
            if isinstance(candidate, torch.optim.Optimizer):
                inside += inner(candidate)
    return inside + itself


def fused(optimizer: Any) -> bool:
    """Whether a group of the optimizer, or of one that it wraps, steps by a fused kernel."""
    return any(group.get("fused") for part in inner(optimizer) for group in part.param_groups)


def fusible(params: Sequence[Tensor]) -> bool:
    """Whether none of the tensors has gaps in its memory or elements that share it."""
    return all(dense(p) == p.stride() for p in params)


def _order_state(state: dict[str, Any], param: Tensor) -> None:
    for key, value in state.items():
        # A tensor of another shape, as adafactor's rows and columns, is no state of single elements.
        if type(value) is Tensor and value.shape == param.shape and _differs(value, param):
            state[key] = _ordered(value, param)


def _differs(tensor: Tensor, param: Tensor) -> bool:
    """Whether elements lie in another order; the stride of an axis of size 1 says nothing."""
    pairs = zip(param.shape, tensor.stride(), dense(param), strict=True)
    return any(size > 1 and mine != wanted for size, mine, wanted in pairs)


def _ordered(tensor: Tensor, param: Tensor) -> Tensor:
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)
