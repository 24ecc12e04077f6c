"""The line of a stage in a run: its state, and the few figures worth a place beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from layerline.pipeline.records.ledger import Record
from layerline.pipeline.run.outcome import Result
from layerline.views import formatting
from layerline.views.screen import cleaned, words

_MARKS = {"ran": ("✓", "green"), "cached": ("✓", "dim"), "failed": ("✗", "red"), "blocked": ("–", "yellow")}
_GAP = "  "
FIGURES = 3
COMPUTE = "compute"
NOT_JUDGED = "not_judged"  # the figure that names outputs which depend on random operators and are not compared
DEPLOYED = ("batch", "axes")  # the sizes at which the model can be deployed: always shown


def stage_line(result: Result, name_width: int) -> tuple[Text, Text]:
    """The state of a stage, and what is worth telling about it: where it has no room, it is wrapped below."""
    mark, style = _MARKS[result.state]
    head = Text.assemble((mark, style), f" {result.name:{name_width}}{_GAP}")
    seconds = " " * 9
    if result.worked:
        seconds = f"{result.seconds:7.1f} s"
    parts = [f"{result.state:7}", seconds]
    record = cleaned(result.record)
    if record:
        parts += _facts(record)
    body = Text(_GAP.join(parts))
    if result.reason and result.state != "cached":
        body.append_text(words(f"{_GAP}({result.reason})", "dim"))
    body.rstrip()
    return head, body


def _facts(record: Record) -> list[str]:
    """The layer that differs most, the figures, and the sizes at which the model can be deployed."""
    facts = figures(record.metrics)
    worst = record.worst or {}
    if worst.get("sqnr_db") is not None:
        # "inf" travels as text in a record.
        db = float(worst["sqnr_db"])
        text = f"worst {worst['layer']} {formatting.decibels(db)} dB"
        if worst.get("own_sqnr_db") is not None:
            text = f"worst {worst['layer']} own {formatting.decibels(float(worst['own_sqnr_db']))} dB"
        elif db == math.inf and NOT_JUDGED in record.metrics:
            text = "all that is judged equal"
        elif db == math.inf:
            text = "all equal"
        facts.insert(0, text)
    for name in DEPLOYED:
        if record.metrics.get(name) is not None:
            facts.append(f"{formatting.heading(name)} {formatting.figure(record.metrics[name])}")
    return facts


def figures(metrics: Mapping[str, Any]) -> list[str]:
    """The few metrics worth a place on a line: first those with a before and an after."""
    pairs = []
    single = []
    for name, value in _precisions_joined(metrics).items():
        if name in DEPLOYED:
            continue
        stem = name.removesuffix("_after")
        other_half = name.removesuffix("_float")
        if name.endswith("_before"):
            other_half = f"{name.removesuffix('_before')}_after"
        if stem != name and f"{stem}_before" in metrics:
            pairs.append(_change(stem, metrics[f"{stem}_before"], value))
        elif f"{name}_float" in metrics:
            reference = formatting.figure(metrics[f"{name}_float"])
            pairs.append(f"{formatting.heading(name)} {formatting.figure(value)} (float {reference})")
        elif value is not None and (other_half == name or other_half not in metrics):
            label = formatting.heading(name.removesuffix("bytes").removesuffix("_"))
            single.append(f"{label} {formatting.amount(name, value)}".strip())
    return [*pairs, *single][:FIGURES]


def _precisions_joined(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with `compute_int8`, `compute_fp16` and so on as one; a part would read as the whole engine."""
    joined: dict[str, Any] = {}
    for name, value in metrics.items():
        head, _, precision = name.partition("_")
        if head != COMPUTE or not precision:
            joined[name] = value
        elif head in joined:
            joined[head] += f", {precision} {value}"
        else:
            joined[head] = f"{precision} {value}"
    return joined


def _change(stem: str, before: Any, after: Any) -> str:
    first, second = formatting.amount(stem, before), formatting.amount(stem, after)
    if formatting.is_size(stem) and first == second:
        return f"{second} {formatting.heading(stem)}, as before"
    return f"{first} -> {second} {formatting.heading(stem)}"
