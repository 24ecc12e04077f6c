"""Number formats: autocast, the dynamic loss scale of fp16, float32 masters of half parameters.

The loss scale is a Python number here, not torch's GradScaler: a step reads the gradient norm once in any case, and
that number says whether anything overflowed, so no further kernel or synchronisation is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config, PrecisionConfig

# Half precision by the names that the configuration has for it.
HALF_TYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALF = tuple(HALF_TYPES.values())
FIRST_SCALE = 65536.0
# Twice this times any finite float16 gradient still fits float32 with room to accumulate.
GREATEST_SCALE = 2.0**24
_OFF = nullcontext()


def autocast(config: PrecisionConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context that a forward pass runs in."""
    if config.amp == "fp32":
        return lambda: _OFF
    return partial(torch.autocast, device.type, HALF_TYPES[config.amp])


def wide(tensor: Tensor) -> Tensor:
    """A copy in float32 or wider."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in HALF else tensor.clone()


class LossScale:
    """Keeps small fp16 gradients from vanishing: halves on overflow, doubles after `window` accepted steps.

    Args:
        config: `loss_scale`, `dynamic_loss_scale_window` and `min_loss_scale`; off (1.0, fixed) unless amp is fp16.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.on = config.amp == "fp16"
        given = config.loss_scale
        self.dynamic = self.on and (given == "dynamic" or config.dynamic_loss_scale_window is not None)
        self.window = config.dynamic_loss_scale_window or 2000
        self.floor = config.min_loss_scale
        self.value = 1.0 if not self.on else FIRST_SCALE if given == "dynamic" else float(given)
        self.good = 0

    @property
    def at_floor(self) -> bool:
        """Whether an overflow cannot be answered by a smaller scale."""
        return not self.dynamic or self.value <= self.floor

    def accepted(self) -> None:
        """One step was finite."""
        if self.dynamic:
            self.good += 1
            if self.good >= self.window:
                self.value, self.good = min(self.value * 2.0, GREATEST_SCALE), 0

    def overflowed(self) -> None:
        """One step was not finite."""
        if self.dynamic:
            self.value, self.good = max(self.value / 2.0, self.floor), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.on:
            self.value, self.good = state["value"], state["good"]


class Masters:
    """float32 copies that the optimizer steps in the place of half parameters; the model gets them rounded.

    Gradients are added up in float32, so that a window of many micro-batches loses nothing to half precision.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.half: list[Tensor] = [p for p in params if p.dtype in HALF]
        masters = [nn.Parameter(p.detach().float()) for p in self.half]
        self.full: list[Tensor] = [*masters]
        self._of = {id(p): m for p, m in zip(self.half, masters, strict=True)}
        self._written: list[int] = []  # torch's version count of each half; while empty, all are compared

    def stepped(self, param: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps for `param`: its master, or itself."""
        return self._of.get(id(param), param)

    def has(self, param: nn.Parameter) -> bool:
        """Whether `param` has a master."""
        return id(param) in self._of

    def collect(self) -> None:
        """Moves the half gradients of one backward pass into the masters'."""
        for half, full in zip(self.half, self.full, strict=True):
            if half.grad is None:
                continue
            if full.grad is None:
                full.grad = half.grad.float()
            else:
                full.grad.add_(half.grad)
            half.grad = None

    def publish(self) -> None:
        """Rounds the masters into the model."""
        if self.half:
            with torch.no_grad():
                torch._foreach_copy_(self.half, self.full)
            self.settled()

    def settled(self) -> None:
        """Notes that the halves equal their masters: whatever is written to them from now on is someone else's."""
        self._written = [p._version for p in self.half]

    @torch.no_grad()
    def follow(self) -> bool:
        """Takes over what someone else has written into halves since; where a half is its master, rounded, the master
        stays.

        Writes through `.data` leave no mark and are seen at the first step only.
        """
        now = [p._version for p in self.half]
        if now == self._written:
            return False
        for i, (half, full) in enumerate(zip(self.half, self.full, strict=True)):
            if not self._written or now[i] != self._written[i]:
                full.copy_(torch.where(half == full.to(half.dtype), full, half.float()))
        self._written = now
        return True

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Sets the masters, in the order of `half`."""
        if self.half:
            with torch.no_grad():
                torch._foreach_copy_(self.full, list(tensors))
            self.settled()


def masters(config: Config, params: Sequence[nn.Parameter], *, custom: bool) -> Masters | None:
    """Masters for those of `params` that are half; None where there are none, or none are wanted.

    Raises:
        ConfigError: a custom optimizer, or sophia, could not step them.
    """
    wanted = config.precision.master_weights
    if wanted is False or not any(p.dtype in HALF for p in params):
        return None
    if custom:
        if wanted:
            raise ConfigError("a custom optimizer holds the parameters themselves and cannot step masters",
                              where="precision.master_weights")  # fmt: skip
        return None
    if config.optimizer.name == "sophia":
        raise ConfigError("sophia does not work on half parameters", where="optimizer.name",
                          hint="keep parameters in float32 and use precision.amp")  # fmt: skip
    return Masters(params)
