"""Runs logged by TensorBoard and MLflow, read again with their own libraries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from layerline.pipeline.errors import ConfigError, Unavailable
from layerline.pipeline.run.check import check, require_tracker
from layerline.pipeline.run.outcome import Outcome
from layerline.pipeline.run.runner import Runner
from layerline.views import terminal
from layerline.views.journal import watched_run
from layerline.views.track import Tracking
from tests.pipeline.fakes import Folder, Listener

RUN = "20250301-100011-000000-ab"


def logged(folder: Folder, tracker: str, *, interrupted: bool = False) -> Outcome:
    """A run with two rows of a training log in its first stage."""
    project = folder.load(f"track={tracker}")
    tracking = Tracking(project, RUN, folder.listener)

    def finished(result: Any) -> None:
        if result.name == project.stages[0].name:
            tracking.row({"step": 10.0, "loss": 0.5, "lr": float("inf")})
            tracking.row({"step": 20.0, "loss": 0.25})
        Tracking.finished(tracking, result)

    tracking.finished = finished  # type: ignore[method-assign]
    done = Runner(project, tracking).run(run_id=RUN)
    tracking.end(None if interrupted else done)
    assert folder.listener.said == []
    return done


def test_tensorboard_gets_curves_figures_digests_and_the_page(folder: Folder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = logged(folder, "tensorboard")
    events = EventAccumulator(str(folder.root / "runs" / RUN))
    events.Reload()
    first = done.results[0].name
    assert [(event.step, event.value) for event in events.Scalars(f"{first}/loss")] == [(10, 0.5), (20, 0.25)]
    tags = events.Tags()
    assert f"{first}/lr" not in tags["scalars"], "an infinite figure has no place on a curve"
    for result in done.results:
        assert result.record is not None
        (text,) = events.Tensors(f"digest/{result.name}/text_summary")
        assert text.tensor_proto.string_val == [result.record.digest.encode()]
        for name, value in result.record.metrics.items():
            if isinstance(value, int | float):
                (figure,) = events.Scalars(f"figures/{result.name}/{name}")
                assert figure.value == pytest.approx(value)
    (outcome,) = events.Tensors("outcome/text_summary")
    assert outcome.tensor_proto.string_val == [b"FINISHED"]
    assert "Follow a layer" in (folder.root / "runs" / RUN / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the project", "MLFLOW_TRACKING_URI"])
def test_mlflow_gets_curves_figures_digests_and_the_page(
    where: str, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder.root}/mlflow.db"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if where == "MLFLOW_TRACKING_URI":
        uri = f"sqlite:///{tmp_path}/elsewhere.db"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.chdir(tmp_path)
    done = logged(folder, "mlflow")
    assert (folder.root / "mlflow.db").exists() == (where == "the project")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(folder.load().name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    first = done.results[0].name
    curve = client.get_metric_history(run.info.run_id, f"{first}/loss")
    assert [(point.step, point.value) for point in curve] == [(10, 0.5), (20, 0.25)]
    for result in done.results:
        assert result.record is not None
        assert run.data.tags[f"digest/{result.name}"] == result.record.digest
        for name, value in result.record.metrics.items():
            if isinstance(value, int | float):
                assert run.data.metrics[f"figures/{result.name}/{name}"] == value
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.slow
def test_an_interrupted_run_is_ended(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged(folder, "mlflow", interrupted=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.root}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])  # type: ignore[union-attr]
    assert run.info.status == "KILLED" and client.list_artifacts(run.info.run_id) == []


class Broken:
    """A tracker whose server goes away."""

    def __init__(self, *_: object) -> None: ...

    def figures(self, figures: object, step: int) -> None:
        raise ConnectionError("the server has gone")

    texts = close = figures


def test_a_tracker_that_fails_is_named_and_the_run_goes_on(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerline.views.track._TRACKERS", {"mlflow": Broken})
    monkeypatch.setattr("layerline.views.track.require_tracker", lambda name: None)
    project = folder.load("track=mlflow")
    tracking = Tracking(project, RUN, folder.listener)
    done = Runner(project, tracking).run()
    tracking.end(done)
    assert done.passed
    assert folder.listener.said == ["mlflow logs no more of this run: ConnectionError: the server has gone"]


def test_a_page_that_cannot_be_made_is_named_and_the_run_stays_good(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerline.views.track._TRACKERS", {"mlflow": Recorded})
    monkeypatch.setattr("layerline.views.track.require_tracker", lambda name: None)
    monkeypatch.setattr(Recorded, "opened", [])
    folder.run()
    project = folder.load("track=mlflow", "judge.at_least=1")
    record = folder.runner().ledger.head("source")
    assert record is not None
    tracking = Tracking(project, RUN, folder.listener)
    done = Runner(project, tracking).run(run_id=RUN)
    for path in folder.state.rglob(f"{record.report}*"):
        path.chmod(0o600)
        path.write_text("{")
    tracking.end(done)
    (tracker,) = Recorded.opened
    assert done.passed and tracker.logged["outcome"] == "FINISHED" and tracker.logged["page"] == ""
    assert [text.split(":")[0] for text in folder.listener.said] == ["mlflow gets no page of this run"]


class Recorded:
    """A tracker that keeps what it is given."""

    opened: ClassVar[list[Recorded]] = []

    def __init__(self, project: object, run_id: str) -> None:
        self.run_id = run_id
        self.logged: dict[str, object] = {}
        Recorded.opened.append(self)

    def figures(self, figures: dict[str, float], step: int) -> None:
        self.logged |= figures

    def texts(self, texts: dict[str, str]) -> None:
        self.logged |= texts

    def close(self, page: str, outcome: str) -> None:
        self.logged |= {"page": page, "outcome": outcome}


@pytest.mark.parametrize("least", [0, 9])
def test_the_command_logs_the_run_under_its_id(least: int, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerline.views.track._TRACKERS", {"mlflow": Recorded})
    monkeypatch.setattr("layerline.views.track.require_tracker", lambda name: None)
    monkeypatch.setattr(Recorded, "opened", [])
    project = folder.load("track=mlflow", f"judge.at_least={least}", "double.factor=3")
    done = watched_run(project, terminal.Silent(), None, force=False)
    (tracker,) = Recorded.opened
    assert done.passed == (least == 0) and tracker.run_id == done.run
    assert tracker.logged["outcome"] == {True: "FINISHED", False: "FAILED"}[done.passed]
    assert "Follow a layer" in str(tracker.logged["page"]) and done.run in str(tracker.logged["page"])
    assert tracker.logged["state/source"] == "ran" and tracker.logged["setting/double.factor"] == "3"


def test_a_run_in_which_nothing_works_is_not_logged(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()
    monkeypatch.setattr("layerline.views.track._TRACKERS", {})
    project = folder.load("track=tensorboard")
    tracking = Tracking(project, RUN, folder.listener)
    done = Runner(project, tracking).run()
    tracking.end(done)
    assert [result.state for result in done.results] == ["cached"] * len(done.results)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_library_is_told_by_check_and_by_run(
    name: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else found(package))
    monkeypatch.setitem(sys.modules, name, None)
    project = folder.load(f"track={name}")
    (error,) = [finding for finding in check(project).findings if finding.state == "error"]
    assert (error.item, error.exit_code) == ("track", 3) and "layerline[track]" in error.hint
    with pytest.raises(Unavailable, match=f"{name} is not installed"):
        require_tracker(name)
    tracking = Tracking(project, RUN, Listener())
    done = Runner(project, tracking).run()
    tracking.end(done)
    assert done.exit_code == 3 and f"{name} is not installed" in str(done.error)


def test_an_unknown_tracker_is_refused_with_its_line(folder: Folder) -> None:
    folder.write("pipe.yaml", "name: a\ntrack: tensorbord\n")
    with pytest.raises(ConfigError, match="expected tensorboard or mlflow") as refused:
        folder.load()
    assert "pipe.yaml:2" in refused.value.where and "tensorboard" in refused.value.hint
