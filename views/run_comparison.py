"""Runs side by side: what differs between them, their figures, and the layers that moved most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from layerline.pipeline.commands.lookup import PastRun
from layerline.pipeline.report import LayerDiff, Report
from layerline.views.follow import by_own_error
from layerline.views.formatting import amount, decibels, heading
from layerline.views.tables import Column, Kind, TableView

ID = 15  # characters of a run's id: the second in which it began
LEAST, MOST = -50.0, 150.0  # dB; what is equal counts as the greatest, which float32 alone leaves
LEAST_MOVE = 0.1  # dB; less is not listed


def figures(now: PastRun, others: Sequence[PastRun]) -> TableView:
    """The figures of this run that differ, a column for each run. Stages that no other run finished are left out."""
    by_run = [_figures(past) for past in (now, *others)]
    finished = {record.stage for past in others for record in past.run.records}
    rows = []
    for stage, name in by_run[0]:
        if stage not in finished:
            continue
        cells = [texts.get((stage, name), "") for texts in by_run]
        if len(set(cells)) > 1:
            rows.append([f"{stage}: {heading(name)}", *cells])
    columns = [Column("figure"), *_columns(others, "number")]
    return TableView("Figures", tuple(columns), rows)


def _figures(past: PastRun) -> dict[tuple[str, str], str]:
    texts = {}
    for record in past.run.records:
        for name, value in record.metrics.items():
            texts[record.stage, name] = amount(name, value)
    return texts


def moved(now: PastRun, others: Sequence[PastRun]) -> TableView:
    """The layers whose SQNR differs, the own one where all runs measured it; those that moved most come first."""
    rows: list[tuple[float, list[str]]] = []
    for stage, report in now.reports.items():
        reports = [past.reports.get(stage, Report(stage=stage)) for past in others]
        has_own = all(each.order == "own" for each in (report, *reports) if each.records)
        levels, *thens = (_levels(each, has_own=has_own) for each in (report, *reports))
        for name, (record, level) in levels.items():
            earlier = [then[name][1] for then in thens if name in then]
            move = max((_distance(level, then) for then in earlier), default=0.0)
            if move >= LEAST_MOVE:
                cells = [decibels(then[name][1]) if name in then else "" for then in thens]
                rows.append((move, [record.where, stage, f"{move:.1f}", decibels(level), *cells, name]))
    rows.sort(key=lambda row: -row[0])
    columns = (
        Column("layer"),
        Column("stage"),
        Column("moved by dB", "high"),
        *_columns(others, "low"),
        Column("value"),
    )
    return TableView("Layers that moved most", columns, [cells for _, cells in rows])


def _columns(others: Sequence[PastRun], kind: Kind) -> list[Column]:
    """A column for this run, and one for each other run."""
    return [Column("now", kind), *(Column(past.run.id[:ID], kind) for past in others)]


def _levels(report: Report, *, has_own: bool) -> Mapping[str, tuple[LayerDiff, float]]:
    if has_own:
        report = by_own_error(report)
    return {record.name: (record, record.sqnr_db) for record in report.records if record.sqnr_db is not None}


def _distance(a: float, b: float) -> float:
    """In dB; infinite where one of both is NaN."""
    if math.isnan(a) != math.isnan(b):
        return math.inf
    if math.isnan(a):
        return 0.0
    return abs(min(max(a, LEAST), MOST) - min(max(b, LEAST), MOST))
