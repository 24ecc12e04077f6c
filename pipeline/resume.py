"""`pipe resume`: the stage that goes on where it was cut short, and the proof that it does so bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.plan import open_planner
from layerline.pipeline.project import Project
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
