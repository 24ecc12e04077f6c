"""LAMB, Lion and Sophia as foreach updates. They are not taken from the `pytorch-optimizer` package. Its LAMB differs
from the paper (no bias correction of the second moment, weight norms clipped at 10). Its Sophia takes second
derivatives inside step(), after accumulation, loss scale and clipping. Where the rules agree, the tests compare both
implementations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


class Sophia(_Foreach):
    """Sophia-H (Liu et al. 2023): w -= lr * clip(m / max(h, eps), ±rho), h estimating the Hessian's diagonal. Every
    `update_interval` steps the backward pass is asked for second derivatives (Hutchinson: h ≈ z ⊙ Hz with z = ±1),
    which costs about two further backward passes and the memory of a graph of the first."""

    states = ("exp_avg", "hessian")

    def __init__(self, params: Params, lr: float = 6e-2, betas: tuple[float, float] = (0.96, 0.99), eps: float = 1e-12,
                 rho: float = 0.01, weight_decay: float = 0.0, update_interval: int = 10) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "rho": rho, "weight_decay": weight_decay})
        self.update_interval = update_interval
        self.curvature: dict[Tensor, Tensor] = {}

    def wants_curvature(self) -> bool:
        """Whether the coming step updates the estimate."""
        return max((state["step"] for state in self.state.values()), default=0) % self.update_interval == 0

    def backward(self, loss: Tensor, params: Sequence[Tensor]) -> None:
        """A backward pass that also estimates the curvature. Gradients and estimates are summed until the next step."""
        all_grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        pairs = [(param, grad) for param, grad in zip(params, all_grads, strict=True) if grad is not None]
        self._estimate([param for param, _ in pairs], [grad for _, grad in pairs])
        for param, grad in pairs:
            param.grad = grad.detach() if param.grad is None else param.grad + grad.detach()

    def _estimate(self, params: list[Tensor], grads: list[Tensor]) -> None:
        signs = [torch.randint_like(p, 0, 2) * 2 - 1 for p in params]
        products = torch.autograd.grad(grads, params, grad_outputs=signs, allow_unused=True, materialize_grads=True)
        for param, sign, product in zip(params, signs, products, strict=True):
            estimate = product.detach() * sign
            if param in self.curvature:
                estimate = self.curvature[param] + estimate
            self.curvature[param] = estimate

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> None:
        mean, hessian = states
        beta1, beta2 = group["betas"]
        for param, average in zip(params, hessian, strict=True):
            estimate = self.curvature.pop(param, None)
            if estimate is not None:
                average.lerp_(estimate, 1 - beta2)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        update = torch._foreach_div(mean, torch._foreach_clamp_min(hessian, group["eps"]))
        torch._foreach_clamp_min_(update, -group["rho"])
        torch._foreach_clamp_max_(update, group["rho"])
        torch._foreach_add_(params, update, alpha=-group["lr"])
