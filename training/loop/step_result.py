"""What a step gives back: true when the weights moved, and otherwise a number, the loss it was given."""

from __future__ import annotations

import math

from torch import Tensor


class StepResult(float):
    """The outcome of one call of `mo.step()`.

    It is true when the weights moved: not inside an accumulation window, and not for a rejected step. In every other
    respect it is a float, the loss of the micro-batch per sample (or per unit of `weight`), so that a loop may add it
    up, format it, put it into an array or hand it to a tracker. NaN where step() was called without a loss.

    Attributes:
        moved: whether the weights moved.
    """

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
        if isinstance(other, bool):
            return self.moved is other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def step_result(moved: bool, loss: Tensor | None, weight: float | None, read: float | None) -> StepResult:
    """The result of a step whose loss is a mean, or with `weight` a sum over so much.

    Args:
        read: the loss, where the step has read it from the device: reading it waits for the device.
    """
    if loss is None:
        return StepResult(math.nan, moved)
    value = loss.item() if read is None else read
    if weight is not None:
        value = value / float(weight) if weight else math.nan
    return StepResult(value, moved)
