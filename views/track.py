"""`track:` in pipe.yaml: the figures of a run, its page and the digests of its artifacts, in TensorBoard or MLflow."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from layerline.pipeline.commands.settings import settings
from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import PipeError, Unavailable, brief, words
from layerline.pipeline.files import write_atomic
from layerline.pipeline.run.check import require_tracker
from layerline.pipeline.run.outcome import Listener, Outcome, Result
from layerline.pipeline.run.plan import open_planner
from layerline.pipeline.stage import Stage
from layerline.views import html

FLUSH_S = 2.0
BATCH = 900  # figures; MLflow takes 1,000 at once
LONGEST = 500  # characters of a setting
_UNFIT = re.compile(r"[^\w\-./ ]")  # what MLflow refuses in a name


class Tracker(Protocol):
    """Where a run is logged: figures of a step, texts, and at its end the page, which may be empty, and a status."""

    def figures(self, figures: Mapping[str, float], step: int) -> None: ...
    def texts(self, texts: Mapping[str, str]) -> None: ...
    def close(self, page: str, outcome: str) -> None: ...


class TensorBoard:
    """Event files in `runs/RUN`, with the page beside them."""

    def __init__(self, project: Project, run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = project.root / "runs" / run_id
        self._writer: Any = SummaryWriter(str(self._folder))

    def figures(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def texts(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, text)

    def close(self, page: str, outcome: str) -> None:
        self.texts({"outcome": outcome})
        self._writer.close()
        if page:
            write_atomic(self._folder / "report.html", page)


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in the project's `mlflow.db`. The page is an artifact of it."""

    def __init__(self, project: Project, run_id: str) -> None:
        # MLflow reads this when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        location = None
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = f"sqlite:///{project.root / 'mlflow.db'}"
            location = (project.root / "mlartifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(project.name)
        if experiment is None:
            number = self._client.create_experiment(project.name, artifact_location=location)
        else:
            number = experiment.experiment_id
        self._run = self._client.create_run(number, run_name=run_id).info.run_id
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()

    def figures(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(_UNFIT.sub("_", name), value, now, step) for name, value in figures.items()]
        # A transaction for each row would slow down a training of quick steps.
        if len(self._waiting) > BATCH or time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        for start in range(0, len(self._waiting), BATCH):
            self._client.log_batch(self._run, metrics=self._waiting[start : start + BATCH])
        self._waiting = []
        self._flushed = time.monotonic()

    def texts(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.set_tag(self._run, _UNFIT.sub("_", name), text)

    def close(self, page: str, outcome: str) -> None:
        self._flush()
        if page:
            self._client.log_text(self._run, page, "report.html")
        self._client.set_terminated(self._run, outcome)


_TRACKERS: Mapping[str, Callable[[Project, str], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Tracking:
    """A listener that logs a run from the first stage at work on: a run in which all is cached is not logged."""

    def __init__(self, project: Project, run_id: str, listener: Listener) -> None:
        self._project, self._run_id, self._listener = project, run_id, listener
        self._tracker: Tracker | None = None
        self._is_opened = project.track is None
        self._stage = ""
        self._results: list[Result] = []

    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: float | str) -> None: ...

    def started(self, stage: Stage, reason: str) -> None:  # noqa: ARG002  the protocol's
        """Opens the tracker. Raises Unavailable: its library is missing, or it can't be opened."""
        self._stage = stage.name
        if self._is_opened:
            return
        self._is_opened = True
        name = str(self._project.track)
        require_tracker(name)
        try:
            self._tracker = _TRACKERS[name](self._project, self._run_id)
        except Exception as error:  # the border to the tracker
            raise Unavailable(f"{name} can't be opened: {brief(error)}", where="track") from error

    def row(self, figures: Mapping[str, float]) -> None:
        named = {f"{self._stage}/{name}": value for name, value in figures.items() if name != "step"}
        self._send(lambda tracker: tracker.figures(_finite(named), int(figures["step"])))

    def finished(self, result: Result) -> None:
        self._results.append(result)
        self._send(self._log_results)

    def _log_results(self, tracker: Tracker) -> None:
        for result in self._results:
            texts: dict[str, str] = {f"state/{result.name}": result.state}
            if result.record is not None:
                named = {f"figures/{result.name}/{name}": value for name, value in result.record.metrics.items()}
                tracker.figures(_finite(named), 0)
                texts[f"digest/{result.name}"] = result.record.digest
                for setting in settings(result.record):
                    if setting.differs:
                        texts[f"setting/{result.name}.{setting.name}"] = setting.value[:LONGEST]
            tracker.texts(texts)
        self._results = []

    def end(self, done: Outcome | None) -> None:
        """Logs the page of the run and closes the tracker; None stands for an interrupt."""
        if self._tracker is None:
            return
        page, outcome = "", "KILLED"
        if done is not None:
            page = self._page(done)
            outcome = "FINISHED" if done.passed else "FAILED"
        self._send(lambda tracker: tracker.close(page, outcome))
        self._tracker = None

    def _page(self, done: Outcome) -> str:
        """The page of the run; empty where it can't be made, such as with a damaged report of a cached stage."""
        try:
            planner = open_planner(self._project)
            return html.of_run(planner, planner.ledger.find_run(done.run))
        except (PipeError, OSError) as error:
            self._listener.say(f"{self._project.track} gets no page of this run: {words(error)}")
            return ""

    def _send(self, log: Callable[[Tracker], None]) -> None:
        """Calls the tracker. What fails in it is told once, and the run goes on without it."""
        if self._tracker is None:
            return
        try:
            log(self._tracker)
        except Exception as error:  # noqa: BLE001 - the border to the tracker: a server that went away, a full disk
            self._tracker = None
            self._listener.say(f"{self._project.track} logs no more of this run: {brief(error)}")


def _finite(figures: Mapping[str, object]) -> dict[str, float]:
    """The numbers among figures. Trackers have no place for others."""
    numbers = {}
    for name, value in figures.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers
