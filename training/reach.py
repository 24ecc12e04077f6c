"""Whether a step could write Inf into a weight, told before the step and at almost no cost.

A finite gradient does not make a finite update: a rate of 1e30, a master that no longer fits half precision. Looking at
all weights after each step would cost a pass over them, and come too late. Instead the greatest change that a rule can
make follows from its rate and the gradient norm, which the step has on the CPU anyway. Where the sum of these bounds
comes near the greatest number of the weights' type, the weights are measured; where a step could still exceed it,
copies are kept first, to take it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from layerline.training.foreach import Lamb, Lion, Sophia
from layerline.training.gradient import numbers
from layerline.training.parts import local

# (rate, gradient norm, greatest weight, greatest momentum) -> the greatest weight and momentum after the step
Growth = Callable[[float, float, float, float], tuple[float, float]]
_ROOM = 4.0  # for rounding
_LEAST_EPS = 1e-16
_RATE = itemgetter("lr")


class Reach:
    """The greatest value that the weights of one optimizer may have by now.

    Args:
        optimizer: whose updates are bounded; one that is not known is watched at every step.
        params: what the model holds.
        stepped: what the optimizer steps: the same, or their masters.

    Attributes:
        known: whether the optimizer's rule and state are known, so that its step can be taken back whole.
        weights: the bound; inf has it measured at the next step.
    """

    def __init__(self, optimizer: Any, params: Sequence[Tensor], stepped: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._stepped = optimizer, stepped
        self._limit = min(torch.finfo(p.dtype).max for p in params) / _ROOM
        self.known = type(optimizer) in _RULES
        self._growth = _growth(optimizer, stepped) if self.known else None
        self.weights = self._momentum = math.inf

    def safe(self, norm: float, agree: Callable[[float], float] | None = None) -> bool:
        """Whether a step on a gradient of this norm leaves every weight finite for certain; it counts as taken then.

        Args:
            norm: of the gradient that the optimizer gets.
            agree: the greatest of a number over all ranks, where each holds a part of the weights.
        """
        if (growth := self._growth) is None:
            return False
        rate = float(max(map(_RATE, self._optimizer.param_groups)))
        after = growth(rate, norm, self.weights, self._momentum)
        if not after[0] < self._limit:
            growth = self._measure(agree)
            after = (math.inf, math.inf) if growth is None else growth(rate, norm, self.weights, self._momentum)
            if not after[0] < self._limit:
                self.weights = math.inf
                return False
        self.weights, self._momentum = after
        return True

    def _measure(self, agree: Callable[[float], float] | None) -> Growth | None:
        state = self._optimizer.state.values()
        buffers = [b for s in state if isinstance(b := s.get("momentum_buffer"), Tensor)]
        self.weights, self._momentum = (max(_greatest(t), default=0.0) for t in (self._stepped, buffers))
        if agree is not None:
            self.weights, self._momentum = agree(self.weights), agree(self._momentum)
        self._growth = _growth(self._optimizer, self._stepped)  # a loop may have set other factors
        return self._growth


class Kept:
    """Copies of what a step changes, to take it back.

    Args:
        optimizer: its state is kept where `state` says that it has torch's form.
        params: what the model holds; looked at after the step.
        stepped: what the optimizer steps.
    """

    def __init__(self, optimizer: Any, params: Sequence[Tensor], stepped: Sequence[Tensor], *, state: bool) -> None:
        self._optimizer, self._params, self._stepped = optimizer, params, stepped
        self._finite = [math.isfinite(n) for n in _greatest(params)]
        self._weights = [s.detach().clone() for s in stepped]
        self._state = {p: {k: _cloned(v) for k, v in s.items()} for p, s in optimizer.state.items()} if state else None
        self._steps = [g.get("step") for g in optimizer.param_groups] if state else []

    def spoilt(self) -> int | None:
        """The first parameter that is not finite any more."""
        now = _greatest(self._params)
        return next((i for i, (n, was) in enumerate(zip(now, self._finite, strict=True))
                     if was and not math.isfinite(n)), None)  # fmt: skip

    @torch.no_grad()
    def restore(self) -> None:
        """Takes the step back."""
        torch._foreach_copy_([local(s) for s in self._stepped], [local(w) for w in self._weights])
        if self._state is None:
            return
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, step in zip(self._optimizer.param_groups, self._steps, strict=True):
            if step is None:
                group.pop("step", None)
            else:
                group["step"] = step


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _greatest(tensors: Sequence[Tensor]) -> Iterator[float]:
    """The largest magnitude of each; NaN where there is one."""
    parts = [local(t.detach()) for t in tensors]
    there = [p for p in parts if p.numel()]
    norms = iter(numbers(torch._foreach_norm(there, math.inf)) if there else ())
    return (next(norms) if p.numel() else 0.0 for p in parts)


def _growth(optimizer: Any, stepped: Sequence[Tensor]) -> Growth | None:
    """The rule's bound; None where its numbers have none (ε = 0, float16 states that underflow)."""
    if any(p.dtype == torch.float16 for p in stepped):
        return None
    groups = optimizer.param_groups
    root = math.sqrt(max(p.numel() for p in stepped))
    return _RULES[type(optimizer)](groups, max(abs(g["weight_decay"]) for g in groups), root)


