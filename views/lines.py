"""One line for each stage of a run: what became of it, and the few figures that fit beside."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from layerline.pipeline.records.ledger import Record
from layerline.pipeline.runner import Result
from layerline.views import grid
from layerline.views.screen import cleaned, words

_MARKS = {"ran": ("✓", "green"), "cached": ("✓", "dim"), "failed": ("✗", "red"), "blocked": ("–", "yellow")}
_GAP = "  "
FIGURES = 3
COMPUTE = "compute"
NOT_JUDGED = "not_judged"  # the figure that names what is random, and compared with nothing
DEPLOYED = ("batch", "axes")  # figures that say at which sizes the model can be deployed: never cut
MATTER = 2  # of the worst layer and the figures: those that no reason pushes out
ROOM_FOR_DIGEST = 100  # columns; narrower terminals show figures in its place
LEAST_WORST = 26  # columns for the worst layer, its figure included
LEAST_BELOW = 20  # columns for what goes on below the line
LEAST_REASON = 12  # columns; less of a reason says nothing


def stage_line(result: Result, name_width: int, width: int) -> Text:
    """What became of a stage, in one line no wider than `width`, and further ones where something must not be cut.

    A reason is cut to what the figures that matter leave, the other figures make way. The sizes at which the model can
    be deployed are never cut: they go on below, wrapped.
    """
    record = cleaned(result.record)
    parts = [
        f"{result.name:{name_width}}",
        f"{result.state:7}",
        f"{result.seconds:7.1f} s" if result.worked else " " * 9,
    ]
    if width >= ROOM_FOR_DIGEST:
        parts.append(record.digest[:12] if record else " " * 12)
    mark, style = _MARKS[result.state]
    line = Text.assemble((mark, style), " ", _GAP.join(parts))
    indent = cell_len(f"{mark} {result.name:{name_width}}{_GAP}")
    told = _told(record, width - line.cell_len - len(_GAP)) if record else []
    _append(line, told[:MATTER], width)
    below = _append(line, _deployable(record.metrics) if record else [], width)
    reason = _reason(result, width - line.cell_len)
    _append(line, told[MATTER:], width - reason.cell_len)
    line.append_text(reason)
    for text in below:
        for part in textwrap.wrap(
            text, max(width - indent, LEAST_BELOW), break_long_words=False, break_on_hyphens=False
        ):
            line.append(f"\n{' ' * indent}{part}")
    return line


def _append(line: Text, texts: Sequence[str], width: int) -> list[str]:
    """Puts the texts on the line that still fit, and returns the others."""
    left = []
    for text in texts:
        if line.cell_len + cell_len(_GAP + text) <= width:
            line.append(_GAP + text)
        else:
            left.append(text)
    return left


def _deployable(metrics: Mapping[str, Any]) -> list[str]:
    """The figures that say where the model can be deployed."""
    return [f"{grid.heading(name)} {grid.figure(metrics[name])}" for name in DEPLOYED if metrics.get(name) is not None]


def _told(record: Record, room: int) -> list[str]:
    """The worst layer and the figures, what matters most first."""
    found = figures(record.metrics)
    # A long name makes room for the first figure, where what is left of it still says something.
    beside = room - cell_len(found[0] + _GAP) if found else room
    worst = _worst(record, beside if beside >= LEAST_WORST else room)
    return [text for text in (worst, *found) if text]


def figures(metrics: Mapping[str, Any]) -> list[str]:
    """The few metrics worth a place on a line: first those with a before and an after."""
    pairs, single = [], []
    for name, value in _gathered(metrics).items():
        if name in DEPLOYED:
            continue
        stem = name.removesuffix("_after")
        if stem != name and f"{stem}_before" in metrics:
            pairs.append(_change(stem, metrics[f"{stem}_before"], value))
        elif f"{name}_float" in metrics:
            pairs.append(f"{grid.heading(name)} {grid.figure(value)} (float {grid.figure(metrics[f'{name}_float'])})")
        elif value is not None and not _is_of_a_pair(name, metrics):
            single.append(f"{_label(name)} {grid.amount(name, value)}".strip())
    return [*pairs, *single][:FIGURES]


def _gathered(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with what an engine computes in as one: a share of it would say that it is all."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        head, _, precision = name.partition("_")
        if head == COMPUTE and precision:
            others = f"{found[head]}, " if head in found else ""
            found[head] = f"{others}{precision} {value}"
        else:
            found[name] = value
    return found


def _worst(record: Record, room: int) -> str:
    """The layer that differs most; of a name longer than the room for it the end, which tells it from its likes."""
    worst = record.worst or {}
    if worst.get("sqnr_db") is None:
        return ""
    db = float(worst["sqnr_db"])
    if db == float("inf"):
        return "all that is judged equal" if NOT_JUDGED in record.metrics else "all equal"
    name, figure = str(worst["layer"]), f"{grid.decibels(db)} dB"
    over = cell_len(f"worst {name} {figure}") - room
    return f"worst {f'…{name[over + 1 :]}' if over > 0 else name} {figure}"


def _reason(result: Result, room: int) -> Text:
    if result.state == "cached" or not result.reason:
        return Text()
    found = words(f"{_GAP}({result.reason})", "dim")
    if found.cell_len <= room:
        return found
    found.truncate(max(room - 1, 0))
    found.rstrip()
    return found.append("…") if room >= LEAST_REASON else Text()


def _change(stem: str, before: Any, after: Any) -> str:
    first, second = grid.amount(stem, before), grid.amount(stem, after)
    if not grid.is_size(stem):
        return f"{first} -> {second} {grid.heading(stem)}"
    return second if first == second else f"{first} -> {second}"


def _is_of_a_pair(name: str, metrics: Mapping[str, Any]) -> bool:
    return any(
        name.endswith(end) and name.removesuffix(end) + other in metrics
        for end, other in (("_before", "_after"), ("_float", ""))
    )


def _label(name: str) -> str:
    return grid.heading(name.removesuffix("bytes").removesuffix("_"))
