"""What a stage says about every layer: one LayerDiff per value, joined across stages by the value's name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from layerline.pipeline.errors import StageError
from layerline.pipeline.untrusted import parse_json

# JSON has no Inf and NaN; they travel as these strings so that any reader can parse the file.
_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _number(value: Any) -> Any:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _not_negative(value: float) -> float:
    if value < 0:  # NaN stays: it is what was measured
        raise ValueError("it is negative")
    return value


def _cosine(value: float) -> float:
    if math.isfinite(value) and abs(value) > 1.01:  # sums that overflow give Inf
        raise ValueError("it is no cosine")
    return value


DistanceNumber = Annotated[float, AfterValidator(_not_negative)]
Cosine = Annotated[float, AfterValidator(_cosine)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Measure = Literal["max_abs", "mean_abs", "rel_l2"]
Scalar = Annotated[float | int | str | bool | None, BeforeValidator(_number)]
Row = dict[str, Scalar]
Order = Literal["own", "error", "sqnr", "effect", "gain", "clipped", "network"]
"""How the rows of a table are sorted: by a measure, worst first, by how far they are beyond their tolerance and then by
SQNR (`error`), or as the network runs."""
# Columns in `LayerDiff.extra`.
OWN = "isolated_sqnr_db"  # a layer's own error: its SQNR where it is fed what the reference computes
EFFECT = "outputs_sqnr_db"  # the SQNR of the outputs if this layer alone were the candidate's
GAIN = "gain_db"  # by how many dB the outputs gain if this layer alone were the reference's
ROUNDING = "rounding_sqnr_db"  # what the rounding of a layer's inputs and weights explains of its own error
WEIGHT = "weight_sqnr_db"  # the SQNR of a layer's weights
CLIPPED = "clipped"  # the share of a value that its range cuts off
_SORTED_BY = {"own": OWN, "sqnr": "sqnr_db", "effect": EFFECT, "gain": GAIN, "clipped": CLIPPED}
# Tables of a report. Of the last three the rows are drawn and not listed.
CHANNELS = "channels"  # a row for each channel of a few layers, the worst channels of a layer first
HISTOGRAMS = "histograms"  # `Histogram.profile` of values, with their ranges
FLIPPED = "flipped samples"  # some samples whose answer flipped: a picture (`picture`, a data URI) or words (`text`)
CONVERGENCE = "convergence"  # how far scales moved while calibration read more samples; changes are relative
UNMEASURED = "not measured"
"""What a gate saw that could not be judged: it fails, but nothing is known to be wrong."""
NO_METRIC = "no metric was measured"  # begins the note that says why there is none
WARNING = "WARNING"  # begins a note that can't be missed
LOST_OUTPUT = f"{WARNING}: output"  # begins the one about an output that lost more than a good conversion loses
RESCALED = "/rescaled"
"""Behind the name of a value whose channels quantisation scaled: its numbers are not those of the float model's."""