def _sgd(groups: Sequence[Mapping[str, Any]], decay: float, _: float) -> Growth:
    factor = max(g["momentum"] for g in groups)

    def growth(rate: float, norm: float, weight: float, momentum: float) -> tuple[float, float]:
        grad = norm + decay * weight
        momentum = factor * momentum + grad
        return weight + rate * (grad + momentum), momentum

    return growth


def _rmsprop(groups: Sequence[Mapping[str, Any]], _: float, __: float) -> Growth | None:
    """|g| / (√v + ε) ≤ 1 / √(1 - α), as v ≥ (1 - α) g²."""
    factor, alpha = max(g["momentum"] for g in groups), max(g["alpha"] for g in groups)
    if any(g["centered"] or g["eps"] < _LEAST_EPS for g in groups) or not alpha < 1:
        return None
    update = 1 / math.sqrt(1 - alpha)

    def growth(rate: float, _norm: float, weight: float, momentum: float) -> tuple[float, float]:
        momentum = factor * momentum + update
        return weight + rate * momentum, momentum

    return growth


def _steady(update: float, decay: float) -> Growth:
    """A rule whose update is at most `update` times the rate."""
    return lambda rate, _, weight, __: (weight * (1 + rate * decay) + rate * update, 0.0)


def _of_adam(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """|m̂| / √v̂ at most, by Cauchy and Schwarz: (1 - β1) / √((1 - β2) (1 - β1² / β2)), corrections included."""
    greatest = 0.0
    for group in groups:
        beta1, beta2 = (float(b) for b in group["betas"])
        if group["eps"] < _LEAST_EPS or not beta1 * beta1 < beta2:
            return None
        ratio = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
        greatest = max(greatest, ratio * max(1.0, math.sqrt(1 - beta2) / (1 - beta1)))
    return greatest


def _adam(groups: Sequence[Mapping[str, Any]], decay: float, _: float) -> Growth | None:
    update = _of_adam(groups)
    return None if update is None else _steady(update, decay)


def _adafactor(groups: Sequence[Mapping[str, Any]], decay: float, root: float) -> Growth:
    """The update's root mean square is at most d times max(ε2, that of the weights), one element √n times that."""
    bound, floor = max(g["d"] for g in groups) * root, max(g["eps"][1] for g in groups)
    return lambda rate, _, weight, __: (weight * (1 + rate * decay) + rate * bound * max(floor, weight), 0.0)


def _lamb(groups: Sequence[Mapping[str, Any]], decay: float, root: float) -> Growth | None:
    """The update is as long as the weights, or Adam's direction where one of them is 0."""
    update = _of_adam(groups)
    if update is None:
        return None
    return lambda rate, _, weight, __: (weight * (1 + rate * (root + decay)) + rate * update, 0.0)


_RULES: Mapping[type, Callable[[Sequence[Mapping[str, Any]], float, float], Growth | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adafactor: _adafactor,
    Lamb: _lamb,
    Lion: lambda _, decay, __: _steady(1.0, decay),
    Sophia: lambda groups, decay, _: _steady(max(g["rho"] for g in groups), decay),
}
