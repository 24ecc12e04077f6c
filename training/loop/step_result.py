"""What a step gives back: true when the weights moved, and otherwise used like the loss it was given."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


class StepResult:
    """The outcome of one call of `mo.step()`.

    It is true when the weights moved: not inside an accumulation window, and not for a rejected step. Printed,
    formatted, compared or used in arithmetic it is the loss of the micro-batch as a plain number, so that loops which
    write `total += mo.step(loss)` or `f"{mo.step(loss):.4f}"` log the loss. The number is read from the device when it
    is asked for, not before.

    Attributes:
        moved: whether the weights moved.
    """

    __slots__ = ("_loss", "_weight", "moved")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, moved: bool, loss: Tensor | None, weight: float | None = None) -> None:
        self.moved = moved
        self._loss = None if loss is None else loss.detach()
        self._weight = weight

    @property
    def loss(self) -> float:
        """The loss per sample (or per unit of `weight`); NaN where step() was called without a loss."""
        if self._loss is None:
            return math.nan
        value = self._loss.item()
        if self._weight is None:
            return value
        return value / self._weight if self._weight else math.nan

    def item(self) -> float:
        """The loss, as a tensor's item()."""
        return self.loss

    def __bool__(self) -> bool:
        return self.moved

    def __float__(self) -> float:
        return self.loss

    def __repr__(self) -> str:
        return repr(self.loss)

    def __format__(self, spec: str) -> str:
        return format(self.loss, spec)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, bool):
            return self.moved is other
        if isinstance(other, StepResult):
            return self.moved is other.moved and self.loss == other.loss
        return self.loss == other

    def __lt__(self, other: Any) -> bool:
        return self.loss < float(other)

    def __le__(self, other: Any) -> bool:
        return self.loss <= float(other)

    def __gt__(self, other: Any) -> bool:
        return self.loss > float(other)

    def __ge__(self, other: Any) -> bool:
        return self.loss >= float(other)

    def __add__(self, other: Any) -> float:
        return self.loss + float(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> float:
        return self.loss - float(other)

    def __rsub__(self, other: Any) -> float:
        return float(other) - self.loss

    def __mul__(self, other: Any) -> float:
        return self.loss * float(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> float:
        return self.loss / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / self.loss
