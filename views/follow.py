"""One layer through all stages: the reports joined on the value's name, in topological order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from layerline.pipeline.report import LayerDiff, Report
from layerline.views.grid import FAILED, MEASURES, Column, View, decibels, error

PARAMETER = "parameter"
MERGED = "merged into"
Measured = Callable[[LayerDiff], str]


@dataclass(frozen=True)
class Followed:
    """A value (or a module, with the worst of its values) and its record in each stage that measured it.

    `rank` sorts worst first: what failed, then the lowest SQNR. Training and averaging change weights on purpose, so
    what the stages that report on parameters found comes after all others. `into` names what holds it from the
    stage on that merged it into something else; empty where nothing did.
    """

    layer: str
    value: str
    op: str
    records: Mapping[str, LayerDiff]
    rank: tuple[bool, bool, float, float]
    into: str = ""


def follow(reports: Mapping[str, Report]) -> list[Followed]:
    """One row per value name over all reports, in topological order."""
    found: dict[str, dict[str, LayerDiff]] = {}
    for stage, report in reports.items():
        for record in report.records:
            of_stage = found.setdefault(record.name, {})
            of_stage[stage] = min(of_stage.get(stage, record), record, key=_badness)
    learned = {stage for stage, report in reports.items() if any(r.op == PARAMETER for r in report.records)}
    places = _places([r.records for r in reports.values()])
    into = {value: holder for report in reports.values() for value, holder in report.merged.items()}
    ordered = sorted(found, key=places.__getitem__)
    return [_followed(name, found[name], learned, into.get(name, "")) for name in ordered]


def by_module(rows: Sequence[Followed]) -> list[Followed]:
    """One row per module path: in each stage the worst of the module's values."""
    grouped: dict[str, list[Followed]] = {}
    for row in rows:
        grouped.setdefault(row.layer, []).append(row)
    layers = {row.value: row.layer for row in rows}
    return [_gathered(layer, members, layers) for layer, members in grouped.items()]


def follow_views(rows: Sequence[Followed], stages: Sequence[str]) -> list[View]:
    """The tables of "follow a layer", worst first: of values and of modules, in decibels and as relative error."""
    shown = {
        "worst of each module": (by_module(rows), Column("values", "number")),
        "each value": (rows, Column("value")),
    }
    measures: dict[Column, Measured] = {
        Column("SQNR in dB", "low"): lambda r: decibels(r.sqnr_db),
        Column(MEASURES["rel_l2"], "high"): lambda r: error(r.rel_l2),
    }
    return [
        _view(f"{measure.label}, {whose}", some, second, [Column(s, measure.kind) for s in stages], text)
        for whose, (some, second) in shown.items()
        for measure, text in measures.items()
    ]


def _view(label: str, rows: Sequence[Followed], second: Column, stages: Sequence[Column], text: Measured) -> View:
    measured = [s for s in stages if any(_cell(row.records.get(s.label), text) for row in rows)]
    merged = [Column(MERGED)] if any(row.into for row in rows) else []
    columns = (Column("layer"), second, *measured, *merged, Column("op"), Column("order", "number"))
    cells = [
        [
            row.layer,
            row.value,
            *(_cell(row.records.get(s.label), text) for s in measured),
            *([row.into] if merged else []),
            row.op,
            str(order),
        ]
        for order, row in sorted(enumerate(rows, 1), key=lambda placed: placed[1].rank)
    ]
    return View(label, columns, cells)


def _cell(record: LayerDiff | None, text: Measured) -> str:
    if record is None:
        return ""
    if record.one_sided:
        return f"{FAILED} {record.one_sided} NaN/Inf"
    return text(record) if record.passed else f"{FAILED} {text(record)}".rstrip()


def _followed(name: str, records: Mapping[str, LayerDiff], learned: Set[str], into: str) -> Followed:
    layer = next((r.module for r in records.values() if r.module), name)
    ranks = [(r.passed, stage in learned, *_badness(r)[1:]) for stage, r in records.items()]
    return Followed(layer, name, next(iter(records.values())).op, records, min(ranks), into)


def _gathered(layer: str, members: Sequence[Followed], layers: Mapping[str, str]) -> Followed:
    stages = dict.fromkeys(s for m in members for s in m.records)
    worst = {s: min((m.records[s] for m in members if s in m.records), key=_badness) for s in stages}
    ops = dict.fromkeys(m.op for m in members if m.op != PARAMETER)
    into = dict.fromkeys(layers[m.into] for m in members if m.into and layers[m.into] != layer)
    rank = min(m.rank for m in members)
    return Followed(layer, str(len(members)), ", ".join(ops) or PARAMETER, worst, rank, ", ".join(into))


def _badness(record: LayerDiff) -> tuple[bool, float, float]:
    """Sorts worst first. NaN is as bad as it gets; what was not measured comes last."""
    sqnr = math.inf if record.sqnr_db is None else record.sqnr_db
    relative = 0.0 if record.rel_l2 is None else record.rel_l2
    lost = record.one_sided or math.isnan(sqnr)
    return record.passed, -math.inf if lost else sqnr, -math.inf if math.isnan(relative) else -relative


def _extent(records: Sequence[LayerDiff]) -> tuple[int, int]:
    """How many values were measured, and how many there are."""
    values = [r for r in records if r.op != PARAMETER]
    return sum(r.rel_l2 is not None for r in values), len(values)


def in_network_order(records: Sequence[LayerDiff]) -> list[LayerDiff]:
    """The records of one report with each parameter before its module's first value, and not before all of them."""
    places = _places([records])
    return sorted(records, key=lambda record: places[record.name])


def _places(reports: Sequence[Sequence[LayerDiff]]) -> dict[str, tuple[float, int, int]]:
    """Where each name stands. The report that measured most values gives the order; what it lacks is put in between.

    An engine may list more values, but measures fewer, and has no place for the modules that fuse joined to others.
    A parameter goes before the first value of its module; any other value behind the one it follows in its own report,
    as long as that is inside its module.
    """
    base = max(reports, key=_extent, default=())
    places: dict[str, tuple[float, int, int]] = {}
    inside: dict[str, tuple[int, int]] = {}
    for i, record in enumerate(base):
        if record.op == PARAMETER:
            continue
        places.setdefault(record.name, (i, 0, 0))
        if record.module:
            inside[record.module] = (inside.get(record.module, (i, i))[0], i)
    for n, report in enumerate(reports, 1):
        at = -1.0
        for i, record in enumerate(report):
            first, last = inside.get(record.module, (at, at))
            if record.name in places:
                at = places[record.name][0]
            elif record.op == PARAMETER and record.module in inside:
                at = first - 0.5
            else:
                at = min(max(at, first), last)
            places.setdefault(record.name, (at, n, i))
    return places
