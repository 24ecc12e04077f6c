"""Optimizers that evaluate the loss themselves (LBFGS, SAM): a step over a closure, checked like any other step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.loop.accumulation import check_loss
from layerline.training.loop.lane_state import LaneState


class LossClosure:
    """What an optimizer is handed as its closure: clears gradients, runs forward and backward, returns the loss."""

    def __init__(self, lane: LaneState, closure: Callable[[], Tensor]) -> None:
        self._lane, self._closure = lane, closure
        for module in lane.model.modules():
            # SAM and WSAM leave its momentum at 0 until their step() begins, and keep the value under this name.
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and hasattr(module, "backup_momentum"):
                module.momentum = module.backup_momentum  # type: ignore[assignment]
        self.loss = self._evaluate()
        self._unmoved = self._versions()

    def __call__(self) -> Tensor:
        # LBFGS evaluates first, where the step has just done it; SAM only after it has moved the weights.
        if self._versions() == self._unmoved:
            return self.loss
        loss = self._evaluate()
        clip = self._lane.config.clip
        if clip.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._lane.params, clip.max_norm)
        elif clip.value is not None:
            torch.nn.utils.clip_grad_value_(self._lane.params, clip.value)
        return loss

    def _evaluate(self) -> Tensor:
        for param in self._lane.params:
            param.grad = None
        with torch.enable_grad():
            loss = self._closure()
            check_loss(loss)
            torch.autograd.backward(loss)
        return loss.detach()

    def _versions(self) -> list[int]:
        return [p._version for p in self._lane.params]


def check(lane: LaneState) -> None:
    """Refuses what cannot go with an optimizer that evaluates the loss itself."""
    config = lane.config
    refusals = {
        f"{config.optimizer.name} needs no closure: write mo.step(loss)": not lane.custom,
        "each evaluation is a whole batch: leave accumulate.steps out, and sum up inside the closure":
            config.accumulate.steps > 1,
        "a loss scale would change between evaluations: use bf16": config.precision.amp == "fp16",
        "the parameters are half: keep them in float32": lane.masters is not None,
        "several ranks would evaluate differently often: train on one": lane.peers is not None,
        "a loss was added by backward() or step(loss) before: give the closure alone": not lane.window.untouched,
    }  # fmt: skip
    for reason, applies in refusals.items():
        if applies:
            raise ConfigError(f"a closure does not go with this step: {reason}", where="closure")
