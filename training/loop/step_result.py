"""What a step gives back: true when the weights moved, and otherwise a number, the loss it was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
from torch import Tensor


class StepResult(float):
    """The outcome of one call of `mo.step()`. It is true when the weights moved: not inside an accumulation window, and
    not for a rejected step. In every other respect it is a float, the loss of the micro-batch per sample (or per unit
    of `weight`), so that a loop may add it up, format it, put it into an array or hand it to a tracker. NaN where
    step() was called without a loss."""

    __slots__ = ("moved",)
    __hash__ = float.__hash__

    moved: bool

    def __new__(cls, loss: float, moved: bool = False) -> StepResult:
        result = super().__new__(cls, loss)
        result.moved = moved
        return result

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)

    def item(self) -> float:
        """The loss, as a tensor's item()."""
        return float(self)

    def __bool__(self) -> bool:
        return self.moved

    def __eq__(self, other: object) -> bool:
        # `mo.step(loss) == True` asks whether the weights moved, not whether the loss is 1.
        if isinstance(other, bool):
            return self.moved is other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class PendingResult:
    """The result of a step inside an accumulation window on a GPU: as `StepResult`, but reads the loss when it is used.
    Reading waits for the device, which a window does only once, at its end."""

    moved = False

    def __init__(self, loss: Tensor, weight: float | None) -> None:
        self._tensor, self._weight = loss, weight

    @cached_property
    def loss(self) -> float:
        """The loss as a plain number."""
        return _per_sample(self._tensor.item(), self._weight)

    def item(self) -> float:
        """The loss, as a tensor's item()."""
        return self.loss

    # numpy asks for it, so that a list of results becomes an array of numbers.
    def __array__(self, *types: Any, **options: Any) -> Any:
        return np.asarray(self.loss, *types, **options)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return StepResult(self.loss) == other

    def __hash__(self) -> int:
        return hash(self.loss)


def _as_float(name: str) -> Callable[..., Any]:
    def method(self: PendingResult, *arguments: Any) -> Any:
        return getattr(self.loss, name)(*arguments)

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "abs", "round",
              "lt", "le", "gt", "ge", "format", "str", "repr", "float"):  # fmt: skip
    setattr(PendingResult, f"__{_name}__", _as_float(f"__{_name}__"))


def step_result(moved: bool, loss: Tensor | None, weight: float | None, read: float | None) -> StepResult:
    """The result of a step whose loss is a mean, or with `weight` a sum over so much."""
    if loss is None:
        return StepResult(math.nan, moved)
    # On a CPU reading costs nothing, and a step that moved the weights has waited for the device already.
    if read is None and loss.device.type != "cpu" and not moved:
        return cast("StepResult", PendingResult(loss.detach(), weight))
    return StepResult(_per_sample(loss.item() if read is None else read, weight), moved)


def _per_sample(loss: float, weight: float | None) -> float:
    if weight is None:
        return loss
    return loss / float(weight) if weight else math.nan
