"""Follows a layer through all stages: joins the reports on the names of values, in topological order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from layerline.pipeline.report import OWN, LayerDiff, Report
from layerline.views.formatting import FAILED, MEASURES, decibels, error, number
from layerline.views.tables import Column, Kind, TableView, filled

PARAMETER = "parameter"
MERGED = "merged into"
CellText = Callable[[LayerDiff], str]


@dataclass(frozen=True)
class Followed:
    """A value (or a module, with the worst of its values) and its record in each stage that measured it."""

    layer: str
    value: str
    op: str
    records: Mapping[str, LayerDiff]
    # sorts worst first: failed ones, then the lowest SQNR. Training and averaging change weights on purpose, so rows
    # that only stages with parameters made bad come after all others
    rank: tuple[bool, bool, float, float]
    into: str = ""  # the layer that it was merged into; empty where it was not


def follow(reports: Mapping[str, Report]) -> list[Followed]:
    """One row per value name over all reports, in topological order."""
    by_name: dict[str, dict[str, LayerDiff]] = {}
    merged: dict[str, str] = {}
    about_parameters: set[str] = set()
    for stage, report in reports.items():
        # Later stages know more: what fuse merged stays merged.
        merged.update(report.merged)
        for record in report.records:
            if record.op == PARAMETER:
                about_parameters.add(stage)
            # A stage may list a value twice: the worse record counts.
            records = by_name.setdefault(record.name, {})
            records[stage] = min(records.get(stage, record), record, key=_badness)
    places = _places([report.records for report in reports.values()])
    names = sorted(by_name, key=places.__getitem__)
    return [_followed(name, by_name[name], about_parameters, merged.get(name, "")) for name in names]


def by_own_error(report: Report) -> Report:
    """The report with each layer's own SQNR in place of the accumulated one, if the stage measured own errors."""
    if report.order != "own":
        return report
    records = [replace(record, sqnr_db=number(record.extra.get(OWN))) for record in report.records]
    return replace(report, records=tuple(records))


def by_module(rows: Sequence[Followed]) -> list[Followed]:
    """One row per module path: in each stage the worst of the module's values."""
    grouped: dict[str, list[Followed]] = {}
    for row in rows:
        grouped.setdefault(row.layer, []).append(row)
    layer_of = {row.value: row.layer for row in rows}
    return [_module(layer, members, layer_of) for layer, members in grouped.items()]


def follow_views(rows: Sequence[Followed], stages: Sequence[str], own: Sequence[Followed] = ()) -> list[TableView]:
    """The tables of "follow a layer", worst first: of modules and of values, in decibels and as relative error.

    Args:
        rows: in topological order.
        own: the rows of `by_own_error`, where a stage measured own errors; their tables come first.
    """

    def both(measure: str, of_values: Sequence[Followed], kind: Kind, text: CellText) -> list[TableView]:
        columns = {"worst of each module": Column("values", "number"), "each value": Column("value")}
        tables = zip(columns.items(), (by_module(of_values), of_values), strict=True)
        return [_view(f"{measure}, {of}", table, second, stages, kind, text) for (of, second), table in tables]

    views = both("SQNR in dB", rows, "low", lambda r: decibels(r.sqnr_db))
    views += both(MEASURES["rel_l2"], rows, "high", lambda r: error(r.rel_l2))
    if not own:
        return views
    return both("own error in dB", own, "low", lambda r: decibels(r.sqnr_db)) + views


def _view(
    label: str, rows: Sequence[Followed], second: Column, stages: Sequence[str], kind: Kind, text: CellText
) -> TableView:
    of_stages = (Column(stage, kind) for stage in stages)
    columns = (Column("layer"), second, *of_stages, Column(MERGED), Column("op"), Column("order", "number"))
    cells = []
    for place, row in sorted(enumerate(rows, 1), key=lambda pair: pair[1].rank):
        levels = [_cell(row.records.get(stage), text) for stage in stages]
        cells.append([row.layer, row.value, *levels, row.into, row.op, str(place)])
    return filled(columns, cells, label)


