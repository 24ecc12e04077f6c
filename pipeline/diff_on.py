"""Comparisons that are measured when asked for, and not stored: a stage's model on a backend, two ONNX files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.records import lookup
from layerline.pipeline.report import Report
from layerline.pipeline.runner import temporary_work
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task

# By name, on use: they import onnx.
_COMPARE = "layerline.parity.on_backend"
_COMPARE_FILES = "layerline.onnx_import.compare_files"


def diff_on(project: Project, stage: str, backend: str, log: Log, run_id: str | None = None) -> Report:
    """Compares a stage's model on a backend with ONNX Runtime.

    Raises:
        ConfigError: the stage leaves no model to run, or there is no such backend.
        Unavailable: the backend can't run on this machine.
        StageError: it refuses the model.
        PipeError: the stage has not run.
    """
    artifact, doubt = lookup.artifact(project, stage, run_id)
    if not (artifact.path / "model.onnx").is_file():
        raise ConfigError(
            f"stage {stage} leaves no model.onnx that a backend could run",
            where="--on",
            hint="name a stage that does: export, fuse, quantize or import-onnx",
        )
    if doubt:
        log.say(f"note: {doubt}")
    task = Task(project.root / project.task, project.root)
    with temporary_work(task, log, {"model": artifact.path}, {}) as work:
        report: Report = import_module(_COMPARE).compare(stage, backend, work)
    return report


def diff_files(reference: Path, candidate: str | None, data: Path | None, log: Log) -> Report:
    """Compares two ONNX files value by value on the samples of an .npz; needs no project.

    Raises:
        ConfigError: a file is not named or not there, or inputs and samples don't fit.
        StageError: a file is no ONNX or can't be run.
    """
    usage = "pipe diff a.onnx b.onnx --data x.npz, with one array per input: np.savez('x.npz', input=array)"
    if candidate is None or data is None:
        raise ConfigError("expected two ONNX files, and samples with --data", where=str(reference), hint=usage)
    for path in (reference, Path(candidate), data):
        if not path.is_file():
            raise ConfigError("there is no such file", where=str(path), hint=usage)
    report: Report = import_module(_COMPARE_FILES).compare_files(reference, Path(candidate), data, log)
    return report
