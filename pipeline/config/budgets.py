"""Budgets of metrics: how far a metric may get worse, in its own units or as a percentage, downwards or upwards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import hint

# Parts of the names of metrics of which less is better, and of names that turn them round (`minus_error`).
_LESS_IS_BETTER = frozenset(
    {"cer", "eer", "err", "error", "fid", "loss", "mae", "mape", "mse", "nll", "perplexity", "ppl", "rmse", "wer"}
)
_TURNED = frozenset({"inverse", "minus", "neg", "negative"})
SLACK = 1e-9
"""A loss of exactly the budget passes, however the subtraction rounds."""


def _checked_amount(value: float | str) -> float | str:
    """A number that is not negative, or such a number with a percent sign."""
    text = str(value).strip()
    number = math.nan
    with suppress(ValueError):
        number = float(text.removesuffix("%"))
    if not 0 <= number < math.inf:
        raise ValueError("expected a finite number that is at least 0, or a percentage such as 0.5%")
    if text.endswith("%"):
        return f"{number:.15g}%"
    return number


Amount = Annotated[float | str, AfterValidator(_checked_amount)]
"""A number in the metric's own units, or "0.5%": that part of the float model's value."""


class Budget(BaseModel):
    """How far one metric may get worse; `0.5%` alone is short for `{drop: 0.5%}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    drop: Amount | None = None
    """Of a metric of which more is better: greatest fall that passes."""
    rise: Amount | None = None
    """Of a metric of which less is better, such as an error: greatest rise that passes."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        if isinstance(raw, int | float | str):
            return {"drop": raw}
        return raw

    @model_validator(mode="after")
    def _one_direction(self) -> Budget:
        # Both would be a band, which no test asks for.
        if (self.drop is None) == (self.rise is None):
            raise ValueError("expected either drop (more is better) or rise (less is better)")
        return self

    @property
    def word(self) -> str:
        """The direction that is a loss: "drop" or "rise"."""
        if self.drop is None:
            return "rise"
        return "drop"

    @property
    def amount(self) -> float | str:
        """The number, or the percentage as it is written."""
        if self.drop is not None:
            return self.drop
        assert self.rise is not None
        return self.rise

    def allowed(self, before: float) -> float:
        """The greatest loss that passes, in the metric's units, where the float model has `before`."""
        if isinstance(self.amount, str):
            return float(self.amount.removesuffix("%")) / 100 * abs(before)
        return self.amount

    def loss(self, before: float, after: float) -> float:
        """How much worse the metric became; below 0 where it became better."""
        if self.word == "drop":
            return before - after
        return after - before

    def passes(self, before: float, after: float) -> bool:
        """Whether the measured loss is within the budget. NaN never is."""
        return self.loss(before, after) <= self.allowed(before) + SLACK

    @property
    def shown(self) -> str:
        if isinstance(self.amount, float):
            return f"{self.amount:g}"
        return f"{self.amount} of it"


MaxDrop = Amount | Annotated[dict[str, Budget], Field(min_length=1)]


def usual(metric: str, amount: Amount) -> Budget:
    """The budget of a metric of which pipe.yaml says nothing: by a name such as `val_loss`, less is better."""
    # The name is all there is to go by: val_loss and mse fall when a model gets better, minus_error rises.
    parts = set(re.split(r"[^a-z]+", metric.lower()))
    if parts & _LESS_IS_BETTER and not parts & _TURNED:
        return Budget(rise=amount)
    return Budget(drop=amount)


def refuse_unmeasured(max_drop: MaxDrop | None, *, has_data: bool) -> None:
    """Refuses a budget for a task without eval_data(): nothing could be measured."""
    if max_drop is not None and not has_data:
        what = "it can't be checked: the task has no eval_data()"
        raise ConfigError(what, where="quantize.max_drop", hint="define eval_data(), or leave max_drop out")


def by_metric(max_drop: MaxDrop | None, names: Iterable[str]) -> dict[str, Budget]:
    """The budget of each metric that has one: all with an amount alone. ConfigError on a name of no metric."""
    names = list(names)
    if not isinstance(max_drop, Mapping):
        return {name: Budget(drop=max_drop) for name in names if max_drop is not None}
    for name in max_drop:
        if name not in names:
            what = f"metric() gives no metric {name!r}"
            raise ConfigError(what, where="quantize.max_drop", hint=hint(name, names))
    return dict(max_drop)


def least_drop(max_drop: MaxDrop | None) -> float | None:
    """The smallest drop that any budget allows a share, such as an accuracy of about 1; None where nothing does."""
    budgets = by_metric(max_drop, max_drop if isinstance(max_drop, Mapping) else ["metric"])
    return min((b.allowed(1.0) for b in budgets.values() if b.word == "drop"), default=None)
