"""Types of fields that several stages have; a contradiction is refused while pipe.yaml is read, with its line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class Fields(BaseModel):
    """Fields below a stage's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(Fields):
    """Values that an integer input takes, both ends included."""

    low: int
    high: int

    @model_validator(mode="after")
    def _order(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"expected low up to high, saw low {self.low} above high {self.high}")
        return self


def check_sizes(low: int | None, high: int | None, multiple: int | None) -> None:
    """Refuses bounds of a dimension that no size lies within.

    Raises:
        ValueError: says which bounds exclude each other.
    """
    if high is None:
        return
    if low is not None and high < low:
        raise ValueError(f"max {high} is below min {low}")
    step = multiple or 1
    if high // step * step < (low or 1):
        raise ValueError(f"no multiple of {step} lies between min {low or 1} and max {high}")
