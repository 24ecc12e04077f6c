"""The quantisation plan: what is quantised and how, and why everything else is not.

Calibration computes it, training with fake quantisation uses it, `qdq.apply` carries it out, and the report shows it.
It is plain data: `plan.json` has one line a value and the same bytes for the same plan, so that two plans can be
compared line by line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FILE = "plan.json"


Role = Literal["activation", "weight"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One value to quantise, before its scales are computed."""

    name: str  # the value's name in the float model
    role: Role  # "activation" (QuantizeLinear and DequantizeLinear) or "weight" (stored and DequantizeLinear)
    module: str = ""  # module path of the node that reads it first
    dtype: str = "int8"  # the element type, in ONNX's name for it
    axis: int | None = None  # dimension the scales run along; None for one scale.
    block: int = 0  # elements along the axis that share a scale; 0 for one scale at each position of the axis.
    shared: tuple[str, ...] = ()  # other values that must have the same scale (inputs and output of a Concat)
    # who reads the dequantised value: (first output of the reading node, position among its inputs)
    readers: tuple[tuple[str, int], ...]
    why: str  # the rules that want it


@dataclass(frozen=True, kw_only=True)
class QuantValue(Wanted):
    """One value that is quantised."""

    zero_point: int | tuple[int, ...] = 0  # one number, or one for each scale where they differ
    # float value of one step, one number per channel, or one. Empty for blocks, whose scales follow from the weight.
    scales: tuple[float, ...]
    amax: float  # greatest |x| that is not clipped, over all channels
    seen: tuple[float, float]  # least and greatest value, of an activation in calibration
    calibrator: str  # how `amax` was chosen


def readers_of(values: Iterable[Wanted]) -> set[str]:
    """The first outputs of the nodes that read one of these values quantised."""
    readers = set[str]()
    for value in values:
        readers.update(name for name, _ in value.readers)
    return readers


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One node, or constant, that stays float, and the reason."""

    name: str  # first output of the node, or the constant's name
    op: str  # operator, or "weight"
    module: str = ""  # module path
    reason: str  # one clause for people


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """Everything quantised, in topological order, and everything of interest that is not."""

    values: tuple[QuantValue, ...]
    kept: tuple[Kept, ...]

    def value(self, name: str) -> QuantValue | None:
        """The entry of one value; None where it stays float."""
        for value in self.values:
            if value.name == name:
                return value
        return None

    def to_json(self) -> str:
        """Canonical: the same plan gives the same text; one line a value."""
        return f'{{"values":[{_lines(self.values)}],\n"kept":[{_lines(self.kept)}]}}\n'

    @classmethod
    def from_json(cls, text: str) -> QuantPlan:
        raw = json.loads(text)
        values: list[QuantValue] = []
        for item in raw["values"]:
            fields = {name: _tuples(field) for name, field in item.items()}
            values.append(QuantValue(**fields))
        kept = tuple(Kept(**item) for item in raw["kept"])
        return cls(values=tuple(values), kept=kept)


def _lines(items: Sequence[QuantValue | Kept]) -> str:
    lines: list[str] = []
    for item in items:
        fields = dataclasses.asdict(item)
        lines.append("\n" + json.dumps(fields, allow_nan=False, ensure_ascii=False, sort_keys=True))
    return ",".join(lines)


def _tuples(value: Any) -> Any:
    """Lists, which JSON has for tuples, as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
