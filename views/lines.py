"""One line for each stage of a run: its state, and the figures that fit beside it."""

from __future__ import annotations

import math
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
NOT_JUDGED = "not_judged"  # the figure that names outputs which depend on random operators and are not compared
DEPLOYED = ("batch", "axes")  # the sizes at which the model can be deployed: never cut
MATTER = 2  # of the worst layer and the figures: these stay, even if the reason gets less room
ROOM_FOR_DIGEST = 100  # columns; narrower terminals show figures in its place
LEAST_WORST = 26  # columns for the worst layer, its figure included
LEAST_BELOW = 20  # columns for the lines that continue below
LEAST_REASON = 12  # columns; a shorter piece of a reason is not worth showing


def stage_line(result: Result, name_width: int, width: int) -> Text:
    """The state of a stage on one line of at most `width` columns.

    The reason is cut to the room that the most important figures leave; the other figures are dropped. The sizes at
    which the model can be deployed are never cut: where they don't fit, they continue on wrapped lines below.
    """
    record = cleaned(result.record)
    seconds = f"{result.seconds:7.1f} s" if result.worked else " " * 9
    parts = [f"{result.name:{name_width}}", f"{result.state:7}", seconds]
    if width >= ROOM_FOR_DIGEST:
        parts.append(record.digest[:12] if record else " " * 12)
    mark, style = _MARKS[result.state]
    line = Text.assemble((mark, style), " ", _GAP.join(parts))
    figures_first: list[str] = []
    deployable: list[str] = []
    if record:
        figures_first = _by_importance(record, width - line.cell_len - len(_GAP))
        deployable = _deployable(record.metrics)
    _append(line, figures_first[:MATTER], width)
    below = _append(line, deployable, width)
    reason = _reason(result, width - line.cell_len)
    _append(line, figures_first[MATTER:], width - reason.cell_len)
    line.append_text(reason)
    indent = cell_len(f"{mark} {result.name:{name_width}}{_GAP}")
    room = max(width - indent, LEAST_BELOW)
    for text in below:
        for part in textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False):
            line.append(f"\n{' ' * indent}{part}")
    return line


def _append(line: Text, texts: Sequence[str], width: int) -> list[str]:
    """Appends the texts that still fit to the line, and returns the others."""
    left = []
    for text in texts:
        if line.cell_len + cell_len(_GAP + text) <= width:
            line.append(_GAP + text)
        else:
            left.append(text)
    return left


def _deployable(metrics: Mapping[str, Any]) -> list[str]:
    """The figures that say at which sizes the model can be deployed."""
    return [f"{grid.heading(name)} {grid.figure(metrics[name])}" for name in DEPLOYED if metrics.get(name) is not None]


def _by_importance(record: Record, room: int) -> list[str]:
    """The worst layer and the figures, the most important first."""
    texts = figures(record.metrics)
    room_for_worst = room
    if texts:
        # A long name is cut to leave room for the first figure, unless too little of the name would be left.
        beside = room - cell_len(texts[0] + _GAP)
        if beside >= LEAST_WORST:
            room_for_worst = beside
    worst = _worst(record, room_for_worst)
    if worst:
        texts.insert(0, worst)
    return [text for text in texts if text]


def figures(metrics: Mapping[str, Any]) -> list[str]:
    """The few metrics worth a place on a line: first those with a before and an after."""
    pairs = []
    single = []
    for name, value in _precisions_joined(metrics).items():
        if name in DEPLOYED:
            continue
        stem = name.removesuffix("_after")
        if stem != name and f"{stem}_before" in metrics:
            pairs.append(_change(stem, metrics[f"{stem}_before"], value))
        elif f"{name}_float" in metrics:
            reference = grid.figure(metrics[f"{name}_float"])
            pairs.append(f"{grid.heading(name)} {grid.figure(value)} (float {reference})")
        elif value is not None and not _is_of_a_pair(name, metrics):
            single.append(f"{_label(name)} {grid.amount(name, value)}".strip())
    return [*pairs, *single][:FIGURES]


def _precisions_joined(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with `compute_int8`, `compute_fp16` and so on as one.

    They share one place on the line: with a part of them left out, the rest would read as the whole engine.
    """
    joined: dict[str, Any] = {}
    for name, value in metrics.items():
        head, _, precision = name.partition("_")
        if head == COMPUTE and precision:
            others = f"{joined[head]}, " if head in joined else ""
            joined[head] = f"{others}{precision} {value}"
        else:
            joined[name] = value
    return joined


def _worst(record: Record, room: int) -> str:
    """The layer that differs most. A name that is too long keeps its end, which tells it from its neighbours."""
    worst = record.worst or {}
    if worst.get("sqnr_db") is None:
        return ""
    db = float(worst["sqnr_db"])
    if db == math.inf:
        return "all that is judged equal" if NOT_JUDGED in record.metrics else "all equal"
    name = str(worst["layer"])
    text = f"{grid.decibels(db)} dB"
    excess = cell_len(f"worst {name} {text}") - room
    if excess > 0:
        name = f"…{name[excess + 1 :]}"
    return f"worst {name} {text}"


def _reason(result: Result, room: int) -> Text:
    if result.state == "cached" or not result.reason:
        return Text()
    reason = words(f"{_GAP}({result.reason})", "dim")
    if reason.cell_len <= room:
        return reason
    if room < LEAST_REASON:
        return Text()
    reason.truncate(room - 1)
    reason.rstrip()
    return reason.append("…")


def _change(stem: str, before: Any, after: Any) -> str:
    first, second = grid.amount(stem, before), grid.amount(stem, after)
    if not grid.is_size(stem):
        return f"{first} -> {second} {grid.heading(stem)}"
    if first == second:
        return second
    return f"{first} -> {second}"


def _is_of_a_pair(name: str, metrics: Mapping[str, Any]) -> bool:
    """Whether the metric is the earlier half of a pair, which is written beside the later one."""
    for suffix, partner_suffix in (("_before", "_after"), ("_float", "")):
        if name.endswith(suffix) and name.removesuffix(suffix) + partner_suffix in metrics:
            return True
    return False


def _label(name: str) -> str:
    return grid.heading(name.removesuffix("bytes").removesuffix("_"))
