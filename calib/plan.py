"""The quantisation plan: what is quantised and how, and why everything else is not.

PTQ computes it, QAT trains with it, `graph.qdq` carries it out, the report shows it. It is plain data: `plan.json` is
readable, has the same bytes for the same plan, and two plans can be compared line by line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FILE = "plan.json"


Role = Literal["activation", "weight"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One value that the target's rules want in int8, before any number is known.

    Attributes:
        name: the value's name in the float model.
        role: "activation" (QuantizeLinear and DequantizeLinear) or "weight" (stored int8 and DequantizeLinear).
        module: module path of the node that reads it first.
        axis: dimension the scales run along; None for one scale.
        shared: other values that must have the same scale (inputs and output of a Concat).
        readers: who reads the dequantised value: (first output of the reading node, position among its inputs).
        why: the rules that want it.
    """

    name: str
    role: Role
    module: str = ""
    axis: int | None = None
    shared: tuple[str, ...] = ()
    readers: tuple[tuple[str, int], ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class QuantValue(Wanted):
    """One value that is quantised: symmetric int8, zero point 0, unless the model brought it along otherwise.

    Attributes:
        dtype: the integer type.
        zero_point: one number, or one for each scale where they differ.
        scales: float value of one step, one number per channel, or one.
        amax: greatest |x| that is not clipped, over all channels.
        seen: least and greatest value, of an activation in calibration.
        calibrator: how `amax` was chosen.
    """

    dtype: str = "int8"
    zero_point: int | tuple[int, ...] = 0
    scales: tuple[float, ...]
    amax: float
    seen: tuple[float, float]
    calibrator: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One node, or constant, that stays float, and the reason.

    Attributes:
        name: first output of the node, or the constant's name.
        op: operator, or "weight".
        module: module path.
        reason: one clause for people.
    """

    name: str
    op: str
    module: str = ""
    reason: str


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """Everything quantised, in topological order, and everything of interest that is not."""

    values: tuple[QuantValue, ...]
    kept: tuple[Kept, ...]

    def value(self, name: str) -> QuantValue | None:
        """The entry of one value; None where it stays float."""
        return next((v for v in self.values if v.name == name), None)

    def to_json(self) -> str:
        """Canonical: the same plan gives the same text; one line a value."""
        return f'{{"values":[{_lines(self.values)}],\n"kept":[{_lines(self.kept)}]}}\n'

    @classmethod
    def from_json(cls, text: str) -> QuantPlan:
        raw = json.loads(text)
        values = tuple(QuantValue(**{k: _tuples(v) for k, v in item.items()}) for item in raw["values"])
        return cls(values=values, kept=tuple(Kept(**item) for item in raw["kept"]))


def diff(old: QuantPlan, new: QuantPlan) -> list[str]:
    """What changed, a line each, in the order of the new plan; empty for equal plans."""
    return [*_value_changes(old, new), *_kept_changes(old, new)]


def _value_changes(old: QuantPlan, new: QuantPlan) -> Iterator[str]:
    before = {v.name: v for v in old.values}
    for value in new.values:
        was = before.pop(value.name, None)
        if was is None:
            yield f"+ {_title(value)}: scale {_scale(value)}, {value.calibrator}"
        elif was != value:
            yield f"~ {_title(value)}: {', '.join(_fields(was, value))}"
    for value in before.values():
        reason = next((f": {k.reason}" for k in new.kept if k.name in (value.name, *(r for r, _ in value.readers))), "")
        yield f"- {_title(value)} stays float{reason}"


def _kept_changes(old: QuantPlan, new: QuantPlan) -> Iterator[str]:
    before = {k.name: k for k in old.kept}
    for kept in new.kept:
        was = before.get(kept.name)
        if was is not None and was.reason != kept.reason:
            yield f"~ {kept.op} {kept.module or kept.name} stays float: {kept.reason} (was: {was.reason})"


def _fields(was: QuantValue, now: QuantValue) -> Iterator[str]:
    if was.scales != now.scales:
        change = "" if len(was.scales) != len(now.scales) else f" ({_percent(was, now)})"
        yield f"scale {_scale(was)} -> {_scale(now)}{change}"
    for name in ("role", "axis", "calibrator", "shared", "readers", "module", "why"):
        if getattr(was, name) != getattr(now, name):
            yield f"{name} {getattr(was, name)} -> {getattr(now, name)}"
    if was.seen != now.seen:
        yield f"range {was.seen[0]:.6g}..{was.seen[1]:.6g} -> {now.seen[0]:.6g}..{now.seen[1]:.6g}"


def _percent(was: QuantValue, now: QuantValue) -> str:
    """The change of the scale that changed most."""
    ratios = np.array(now.scales) / np.array(was.scales) - 1
    return f"{ratios[np.abs(ratios).argmax()]:+.1%}"


def _scale(value: QuantValue) -> str:
    if len(value.scales) == 1:
        return f"{value.scales[0]:.6g}"
    return f"{min(value.scales):.6g}..{max(value.scales):.6g} ({len(value.scales)} channels)"


def _title(value: QuantValue) -> str:
    return f"{value.role} {value.name}" + (f" ({value.module})" if value.module else "")


def _lines(items: Sequence[QuantValue | Kept]) -> str:
    lines = (json.dumps(dataclasses.asdict(i), allow_nan=False, ensure_ascii=False, sort_keys=True) for i in items)
    return ",".join("\n" + line for line in lines)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