@dataclass(frozen=True, kw_only=True)
class LayerDiff:
    """How far one value of the candidate is from the same value of the reference.

    A measure is None when it was not measured. No tensor is kept.

    Attributes:
        name: the value's name, the same from the exported program to the engine (`relu_3`).
        module: module path (`layer1.1.conv2`); empty for values that belong to no module.
        op: operator that produced it (`Conv`), or "parameter" for a weight.
        shape: dimensions, symbolic ones by name.
        dtype: numpy's name of the element type.
        max_abs: max |a - b| over the elements both sides have finite.
        mean_abs: mean |a - b|.
        rel_l2: ‖a - b‖ / ‖a‖ (‖a - b‖ where ‖a‖ is 0).
        cosine: cosine similarity of a and b.
        sqnr_db: 10 log10(‖a‖² / ‖a - b‖²) in dB; inf when the two are equal.
        nonfinite_a: NaN and Inf elements in the reference.
        nonfinite_b: NaN and Inf elements in the candidate.
        one_sided: elements that are non-finite on one side only (or NaN against Inf, or Inf of the other sign).
        judged: the measure that `tolerance` bounds.
        tolerance: greatest value of `judged` that passes; None where nothing is gated.
        extra: further columns of one stage (`floor`, `isolated_sqnr_db`, `clipped`, `update_ratio`, …).
    """

    name: str
    op: str
    module: str = ""
    shape: tuple[int | str, ...] = ()
    dtype: str = ""
    max_abs: DistanceNumber | None = None
    mean_abs: DistanceNumber | None = None
    rel_l2: DistanceNumber | None = None
    cosine: Cosine | None = None
    sqnr_db: float | None = None
    nonfinite_a: Count = 0
    nonfinite_b: Count = 0
    one_sided: Count = 0
    judged: Measure = "rel_l2"
    tolerance: float | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        if self.one_sided:
            return False
        if self.tolerance is None:
            return True
        measured = getattr(self, self.judged)
        # A gated value that could not be measured, or measured as NaN, has not passed.
        return measured is not None and measured <= self.tolerance

    @property
    def severity(self) -> tuple[bool, float, float]:
        """Sorts worst first: failed, then how far beyond tolerance (NaN is beyond any), then lowest SQNR (or what the
        relative L2 error comes to in dB, where there is none)."""
        sqnr = math.inf
        if self.sqnr_db is not None:
            sqnr = self.sqnr_db
        elif self.rel_l2:
            sqnr = -20.0 * math.log10(self.rel_l2)
        if math.isnan(sqnr):
            sqnr = -math.inf
        measured = getattr(self, self.judged)
        excess = math.inf
        if not self.one_sided and (self.tolerance is None or measured == 0):
            excess = 0.0
        elif not self.one_sided and self.tolerance and measured is not None and not math.isnan(measured):
            excess = float(measured / self.tolerance)
        return self.passed, -excess, sqnr

    def severity_by(self, order: Order) -> tuple[bool, float, tuple[bool, float, float]]:
        """Sorts worst first: failed, then by the measure; values without it come last, in order of `severity`."""
        column = _SORTED_BY.get(order, "")
        measured = self.extra.get(column, getattr(self, column, None))
        place = math.inf
        if isinstance(measured, int | float):
            place = -math.inf if math.isnan(measured) else float(measured)
            # Of all of them only these are worse the greater they are.
            if column in (CLIPPED, GAIN):
                place = -place
        return self.passed, place, self.severity

    @property
    def own_db(self) -> float | None:
        """SQNR in dB of the layer with exact inputs: -inf where only error is left, None without a figure or error."""
        own = self.extra.get(OWN)
        return float(own) if isinstance(own, int | float) and own < math.inf else None

    @property
    def fault(self) -> str:
        """Why the value did not pass."""
        if self.one_sided:
            what = f"{self.one_sided} elements are NaN or Inf on one side only"
        else:
            measured = getattr(self, self.judged)
            seen = UNMEASURED if measured is None else f"{measured:.3g}"
            what = f"{self.judged} {seen}, tolerance {self.tolerance:.3g}"
        cause = self.extra.get("cause")
        return f"{what}; {cause}" if cause else what

    @property
    def where(self) -> str:
        """What a person reads: the module path, or the value's name where there is no module."""
        return self.module or self.name

    def summary(self) -> dict[str, Scalar]:
        """The few fields of a one-line overview."""
        fields = {"layer": self.where, "value": self.name, "sqnr_db": self.sqnr_db, "cosine": self.cosine}
        if self.own_db is not None:
            fields["own_sqnr_db"] = self.own_db
        return dict(_plain(fields))


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), of powers; inf where there is no noise, -inf where there is noise alone."""
    if noise == 0.0:
        return math.inf
    if signal <= 0.0:
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


@dataclass(frozen=True)
class Gate:
    """One condition a stage must meet: what was seen against what was asked."""

    name: str
    passed: bool
    seen: str
    expected: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A stage's findings; records are in topological order.

    Attributes:
        stage: name of the stage.
        reference: what the a-side is ("torch float32").
        candidate: what the b-side is ("onnx on onnxruntime").
        records: one per value or parameter.
        metrics: figures measured in this run, by name ("accuracy": 0.98).
        gates: conditions besides the records' tolerances (accuracy budget, finite weights).
        notes: sentences a person should read; a fallback is always named here.
        tables: further lists of rows, by title (rewrites that fired, unquantised values and why).
        merged: values of the reference that have no record since they were merged into others, each with the value
            whose record stands for it.
    """

    stage: str
    reference: str = ""
    candidate: str = ""
    records: tuple[LayerDiff, ...] = ()
    metrics: Mapping[str, Scalar] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()
    tables: Mapping[str, Sequence[Mapping[str, Scalar]]] = field(default_factory=dict)
    merged: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(r.passed for r in self.records) and all(g.passed for g in self.gates)

    @property
    def is_wrong(self) -> bool:
        """Whether something failed that was measured."""
        gates = [gate for gate in self.gates if not gate.passed and gate.seen != UNMEASURED]
        return bool(gates) or self.first_failing() is not None

    @property
    def order(self) -> Order:
        """The order that shows where an error is made: by own errors, where they were measured."""
        if any(OWN in record.extra for record in self.records):
            return "own"
        return "error"

    def sorted(self, order: Order) -> tuple[LayerDiff, ...]:
        """All records in an order; `network` is the report's own."""
        if order == "network":
            return self.records
        return tuple(sorted(self.records, key=lambda r: r.severity_by(order)))

    def first_failing(self) -> LayerDiff | None:
        """The first record in topological order that did not pass: where the difference starts."""
        return next((record for record in self.records if not record.passed), None)

    def failure(self) -> StageError:
        """Why the report did not pass: its failing gates, then the first value beyond its tolerance."""
        failing = [gate for gate in self.gates if not gate.passed]
        reasons = [f"{gate.name}: {gate.seen}, expected {gate.expected}" for gate in failing]
        first = self.first_failing()
        if first is not None:
            later = sum(not record.passed for record in self.records) - 1
            others = f" ({later} later values fail too)" if later else ""
            reasons.append(f"{first.name} ({first.op} {first.module}): {first.fault}{others}")
        hints = [*(gate.hint for gate in failing if gate.hint), f"see: pipe diff {self.stage}"]
        return StageError("; ".join(reasons), where=self.stage, hint=hints[0])

    def plain_metrics(self) -> dict[str, Scalar]:
        """The metrics as JSON can hold them."""
        return dict(_plain(self.metrics))

    def to_json(self) -> str:
        return json.dumps(_plain(dataclasses.asdict(self)), allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """The report that `to_json` wrote; ValueError where the text is something else, or too large."""
        return _reader().validate_python(parse_json(text))


@cache
def _reader() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):  # a numpy scalar
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf" or "-inf"
    return value
