"""What a backend computes from a stage's model: measured when it is asked for, and not stored."""

from __future__ import annotations

from importlib import import_module

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.records import lookup
from layerline.pipeline.report import Report
from layerline.pipeline.runner import temporary_work
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task

_COMPARE = "layerline.parity.on_backend"  # by name, on use: it imports onnx


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
