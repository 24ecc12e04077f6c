"""`pipe debug`: runs a stage again to find its first failing value. Nothing is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.records.store import Artifact
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.run.outcome import Listener
from layerline.pipeline.run.plan import open_planner
from layerline.pipeline.run.workplace import input_folders, temporary_work
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task


def refuse_used(folder: Path) -> None:
    """Raises ConfigError if a folder that is to be written has something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("it is there already", where=str(folder), hint="name an empty folder")


@runtime_checkable
class Debugs(Protocol):
    """A stage that can write a minimal model of a failure."""

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Writes a minimal model to `folder`, and returns the first value that fails; None if all pass."""


def debug(project: Project, name: str, folder: Path, listener: Listener) -> tuple[Report, list[str]]:
    """Writes what shows the first failing value of a stage to `folder`; gives a report on the value, and the files."""
    stage = project.stage(name)
    if not isinstance(stage, Debugs):
        able = [s.name for s in project.stages if isinstance(s, Debugs)]
        hint = f"see: pipe diff {name}; debug takes: {', '.join(able)}"
        raise ConfigError(f"stage {name} has nothing to debug", hint=hint)
    refuse_used(folder)
    planner = open_planner(project)
    made: dict[str, Artifact | None] = {}
    for upstream in project.needed_for([stage.name])[:-1]:
        step = planner.step(upstream, made)
        if step.artifact is None:
            raise PipeError(f"stage {upstream.name} is out of date: {step.reason}", hint=f"pipe run {upstream.name}")
        made[upstream.gives] = step.artifact
    task = Task(project.root / project.task, project.root)
    with temporary_work(task, listener, input_folders(stage, made), {}) as work:
        failing = stage.debug(work, folder)
    report = Report(stage=name, reference="the reference", candidate="the first value that fails")
    if failing is not None:
        report = replace(report, records=(failing,))
    return report, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
