"""The JSON documents that `--json` prints, one a command. docs/cli.md describes their fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from layerline.pipeline.commands.housekeeping import Garbage, Problem
from layerline.pipeline.commands.lookup import Beside
from layerline.pipeline.commands.settings import changed, settings
from layerline.pipeline.diagnosis.why import Trial
from layerline.pipeline.errors import PipeError, failure_fields
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.reasons import awaited, changes
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import LayerDiff, Order, Report, Row
from layerline.pipeline.run.outcome import Outcome
from layerline.pipeline.run.plan import Step, shown
from layerline.views.follow import in_network_order

JsonObject = dict[str, Any]


def status(steps: Sequence[Step], states: Mapping[str, str]) -> JsonObject:
    rows = [
        {
            "name": step.stage.name,
            "state": states[step.stage.name],
            "reason": step.reason,
            "key": step.key,
            "digest": step.artifact and step.artifact.digest,
            "passed": step.artifact and step.record and step.record.passed,
        }
        for step in steps
    ]
    return {"stages": rows}


def run(done: Outcome, report: Report | None) -> JsonObject:
    """What a run did, with the tables and notes of a report."""
    document = done.to_json()
    if report is not None:
        # Gates and figures of a run stand with its stages.
        document["report"] = {name: plain(report)[name] for name in ("tables", "notes")}
    return document


def proof(stage: str, report: Report, failure: PipeError | None) -> JsonObject:
    """The result of `pipe resume --prove`."""
    return {"stage": stage, "passed": report.passed, **failure_fields(failure), "report": plain(report)}


def why(
    report: Report, failure: PipeError | None, repro: Path | None, shown: LayerDiff | None, trial: Trial | None
) -> JsonObject:
    """The result of `pipe why`; `shown` is the value that the model in the folder `repro` computes."""
    document: JsonObject = {"report": plain(report), **failure_fields(failure)}
    if repro is not None:
        # null says that nothing could be shown; without --repro the key is absent.
        document["repro"] = None
        if shown is not None:
            document["repro"] = {"value": shown.name, "folder": str(repro)}
    if trial is not None:
        after = None
        if trial.report is not None:
            after = plain(trial.report)
        document["try"] = {"setting": trial.setting or None, "report": after, "reason": trial.reason or None}
    return document


def runs(history: Iterable[Run]) -> JsonObject:
    """Each run with its settings, what differs from the run before, and its figures."""
    ordered = list(history)
    rows = []
    # Newest first: the run before stands behind.
    for run, before in zip(ordered, [*ordered[1:], None], strict=False):
        # Defaults change from release to release, so only what differs from them describes a run.
        differing: dict[str, dict[str, str]] = {}
        for record in run.records:
            for field in settings(record):
                if field.differs:
                    differing.setdefault(record.stage, {})[field.name] = field.value
        rows.append(
            {
                "id": run.id,
                "time": run.began,
                "stages": [r.stage for r in run.records],
                "ran": list(run.ran),
                "passed": run.passed,
                "errors": {stage: asdict(error) for stage, error in run.errors.items()},
                "sets": list(run.sets),
                "settings": differing,
                "changed": changed(run.records, before.records) if before else [],
                "metrics": {r.stage: dict(r.metrics) for r in run.records},
            }
        )
    return {"runs": rows}


def explain(step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> JsonObject:
    before, new = old or {}, shown(step.parts)
    differing, waiting = changes(before, new), awaited(before, new, step.key)
    parts: JsonObject = {}
    for name, value in new.items():
        parts[name] = {"now": value, "before": before.get(name), "changed": name in differing}
    for name, (old_value, new_value) in differing.items():
        if new_value is None:
            # A part that waits for an input's digest is not gone: whether it changes is open.
            parts[name] = {"now": None, "before": old_value, "changed": None if name in waiting else True}
    # What a hook reaches counts for the key; `whole` names the files of which everything counts.
    hooks = {}
    for hook, fingerprint in prints.items():
        files = dict(fingerprint.files)
        hooks[hook] = {"reached": fingerprint.reached, "whole": dict(fingerprint.whole), "files": files}
    return {"stage": step.stage.name, "key": step.key, "reason": step.reason, "parts": parts, "hooks": hooks}


def diff(
    stage: str,
    report: Report,
    beside: Beside | None,
    order: Order,
    top: int | None = None,
    failing: Sequence[Row] = (),
    failure: PipeError | None = None,
) -> JsonObject:
    """The records in an order (only the first `top` of them), the other run's records of the same values, and the
    measures below the limits of `--fail-under`."""
    # Equal records keep the order of the network.
    report = replace(report, records=tuple(in_network_order(report.records)))
    report = replace(report, records=report.sorted(order)[:top])
    document: JsonObject = {"stage": stage, "run": None, "changed": [], "report": plain(report), "against": None}
    document |= {"below": list(failing), **failure_fields(failure)}
    if beside is None:
        return document
    other = beside.report
    if top is not None:
        names = {record.name for record in report.records}
        other = replace(other, records=tuple(record for record in other.records if record.name in names))
    return {**document, "run": beside.run.id, "changed": list(beside.changed), "against": plain(other)}


def plain(report: Report) -> JsonObject:
    """A report as JSON: figures that are not finite are strings."""
    # Through the report's own text, which has one form for NaN and Inf.
    document: JsonObject = json.loads(report.to_json())
    return document


def verify(checked: int, problems: Sequence[Problem], failure: PipeError | None) -> JsonObject:
    faults = [{"what": problem.what, "fault": problem.fault} for problem in problems]
    return {"checked": checked, **failure_fields(failure), "problems": faults}


def gc(garbage: Sequence[Garbage] | None, *, dry_run: bool) -> JsonObject:
    """The result of `pipe gc`; None means that a run was in progress."""
    removed = garbage or ()
    size = sum(item.size for item in removed)
    return {"removed": [item.path for item in removed], "bytes": size, "dry_run": dry_run, "busy": garbage is None}
