"""What `--json` prints: one document a command, for scripts. Their fields are described in docs/cli.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from layerline.pipeline.config.settings import changed, previous, settings
from layerline.pipeline.errors import PipeError
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.plan import Step, shown
from layerline.pipeline.reasons import awaited, changes
from layerline.pipeline.records.housekeeping import Garbage, Problem
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.records.lookup import Beside
from layerline.pipeline.report import Order, Report
from layerline.views.follow import in_network_order

Document = dict[str, Any]


def status(steps: Sequence[Step], states: Mapping[str, str]) -> Document:
    rows = [
        {
            "name": s.stage.name,
            "state": states[s.stage.name],
            "reason": s.reason,
            "key": s.key,
            "digest": s.artifact.digest if s.artifact else None,
            "passed": s.record.passed if s.artifact and s.record else None,
        }
        for s in steps
    ]
    return {"stages": rows}


def runs(found: Iterable[Run]) -> Document:
    """Each run with what it was set to, what differs from the run before, and its figures."""
    ordered = list(found)
    rows = []
    for run in ordered:
        before = previous(ordered, run)
        differing = {r.stage: {s.name: s.value for s in settings(r) if s.differs} for r in run.records}
        rows.append(
            {
                "id": run.id,
                "time": run.began,
                "stages": [r.stage for r in run.records],
                "ran": list(run.ran),
                "passed": run.passed,
                "errors": {stage: asdict(error) for stage, error in run.errors.items()},
                "sets": list(run.sets),
                "settings": {stage: fields for stage, fields in differing.items() if fields},
                "changed": changed(run.records, before.records) if before else [],
                "metrics": {r.stage: dict(r.metrics) for r in run.records},
            }
        )
    return {"runs": rows}


def explain(step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> Document:
    before, new = old or {}, shown(step.parts)
    differing, waiting = changes(before, new), awaited(before, new, step.key)
    parts = {n: {"now": v, "before": before.get(n), "changed": n in differing} for n, v in new.items()}
    gone = {
        n: {"now": None, "before": o, "changed": None if n in waiting else True}
        for n, (o, v) in differing.items()
        if v is None
    }
    reached = {h: {"reached": p.reached, "whole": dict(p.whole), "files": dict(p.files)} for h, p in prints.items()}
    return {
        "stage": step.stage.name,
        "key": step.key,
        "reason": step.reason,
        "parts": parts | gone,
        "hooks": reached,
    }


def diff(stage: str, report: Report, beside: Beside | None, order: Order, top: int | None = None) -> Document:
    """Records in an order, with `top` the first so many, and the other run's records of those."""
    by_place = tuple(in_network_order(report.records))
    report = replace(report, records=by_place)
    report = replace(report, records=report.sorted(order)[:top])
    other = beside.report if beside else None
    if other is not None and top is not None:
        names = {r.name for r in report.records}
        other = replace(other, records=tuple(r for r in other.records if r.name in names))
    return {
        "stage": stage,
        "run": beside.run.id if beside else None,
        "changed": list(beside.changed) if beside else [],
        "report": plain(report),
        "against": plain(other) if other else None,
    }


def proof(stage: str, found: Report, failure: PipeError | None) -> Document:
    """What `pipe resume --prove` found; `failure` where going on changed something."""
    told = failure.to_json() if failure else {}
    return {"stage": stage, "passed": found.passed, **told, "report": plain(found)}


def plain(report: Report) -> Document:
    """A report as JSON holds it: figures that are not finite are words."""
    document: Document = json.loads(report.to_json())
    return document


def verify(checked: int, problems: Sequence[Problem], failure: PipeError | None) -> Document:
    told = failure.to_json() if failure else {}
    return {"checked": checked, **told, "problems": [{"what": p.what, "fault": p.fault} for p in problems]}


def gc(found: Sequence[Garbage] | None, *, dry_run: bool) -> Document:
    gone = found or ()
    size = sum(g.size for g in gone)
    return {"removed": [g.path for g in gone], "bytes": size, "dry_run": dry_run, "busy": found is None}
