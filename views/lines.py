"""One line for each stage of a run: what became of it, and the few figures that fit beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from layerline.pipeline.runner import Result
from layerline.views import grid

_MARKS = {"ran": ("✓", "green"), "cached": ("✓", "dim"), "failed": ("✗", "red"), "blocked": ("–", "yellow")}
_GAP = "  "
FIGURES = 3
ROOM_FOR_DIGEST = 100  # columns; narrower terminals show figures in its place


def stage_line(result: Result, name_width: int, width: int) -> Text:
    """One line no wider than `width`: figures that don't fit are left out, and a reason is shortened."""
    record = result.record
    worked = result.state == "ran" or (result.state == "failed" and result.seconds)
    parts = [f"{result.name:{name_width}}", f"{result.state:7}", f"{result.seconds:7.1f} s" if worked else " " * 9]
    if width >= ROOM_FOR_DIGEST:
        parts.append(record.digest[:12] if record else " " * 12)
    mark, style = _MARKS[result.state]
    line = Text.assemble((mark, style), " ", _GAP.join(parts))
    reason = _reason(result, width - line.cell_len)
    if record:
        candidates = ([_worst(record.worst)] if record.worst else []) + figures(record.metrics)
        for text in filter(None, candidates):
            added = Text(_GAP + text)
            if line.cell_len + added.cell_len + reason.cell_len <= width:
                line.append_text(added)
    return line.append_text(reason)


def figures(metrics: Mapping[str, Any]) -> list[str]:
    """The few metrics worth a place on a line: first those with a before and an after."""
    pairs, single = [], []
    for name, value in metrics.items():
        stem = name.removesuffix("_after")
        if stem != name and f"{stem}_before" in metrics:
            pairs.append(_change(stem, metrics[f"{stem}_before"], value))
        elif f"{name}_float" in metrics:
            pairs.append(f"{grid.heading(name)} {grid.figure(value)} (float {grid.figure(metrics[f'{name}_float'])})")
        elif value is not None and not _is_of_a_pair(name, metrics):
            single.append(f"{_label(name)} {_amount(name, value)}".strip())
    return [*pairs, *single][:FIGURES]


def _worst(worst: Mapping[str, Any]) -> str:
    if worst.get("sqnr_db") is None:
        return ""
    db = float(worst["sqnr_db"])
    return "all equal" if db == float("inf") else f"worst {worst['layer']} {grid.decibels(db)} dB"


def _reason(result: Result, room: int) -> Text:
    if result.state == "cached" or not result.reason:
        return Text()
    found = Text(f"{_GAP}({result.reason})", "dim")
    if found.cell_len > max(room, 12):
        found.truncate(max(room, 12) - 1)
        found.rstrip()
        found.append("…")
    return found


def _change(stem: str, before: Any, after: Any) -> str:
    text = f"{_amount(stem, before)} -> {_amount(stem, after)}"
    return text if stem.endswith("bytes") else f"{text} {grid.heading(stem)}"


def _is_of_a_pair(name: str, metrics: Mapping[str, Any]) -> bool:
    return any(
        name.endswith(end) and name.removesuffix(end) + other in metrics
        for end, other in (("_before", "_after"), ("_float", ""))
    )


def _label(name: str) -> str:
    return grid.heading(name.removesuffix("bytes").removesuffix("_"))


def _amount(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int | float):
        return _bytes(value)
    return grid.figure(value)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
