"""What a run is doing, in one small file of the project's state while it goes on: `pipe report --serve` reads it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from layerline.pipeline.commands.lookup import LogRows
from layerline.pipeline.config.project import Project
from layerline.pipeline.files import write_own
from layerline.pipeline.records.ledger import new_run_id
from layerline.pipeline.records.run_lock import going_on
from layerline.pipeline.run.outcome import Listener, Outcome, Result
from layerline.pipeline.run.runner import Runner
from layerline.pipeline.stage import Stage
from layerline.pipeline.untrusted import launched, printable, read_json
from layerline.views import lines
from layerline.views.curves import DRAWN
from layerline.views.formatting import figure, heading

EVERY_S = 0.5  # between two writes
ROWS = 512  # of a training log; when there are more, every second one goes
SAID = 6  # sentences
_BYTES = 1 << 22


@dataclass(kw_only=True)
class StageProgress:
    """A stage of the run."""

    name: str
    state: Literal["waiting", "running", "ran", "cached", "failed", "blocked"] = "waiting"
    seconds: float = 0.0
    text: str = ""  # why it runs; once it is done, its figures or its error


@dataclass(kw_only=True)
class Progress:
    """A run that is going on. `done` of `total` units of the stage at work are finished."""

    stages: list[StageProgress]
    run: str = ""  # the id under which it will be filed
    done: int = 0
    total: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    logs: dict[str, LogRows] = field(default_factory=dict)  # rows of the training log by stage


_PROGRESS = TypeAdapter(Progress)


def read(state: Path) -> Progress | None:
    """What the newest run that is going on in a project does; None where there is none."""
    progress = None
    for path in going_on(state):
        progress = Progress(stages=[])  # it has not begun with a stage, or is not of the command line
        with suppress(OSError, ValueError):
            return _PROGRESS.validate_python(read_json(path, size=_BYTES))
    return progress


class Journal:
    """A listener that keeps the file up to date. The lock of the run (`run_lock.at_work`) removes it at the end."""

    def __init__(self, project: Project, run_id: str) -> None:
        self._state = project.state
        self._path = project.state / "running" / f"{os.getpid()}.json"
        self._progress = Progress(stages=[StageProgress(name=stage.name) for stage in project.stages], run=run_id)
        self._by_name = {stage.name: stage for stage in self._progress.stages}
        self._at_work = ""
        self._written = -math.inf

    def say(self, text: str) -> None:
        self._progress.said = [*self._progress.said, printable(text)][-SAID:]
        self._write()

    def started(self, stage: Stage, reason: str) -> None:
        self._at_work = stage.name
        now = self._by_name[stage.name]
        now.state, now.text = "running", reason
        self._progress.done = self._progress.total = 0
        self._progress.figures = {}
        self._write()

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        self._progress.done, self._progress.total = done, total
        self._progress.figures = {heading(name): figure(value) for name, value in fields.items()}
        self._write_if_due()

    def row(self, figures: Mapping[str, float]) -> None:
        log = self._progress.logs.setdefault(self._at_work, [])
        # A row may have a column for each parameter: the file is written twice a second, and its size is bounded.
        log.append({name: value for name, value in figures.items() if name in DRAWN and math.isfinite(value)})
        if len(log) > ROWS:
            del log[1::2]
        self._write_if_due()

    def finished(self, result: Result) -> None:
        now = self._by_name[result.name]
        now.state, now.seconds = result.state, result.seconds
        now.text = result.reason
        if result.error is not None:
            now.text = str(result.error)
        elif result.record is not None:
            now.text = ", ".join(lines.figures(result.record.metrics))
        self._write()

    def _write_if_due(self) -> None:
        if time.monotonic() - self._written > EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        with suppress(OSError):  # a project that can't be written can't be watched, but it runs
            write_own(self._path, json.dumps(asdict(self._progress)), self._state, durable=False)


class Listeners:
    """Several listeners as one."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def say(self, text: str) -> None:
        for listener in self._listeners:
            listener.say(text)

    def started(self, stage: Stage, reason: str) -> None:
        for listener in self._listeners:
            listener.started(stage, reason)

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        for listener in self._listeners:
            listener.progress(done, total, **fields)

    def row(self, figures: Mapping[str, float]) -> None:
        for listener in self._listeners:
            listener.row(figures)

    def finished(self, result: Result) -> None:
        for listener in self._listeners:
            listener.finished(result)


def watched_run(project: Project, listener: Listener, names: Sequence[str] | None, *, force: bool) -> Outcome:
    """Runs stages. The first rank keeps the file for `pipe report --serve`, and logs where pipe.yaml says."""
    if launched()[0]:
        return Runner(project, listener).run(names, force=force)
    run_id = new_run_id()
    listeners = Listeners(listener, Journal(project, run_id))
    if project.track is None:
        return Runner(project, listeners).run(names, force=force, run_id=run_id)
    from layerline.views.track import Tracking  # here: it imports the page

    tracking = Tracking(project, run_id, listener)
    done = None
    try:
        done = Runner(project, Listeners(listeners, tracking)).run(names, force=force, run_id=run_id)
    finally:
        tracking.end(done)
    return done
