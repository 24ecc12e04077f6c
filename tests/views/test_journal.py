"""What a run writes about itself while it goes on."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from layerline.pipeline.records.run_lock import at_work
from layerline.pipeline.run.outcome import Result
from layerline.pipeline.run.runner import Runner
from layerline.views import journal
from layerline.views.journal import ROWS, Journal, Listeners
from tests.pipeline.fakes import Folder, Listener


def test_the_file_tells_stage_progress_and_rows(folder: Folder) -> None:
    project = folder.load()
    writer = Journal(project, "r1")
    assert journal.read(project.state) is None
    with at_work(project.state):
        begun = journal.read(project.state)
        assert begun is not None and begun.stages == []
        writer.started(project.stages[0], "never \x1b ran")
        writer.progress(3, 8, loss=0.25, lr=1e-3)
        writer.row({"step": 3.0, "loss": math.inf, "lr": 1e-3, "grad_norm/layer.weight": 1.0})
        writer.say("one \x1b[31m sentence")
        seen = journal.read(project.state)
        assert seen is not None
        assert [stage.state for stage in seen.stages] == ["running", *["waiting"] * (len(project.stages) - 1)]
        assert (seen.done, seen.total, seen.figures) == (3, 8, {"loss": "0.25", "lr": "0.001"})
        assert seen.logs == {project.stages[0].name: [{"step": 3.0, "lr": 1e-3}]}
        assert seen.said == ["one \\x1b[31m sentence"]
        writer.finished(Result(name=project.stages[0].name, state="ran", reason="never ran", seconds=2.5))
        done = journal.read(project.state)
        assert done is not None and (done.stages[0].state, done.stages[0].seconds) == ("ran", 2.5)
    assert journal.read(project.state) is None
    assert not list((project.state / "running").glob("*.json")), "the end of the run removes it"


def test_looking_leaves_nothing_behind(folder: Folder) -> None:
    state = folder.load().state
    assert journal.read(state) is None
    assert not state.exists()


def test_a_long_log_is_thinned(folder: Folder) -> None:
    project = folder.load()
    writer = Journal(project, "r1")
    with at_work(project.state):
        writer.started(project.stages[0], "")
        for step in range(ROWS + 1):
            writer.row({"step": float(step)})
        writer.say("")
        seen = journal.read(project.state)
    assert seen is not None
    (log,) = seen.logs.values()
    assert [row["step"] for row in log] == list(range(0, ROWS + 1, 2))


@pytest.mark.parametrize("text", ["", "[]", '{"stages": [{"name": "a", "state": "asleep"}]}', "[" * 100_000])
def test_a_file_of_another_form_tells_nothing(text: str, folder: Folder) -> None:
    state = folder.load().state
    with at_work(state):
        (state / "running" / f"{os.getpid()}.json").write_text(text)
        seen = journal.read(state)
    assert seen is not None and seen.stages == []


def test_a_real_run_is_told_to_all_listeners(folder: Folder) -> None:
    project, other = folder.load(), Listener()
    seen: list[journal.Progress | None] = []
    other.finished = lambda result: seen.append(journal.read(project.state))  # type: ignore[method-assign]
    assert Runner(project, Listeners(Journal(project, "r1"), other)).run().passed
    last = seen[-1]
    assert last is not None and {stage.state for stage in last.stages} == {"ran"}
    assert other.began == [stage.name for stage in project.stages]


def test_what_a_killed_run_left_goes(folder: Folder, tmp_path: Path) -> None:
    running = folder.load().state / "running"
    running.mkdir(parents=True)
    for name in ("99999999-0a0b0c0d.lock", "99999999.json"):
        (running / name).write_text("")
    assert journal.read(running.parent) is None
    with at_work(running.parent):
        pass
    assert [path.name for path in running.iterdir()] == ["gate"]
