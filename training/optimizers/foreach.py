"""LAMB and Lion as foreach updates. The LAMB of the `pytorch-optimizer` package differs from the paper (no bias
correction of the second moment, weight norms clipped at 10), and its Lion steps one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Params = Iterable[dict[str, Any]]


class _Foreach(Optimizer):
    """One call of `_update` for the parameters of a group that have taken the same number of steps, as lists."""

    states: tuple[str, ...] = ()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # these rules evaluate no loss
        for group in self.param_groups:
            # Parameters that joined later, or had no gradient at times, have taken fewer steps.
            by_step: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(p) for name in self.states}
                state["step"] += 1
                by_step.setdefault(state["step"], []).append(p)
            for step, params in by_step.items():
                grads = [p.grad for p in params if p.grad is not None]
                states = [[self.state[p][name] for p in params] for name in self.states]
                self._update({**group, "step": step}, params, grads, *states)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> None:
        raise NotImplementedError


class Lamb(_Foreach):
    """LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled per tensor to the size of the weights. w -= lr *
    (‖w‖ / ‖u‖) * u with u = m̂ / (√v̂ + eps) + weight_decay * w; the ratio is 1 where a norm is 0."""

    states = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> None:
        mean, square = states
        (beta1, beta2), step = group["betas"], group["step"]
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        # m̂ / (√v̂ + eps), with both bias corrections moved into the denominator
        first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
        update = torch._foreach_sqrt(square)
        torch._foreach_mul_(update, first / second)
        torch._foreach_add_(update, group["eps"] * first)
        update = torch._foreach_div(mean, update)
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        weight_norm = torch.stack(torch._foreach_norm(params))
        update_norm = torch.stack(torch._foreach_norm(update))
        # The ratio is taken on the device: reading it would wait.
        trust = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0).unbind()
        torch._foreach_mul_(update, trust)
        torch._foreach_add_(params, update, alpha=-group["lr"])


class Lion(_Foreach):
    """Lion (Chen et al. 2023): w -= lr * (sign(β1 m + (1 - β1) g) + weight_decay * w), m = β2 m + (1 - β2) g."""

    states = ("exp_avg",)

    def __init__(self, params: Params, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> None:
        (mean,) = states
        beta1, beta2 = group["betas"]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        update = torch._foreach_lerp(mean, grads, 1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_add_(params, update, alpha=-group["lr"])
        torch._foreach_lerp_(mean, grads, 1 - beta2)
