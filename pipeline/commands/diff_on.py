"""Comparisons that are measured when asked for, and not stored: a stage's model on a backend, two stages, two files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from layerline.pipeline.commands import lookup
from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.report import CLIPPED, WEIGHT, Report, Scalar
from layerline.pipeline.run.plan import open_planner
from layerline.pipeline.run.workplace import temporary_work
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task

# By name, on use: they import onnx.
_COMPARE = "layerline.parity.on_backend"
_COMPARE_FILES = "layerline.onnx_import.compare_files"


def diff_on(project: Project, stage: str, backend: str, log: Log, run_id: str | None = None) -> Report:
    """Compares a stage's model on a backend with ONNX Runtime. Raises Unavailable: the backend can't run here."""
    folder = _with_model(project, stage, run_id, log)
    task = Task(project.root / project.task, project.root)
    with temporary_work(task, log, {"model": folder}, {}) as work:
        report: Report = import_module(_COMPARE).compare(stage, backend, work)
    return report


def diff_stages(
    project: Project, stages: Sequence[str], log: Log, run_id: str | None, further: Mapping[str, Any]
) -> Report:
    """Compares the models that two stages (`STAGE` or `STAGE@RUN`) left, value by value, on the probes of the first.

    The share that a range clips, and the SQNR of weights, are those of the second stage's report.
    """
    lookup.one_choice(project, run_id)
    places = [lookup.stage_and_run(stage, run_id) for stage in stages]
    if all(run for _, run in places):  # no stage is left for --set to choose
        lookup.one_choice(project, places[0][1])
    folders = [_with_model(project, name, run, log) for name, run in places]
    compare = import_module(_COMPARE_FILES)
    report: Report = compare.compare_stages(*folders, log, compare.Further(**further))
    planner = open_planner(project)
    filed = planner.ledger.report(lookup.choose(planner, *places[1]).record)
    columns: dict[str, dict[str, Scalar]] = {}
    for record in filed.records:
        columns[record.name] = {key: record.extra[key] for key in (CLIPPED, WEIGHT) if key in record.extra}
    records = [replace(record, extra={**record.extra, **columns.get(record.name, {})}) for record in report.records]
    reference, candidate = stages
    return replace(
        report, stage=f"{reference} {candidate}", reference=reference, candidate=candidate, records=tuple(records)
    )


def _with_model(project: Project, stage: str, run_id: str | None, log: Log) -> Path:
    """The folder of a stage's artifact, which holds a model.onnx."""
    artifact, doubt = lookup.artifact(project, stage, run_id)
    if not (artifact.path / "model.onnx").is_file():
        raise ConfigError(
            f"stage {stage} leaves no model.onnx",
            hint="name a stage that does: export, fuse, quantize or import-onnx",
        )
    if doubt:
        log.say(f"note: {doubt}")
    return artifact.path


def diff_files(
    reference: Path, candidate: str | None, data: Path | None, log: Log, further: Mapping[str, Any]
) -> Report:
    """Compares two ONNX files value by value on the samples of an .npz; needs no project."""
    usage = "pipe diff a.onnx b.onnx --data x.npz, with one array per input: np.savez('x.npz', input=array)"
    if candidate is None or data is None:
        raise ConfigError("expected two ONNX files, and samples with --data", where=str(reference), hint=usage)
    for path in (reference, Path(candidate), data):
        if not path.is_file():
            raise ConfigError("there is no such file", where=str(path), hint=usage)
    compare = import_module(_COMPARE_FILES)
    report: Report = compare.compare_files(reference, Path(candidate), data, log, compare.Further(**further))
    return report
