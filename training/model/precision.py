"""Number formats: autocast, the dynamic loss scale of fp16, float32 masters of half parameters. The loss scale is a
Python number, not torch's GradScaler: a step reads the gradient norm in any case, and this number shows an overflow, so
no further kernel or synchronisation is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config, PrecisionConfig
from layerline.training.model.policy import Policy

# Half precision by the names that the configuration has for it.
HALF_TYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALF = tuple(HALF_TYPES.values())
FIRST_SCALE = 65536.0
# Twice this times any finite float16 gradient still fits float32 with room to accumulate.
GREATEST_SCALE = 2.0**24
_OFF = nullcontext()


def autocast(config: PrecisionConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that creates the context of a forward pass."""
    if config.amp == "fp32":
        return lambda: _OFF
    return partial(torch.autocast, device.type, HALF_TYPES[config.amp])


def wide(tensor: Tensor) -> Tensor:
    """A copy in float32 or wider."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in HALF else tensor.clone()


class LossScale(Policy):
    """Keeps small fp16 gradients from vanishing: halves on overflow, doubles after `window` accepted steps."""

    name = "scale"

    def __init__(self, config: PrecisionConfig) -> None:
        self.on = config.amp == "fp16"
        configured = config.loss_scale
        self.dynamic = self.on and (configured == "dynamic" or config.dynamic_loss_scale_window is not None)
        self.window = config.dynamic_loss_scale_window or 2000
        self.floor = config.min_loss_scale
        self.value = 1.0
        if self.on:
            self.value = FIRST_SCALE if configured == "dynamic" else float(configured)
        self.good = 0

    @property
    def at_floor(self) -> bool:
        """Whether an overflow cannot be answered by a smaller scale."""
        return not self.dynamic or self.value <= self.floor

    def after_accepted(self, step: int) -> None:  # noqa: ARG002
        """Doubles the scale after `window` accepted steps in a row."""
        if self.dynamic:
            self.good += 1
            if self.good >= self.window:
                # As torch's GradScaler: factor 2 both ways.
                self.value = min(self.value * 2.0, GREATEST_SCALE)
                self.good = 0

    def after_rejected(self, *, finite: bool) -> None:
        """Halves the scale where a step was not finite."""
        if self.dynamic and not finite:
            self.value = max(self.value / 2.0, self.floor)
            self.good = 0

    def state_dict(self) -> dict[str, Any]:
        return {"on": self.on, "value": self.value, "good": self.good}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:  # noqa: ARG002
        """Continues a dynamic scale. A fixed one stays as configured; after a run without fp16 it begins anew."""
        if self.dynamic and state.get("on", True):
            self.value = max(state["value"], self.floor)
            self.good = state["good"]


class Masters(Policy):
    """float32 copies that the optimizer steps instead of half parameters. The model gets them rounded. Gradients are
    summed in float32, so that a window of many micro-batches loses no precision."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._of = {id(p): nn.Parameter(p.detach().float()) for p in params if p.dtype in HALF}
        self.half: list[Tensor] = [p for p in params if p.dtype in HALF]
        self.full: list[Tensor] = list(self._of.values())
        # torch's version counter of each half parameter; while the list is empty, all of them are compared.
        self._versions: list[int] = []

    def stepped(self, param: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps for `param`: its master, or itself."""
        return self._of.get(id(param), param)

    def has(self, param: nn.Parameter) -> bool:
        """Whether `param` has a master."""
        return id(param) in self._of

    def collect(self) -> None:
        """Adds the half gradients of one backward pass to the masters' gradients."""
        for half, full in zip(self.half, self.full, strict=True):
            if half.grad is None:
                continue
            # Summed in float32: a half sum loses small gradients after some hundred micro-batches.
            if full.grad is None:
                full.grad = half.grad.float()
            else:
                full.grad.add_(half.grad)
            half.grad = None

    def publish(self) -> None:
        """Rounds the masters into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.half, self.full)
        self.settled()

    def settled(self) -> None:
        """Records that each half parameter equals its master: later writes come from the user's code."""
        self._versions = [p._version for p in self.half]

    def before_step(self) -> None:
        self.follow()

    def after_accepted(self, step: int) -> None:  # noqa: ARG002
        self.publish()

    @torch.no_grad()
    def follow(self) -> None:
        """Copies values that the user's code has written into half parameters to their masters. A master whose rounded
        value is still there keeps its further digits."""
        # Writes through `.data` don't change torch's version counter: they are noticed at the first step only.
        versions = [p._version for p in self.half]
        if versions == self._versions:
            return
        for i, (half, full) in enumerate(zip(self.half, self.full, strict=True)):
            if not self._versions or versions[i] != self._versions[i]:
                full.copy_(torch.where(half == full.to(half.dtype), full, half.float()))
        self._versions = versions

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Sets the masters, in the order of `half`."""
        with torch.no_grad():
            torch._foreach_copy_(self.full, list(tensors))
        self.settled()


def masters(config: Config, params: Sequence[nn.Parameter], *, custom: bool) -> Masters | None:
    """Masters for the half parameters of `params`; None where there are none or the configuration turns them off."""
    wanted = config.precision.master_weights
    if wanted is False or not any(p.dtype in HALF for p in params):
        return None
    if not custom:
        return Masters(params)
    if wanted:
        raise ConfigError("a custom optimizer holds the parameters themselves and cannot step masters",
                          where="precision.master_weights")  # fmt: skip
    return None
