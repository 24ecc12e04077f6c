"""What a stage can show of its own fault: it runs again for that alone, and nothing of it is kept in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.records.run_lock import temporary_folder
from layerline.pipeline.records.store import Artifact
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.runner import Listener, Runner
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task


@runtime_checkable
class Debugs(Protocol):
    """A stage that can reduce its fault to something small."""

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Writes what shows the fault to `folder`; the first value that fails, or None where none does."""


@dataclass(frozen=True)
class Shown:
    """What `debug` found.

    Attributes:
        report: the first value of the stage that fails; without a record where every value passes.
        files: what shows it, relative to its folder.
    """

    report: Report
    files: tuple[str, ...]


def debug(project: Project, name: str, folder: Path, listener: Listener) -> Shown:
    """Finds the first value of a stage that fails, and writes what shows it to `folder`.

    Raises:
        ConfigError: the stage has nothing to show, or `folder` has something in it.
        PipeError: what the stage takes from is out of date.
    """
    stage = project.stage(name)
    if not isinstance(stage, Debugs):
        able = [s.name for s in project.stages if isinstance(s, Debugs)]
        hint = f"see: pipe diff {name}; debug takes: {', '.join(able)}"
        raise ConfigError(f"stage {name} shows all it knows in its report", hint=hint)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("it is there already", where=str(folder), hint="name an empty folder: -o DIR")
    inputs = _inputs(Runner(project, listener), name)
    with temporary_folder() as temporary:
        out, scratch = temporary / "out", temporary / "scratch"
        out.mkdir()
        scratch.mkdir()
        task = Task(project.root / project.task, project.root)
        bad = stage.debug(Work(inputs=inputs, task=task, out=out, scratch=scratch, log=listener), folder)
    records = () if bad is None else (bad,)
    report = Report(stage=name, reference="the reference", candidate="the first value that fails", records=records)
    return Shown(report, tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())))


def _inputs(runner: Runner, name: str) -> dict[str, Path]:
    """Folder of the artifact behind each port of a stage."""
    stage, made = runner.project.stage(name), dict[str, Artifact | None]()
    for upstream in runner.project.needed_for([name])[:-1]:
        step = runner.planner.step(upstream, made)
        if step.artifact is None:
            raise PipeError(f"stage {upstream.name} is out of date: {step.reason}", hint=f"pipe run {upstream.name}")
        made[upstream.gives] = step.artifact
    inputs = {}
    for port, kind in stage.takes.items():
        artifact = made[kind]
        if artifact is not None:
            inputs[port] = artifact.path
    return inputs
