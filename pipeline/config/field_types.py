"""Types of fields that several stages have; a contradiction is refused while pipe.yaml is read, with its line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator


class Fields(BaseModel):
    """Fields below a stage's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Range(Fields):
    """Values that an integer input takes, both ends included: `[low, high]`, or the two fields."""

    low: int
    high: int

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, content: Any) -> Any:
        if isinstance(content, list) and len(content) == 2:
            return {"low": content[0], "high": content[1]}
        return content

    @model_validator(mode="after")
    def _order(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"expected low up to high, saw low {self.low} above high {self.high}")
        return self


@dataclass(frozen=True, kw_only=True)
class Dim:
    """Bounds of a symbolic dimension of a model, both inclusive; sizes are multiples of `multiple`."""

    min: int = 1
    max: int
    multiple: int = 1

    def sizes(self) -> range:
        """Every size within the bounds."""
        first = -(-self.min // self.multiple) * self.multiple
        return range(first, self.max + 1, self.multiple)


class Dimension(Fields):
    """What pipe.yaml says about a dimension; a bound that it leaves out is found by trial. See `Dim` for the result."""

    name: str | None = None
    """Dimensions of one name have one size."""
    min: PositiveInt | None = None
    """Smallest size; found by trial if left out."""
    max: PositiveInt | None = None
    """Greatest size, which becomes the upper bound of the engine's profiles."""
    multiple: PositiveInt | None = None
    """Every size is a multiple of this."""

    @model_validator(mode="after")
    def _consistent(self) -> Dimension:
        low = self.min or 1
        if self.max is not None and self.max < low:
            raise ValueError(f"max {self.max} is below min {low}")
        if self.max is not None and self.max // self.step * self.step < low:
            raise ValueError(f"no multiple of {self.step} lies between min {low} and max {self.max}")
        return self

    @property
    def step(self) -> int:
        """Every size is a multiple of this."""
        return self.multiple or 1

    @property
    def is_open(self) -> bool:
        """Whether any size is allowed."""
        return self.min is None and self.max is None and self.step == 1

    def fit(self, size: int) -> int:
        """The nearest size that is allowed."""
        low = -(-(self.min or 1) // self.step) * self.step
        high = (self.max or max(size, self.step)) // self.step * self.step
        nearest = max(size // self.step * self.step, self.step)
        return max(low, min(nearest, high))


class Axis(Dimension):
    """A dynamic axis; `batch` alone is short for `{name: batch}`."""

    name: str
    """Axes of one name have one size."""
    multiple: PositiveInt = 1
    """Every size is a multiple of this."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            return {"name": raw}
        return raw
