"""`pipe resume`: the training that was cut short, what it was asked for, and the proof that going on changes no bit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.plan import CHECKPOINTS, SETS, has_checkpoint, open_planner
from layerline.pipeline.project import Project, load, written
from layerline.pipeline.report import Report
from layerline.pipeline.runner import Listener, ranks
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import Task


@runtime_checkable
class Resumes(Protocol):
    """A stage that keeps checkpoints in its scratch folder."""

    def prove_resume(self, work: Work, steps: int) -> Report:
        """Compares going on from a checkpoint, `steps` steps before it and after it, with not having stopped; the
        scratch folder is only read."""


def resumable(project: Project) -> Stage:
    """The project's stage that goes on from checkpoints.

    Raises:
        ConfigError: it has none: it begins behind its training.
    """
    found = next((s for s in project.stages if isinstance(s, Resumes)), None)
    if found is None:
        names = ", ".join(s.name for s in project.stages)
        raise ConfigError(f"nothing is trained in this project; its stages are {names}", hint="pipe run all")
    return found


def going_on(project: Project, stage: Stage) -> tuple[tuple[str, ...], str]:
    """The `--set` values with which the stage goes on, and what is to be said of that.

    Those that the project was read with; without any, those that the training which was cut short last had, as long
    as with them it would still be the same training.
    """
    if not project.sets:
        for sets in _cut_short(project.state):
            with suppress(ConfigError):  # pipe.yaml was edited so that they don't fit it any more
                if _goes_on(load(project.root, sets), stage.name):
                    return sets, f"going on with {written(sets)}" if sets else ""
    step = open_planner(project).step(stage, {})
    if step.artifact or _goes_on(project, stage.name):
        return project.sets, ""
    return project.sets, f"no training was cut short that goes on with these settings: {stage.name} begins anew"


def _goes_on(project: Project, stage: str) -> bool:
    step = open_planner(project).step(project.stage(stage), {})
    return step.artifact is None and has_checkpoint(project.state / "work" / str(step.key))


def _cut_short(state: Path) -> Iterator[tuple[str, ...]]:
    """What each work that left a checkpoint was overridden with, the newest first."""
    found = [work for work in (state / "work").glob("*") if has_checkpoint(work)]
    for work in sorted(found, key=lambda w: (w / CHECKPOINTS).stat().st_mtime_ns, reverse=True):
        with suppress(OSError, ValueError):  # it was never written, or torn
            yield tuple(json.loads((work / SETS).read_text("utf-8")))


def prove(project: Project, steps: int, listener: Listener) -> Report:
    """The proof for the project as it stands; it changes nothing in it.

    It begins where interrupted work stands, where there is some.

    Raises:
        ConfigError: nothing is trained here, or a launcher started several processes.
    """
    if ranks() > 1:
        raise ConfigError("the proof starts its own processes, one at a time", hint="start it without torchrun")
    stage = resumable(project)
    key = open_planner(project).step(stage, {}).key
    listener.started(stage, f"{steps} steps, a checkpoint, {steps} more")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = project.state / "work" / str(key) / "scratch"
        task = Task(project.root / project.task)
        work = Work(inputs={}, task=task, out=Path(temporary), scratch=scratch, log=listener)
        return cast("Resumes", stage).prove_resume(work, steps)
