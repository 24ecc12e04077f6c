"""`pipe resume`: which training to resume, with which `--set` values, and the proof that resuming changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from layerline.pipeline.config.project import Project, as_options, load
from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.files import entries
from layerline.pipeline.report import Report
from layerline.pipeline.run.outcome import Listener
from layerline.pipeline.run.plan import SETS, asked, has_checkpoint, open_planner, order
from layerline.pipeline.run.workplace import temporary_work
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import Task
from layerline.pipeline.untrusted import launched


@runtime_checkable
class Resumes(Protocol):
    """A stage that keeps checkpoints in its scratch folder."""

    def prove_resume(self, work: Work, steps: int) -> Report:
        """Trains with and without an interruption, `steps` steps before and after it, and compares the results."""


def resumable(project: Project) -> Stage:
    """The project's stage that resumes from checkpoints. Raises ConfigError if there is none."""
    for stage in project.stages:
        if isinstance(stage, Resumes):
            return stage
    names = ", ".join(s.name for s in project.stages)
    raise ConfigError(f"this project has no training; its stages are {names}", hint="pipe run all")


def going_on(project: Project, stage: Stage) -> tuple[tuple[str, ...], str]:
    """The `--set` values with which the stage resumes, and a message about them (empty where there is none).

    These are the values that the project was read with, or else those of the most recent interrupted training.
    """
    lost = ""
    unfinished: list[tuple[Path, tuple[str, ...]]] = []
    if not project.sets:
        unfinished = list(_unfinished(project))
    for index, (work, sets) in enumerate(unfinished):
        options = as_options(sets)
        if has_checkpoint(work):
            message = f"{lost}\n"
            if sets:
                message += f"resuming with {options}"
            return sets, message.strip()
        if index == 0 and sets:
            again = f"pipe run {stage.name} {options}"
            lost = f"the most recent training, with {options}, left no checkpoint; to start it again: {again}"
    step = open_planner(project).step(stage, {})
    if lost or step.artifact or has_checkpoint(project.works / str(step.key)):
        return project.sets, lost
    return project.sets, f"no interrupted training has these settings: {stage.name} starts from the beginning"


def cut_short(project: Project) -> tuple[Path, tuple[str, ...]] | None:
    """Working folder and `--set` values of the newest training with a checkpoint whose key is still the same."""
    return next(((work, sets) for work, sets in _unfinished(project) if has_checkpoint(work)), None)


def to_prove(project: Project) -> tuple[Project, Stage, str]:
    """The project whose training is proved, its stage, and a message about its `--set` values.

    Without `--set` values, those of the most recent interrupted training are used.
    """
    interrupted = None
    if not project.sets:
        interrupted = cut_short(project)
    if interrupted is None or not interrupted[1]:
        return project, resumable(project), ""
    sets = interrupted[1]
    then = load(project.root, sets)
    return then, resumable(then), f"with {as_options(sets)}, as the interrupted training"


def _unfinished(project: Project) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Working folder and `--set` values of each training that could still be resumed, the newest first."""
    begun = [path for path in entries(project.works, f"*/{SETS}") if path.is_file()]
    for path in sorted(begun, key=lambda p: (order(p.parent), p.stat().st_mtime_ns), reverse=True):
        sets = asked(path.parent)
        with suppress(PipeError):  # pipe.yaml was edited so that it doesn't fit any more
            then = load(project.root, sets)
            step = open_planner(then).step(resumable(then), {})
            # The key still being the same means that code, data and settings are those it was begun with.
            if step.key == path.parent.name and step.artifact is None:
                yield path.parent, sets


def prove(project: Project, steps: int, listener: Listener) -> Report:
    """Proves that resuming changes no bit. Starts from an interrupted training if there is one; changes no file."""
    if launched()[1] > 1:
        raise ConfigError("--prove starts its own processes", hint="start it without torchrun")
    stage = resumable(project)
    # The real scratch folder is read, and never written: the proof works on a copy.
    work = project.works / str(open_planner(project).step(stage, {}).key)
    listener.started(stage, f"{steps} steps, a checkpoint, {steps} more")
    task = Task(project.root / project.task, project.root)
    with temporary_work(task, listener, {}, {}) as stage_work:
        return cast("Resumes", stage).prove_resume(replace(stage_work, scratch=work / "scratch"), steps)