def _cell(record: LayerDiff | None, text: CellText) -> str:
    if record is None:
        return ""
    if record.one_sided:
        return f"{FAILED} {record.one_sided} NaN/Inf"
    if record.passed:
        return text(record)
    return f"{FAILED} {text(record)}".rstrip()


def _followed(name: str, records: Mapping[str, LayerDiff], about_parameters: Set[str], into: str) -> Followed:
    # The first module path that any stage knows; a value without one stands for itself.
    layers = [record.module for record in records.values() if record.module]
    layers.append(name)
    # The first stage names the operator as the model has it; engines have names of their own.
    ops = [record.op for record in records.values()]
    ranks = []
    for stage, record in records.items():
        passed, sqnr, relative, _ = _badness(record)
        ranks.append((passed, stage in about_parameters, sqnr, relative))
    return Followed(layers[0], name, ops[0], records, min(ranks), into)


def _module(layer: str, members: Sequence[Followed], layer_of: Mapping[str, str]) -> Followed:
    """The row of a module, from the rows of its values."""
    worst: dict[str, LayerDiff] = {}
    ops: dict[str, None] = {}  # as ordered sets
    holders: dict[str, None] = {}
    for member in members:
        for stage, record in member.records.items():
            worst[stage] = min(worst.get(stage, record), record, key=_badness)
        if member.op != PARAMETER:
            ops[member.op] = None
        if member.into and layer_of.get(member.into, layer) != layer:
            holders[layer_of[member.into]] = None
    rank = min(member.rank for member in members)
    return Followed(layer, str(len(members)), ", ".join(ops) or PARAMETER, worst, rank, ", ".join(holders))


def _badness(record: LayerDiff) -> tuple[bool, float, float, bool]:
    """Sorts worst first. NaN is the worst; a value without SQNR comes after one that is equal on both sides."""
    sqnr = math.inf
    if record.sqnr_db is not None:
        sqnr = record.sqnr_db
    if record.one_sided or math.isnan(sqnr):
        sqnr = -math.inf
    relative = -(record.rel_l2 or 0.0)
    if math.isnan(relative):
        relative = -math.inf
    return record.passed, sqnr, relative, record.sqnr_db is None


def _extent(records: Sequence[LayerDiff]) -> tuple[int, int]:
    """How many values were measured, and how many there are."""
    values = [record for record in records if record.op != PARAMETER]
    measured = [record for record in values if record.rel_l2 is not None]
    return len(measured), len(values)


def in_network_order(records: Sequence[LayerDiff]) -> list[LayerDiff]:
    """The records of one report, with each parameter before the first value of its module."""
    places = _places([records])
    return sorted(records, key=lambda record: places[record.name])


def _places(reports: Sequence[Sequence[LayerDiff]]) -> dict[str, tuple[float, int, int]]:
    """The sort key of each name: (place in the base report, number of the report, place in that report).

    The base is the report that measured most values. An engine may list more of them, but it measures fewer, and it has
    no place for modules that fuse merged into others. What the base lacks is placed in between: a parameter before the
    first value of its module, any other value behind the one it follows in its own report, within its module's bounds.
    """
    # Ties go to the earlier stage.
    base = max(reports, key=_extent, default=())
    places: dict[str, tuple[float, int, int]] = {}
    bounds: dict[str, tuple[int, int]] = {}  # first and last value of each module
    for i, record in enumerate(base):
        if record.op == PARAMETER:
            continue
        places.setdefault(record.name, (i, 0, 0))
        if record.module:
            first, _ = bounds.get(record.module, (i, i))
            bounds[record.module] = (first, i)
    for which, report in enumerate(reports, 1):
        place = -1.0
        for i, record in enumerate(report):
            first_place, last_place = bounds.get(record.module, (place, place))
            if record.name in places:
                place = places[record.name][0]
            elif record.op == PARAMETER and record.module in bounds:
                place = first_place - 0.5
            else:
                place = min(max(place, first_place), last_place)
            places.setdefault(record.name, (place, which, i))
    return places
