"""Kills, several processes at once, damage, full and read-only disks: the right result, or one clear sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerline.pipeline.commands import housekeeping
from layerline.pipeline.errors import Unavailable
from layerline.pipeline.keys import env
from layerline.pipeline.records.store import DamagedError
from layerline.pipeline.run import plan
from tests.pipeline import driver, fakes
from tests.pipeline.fakes import Folder

CHANGES = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}


def dies_at(event: int, folder: Folder) -> bool:
    """Runs the project in a forked process that is killed before its n-th change of the state; False once it ends."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if name in CHANGES and str(folder.state) in str(arguments[0]):
                reads = name == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
                seen += not reads
                if seen == event and not reads:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            folder.run(["source"])
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_point_the_next_run_ends_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "fact", lambda name: "1")
    event, outcomes, adopted = 0, set(), 0
    while True:
        event += 1
        folder = Folder(tmp_path / str(event))
        if not dies_at(event, folder):
            break
        recorded = {json.loads(p.read_text())["stage"] for p in (folder.state / "ledger" / "keys").glob("*.json")}
        done = folder.run(["source"])
        assert done.passed, (event, [str(r.error) for r in done.results])
        assert not recorded & set(folder.listener.began), f"what was finished at {event} was made again"
        adopted += done.results[0].reason == "finished by a run that was cut short"
        outcomes.add(folder.artifact("source").name)
        assert fakes.read(folder.artifact("source") / "numbers.json") == [1.0, 2.0, 3.0]
        assert housekeeping.verify(folder.load())[1] == []
        assert housekeeping.collect(folder.load(), 1, dry_run=False) is not None  # the dead hold nothing
    assert len(outcomes) == 1 and adopted
    assert event > 40  # else the hook sees nothing


def wait_for(path: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not path():
        assert time.monotonic() < end, "it never got there"
        time.sleep(0.01)


def steps_done(folder: Folder) -> int:
    found = [p.read_text() for p in folder.state.glob("work/*/scratch/step")]
    return int(found[0] or 0) if found else 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_a_stage_goes_on_where_it_was(how: signal.Signals, folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {steps: 6, seconds: 0.1}\n")
    process = driver.start(folder.root, "run", "all")
    wait_for(lambda: steps_done(folder) >= 2)
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err == "\ninterrupted; what was finished is kept, and the same command goes on from there\n"
    else:
        assert process.returncode == -signal.SIGKILL
    done = folder.run()
    assert done.passed and folder.listener.began == ["slow"]
    assert done.results[-1].record is not None
    assert done.results[-1].record.metrics["resumed_at"] >= 2


@pytest.mark.slow
def test_eight_processes_make_each_artifact_once(folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {steps: 2, seconds: 0.1}\n")
    processes = [driver.start(folder.root, "run", "all", "--json") for _ in range(8)]
    documents = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        documents.append(json.loads(out))
    for stages in zip(*(d["stages"] for d in documents), strict=True):
        assert sorted(s["state"] for s in stages) == ["cached"] * 7 + ["ran"], stages[0]["name"]
        assert len({s["digest"] for s in stages}) == 1
    assert folder.ran() == []
    assert housekeeping.verify(folder.load())[1] == []


def test_three_forced_runs_at_once_end_as_each_would_alone(folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {steps: 2, seconds: 0.05}\n")
    folder.run()
    processes = [driver.start(folder.root, "run", "all", "--force", "--json") for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert [s["state"] for s in json.loads(out)["stages"]] == ["ran"] * 4
    assert folder.ran() == [] and housekeeping.verify(folder.load())[1] == []
    assert not [p for p in folder.state.glob("work/*") if p.is_dir()]


def test_a_collection_takes_nothing_from_a_run_that_goes_on(folder: Folder) -> None:
    folder.run(None, "double.factor=5")
    folder.run(None, "double.factor=6")
    folder.write("pipe.yaml", "slow: {steps: 8, seconds: 0.1}\n")
    process = driver.start(folder.root, "run", "all", "--set", "double.factor=5")
    wait_for(lambda: steps_done(folder) >= 1)
    assert housekeeping.collect(folder.load(), 0, dry_run=False) is None
    assert process.wait(20) == 0
    gone = housekeeping.collect(folder.load(), 0, dry_run=False)
    assert gone is not None and any("store" in g.path for g in gone)


def test_a_run_waits_for_a_collection(folder: Folder) -> None:
    from layerline.pipeline.records.run_lock import alone

    with alone(folder.state) as idle:
        assert idle
        process = driver.start(folder.root, "run", "source")
        time.sleep(0.6)
        assert process.poll() is None and not (folder.state / "store").exists()
    assert process.wait(20) == 0


# ------------------------------------------------------------------------------------------------ damage


def newest(folder: Folder, pattern: str) -> Path:
    return sorted(folder.state.glob(pattern))[-1]


def damage_store(folder: Folder, name: str, change: Callable[[Path], object]) -> None:
    path = folder.artifact("double") / name
    path.chmod(0o644)
    change(path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, Callable[[Folder], object]] = {
    "a flipped byte": lambda f: damage_store(f, "doubled.json", flip),
    "a truncated file": lambda f: damage_store(f, "doubled.json", truncate),
    "a missing file": lambda f: damage_store(f, "doubled.json", Path.unlink),
    "a flipped byte in the manifest": lambda f: damage_store(f, "artifact.json", flip),
    "a truncated manifest": lambda f: damage_store(f, "artifact.json", truncate),
    "an empty manifest": lambda f: damage_store(f, "artifact.json", lambda p: p.write_text("")),
    "a manifest of something else": lambda f: damage_store(f, "artifact.json", lambda p: p.write_text("[1]")),
    "a missing manifest": lambda f: damage_store(f, "artifact.json", Path.unlink),
    "a missing artifact": lambda f: shutil.rmtree(f.artifact("double")),
    "an emptied artifact": lambda f: [p.unlink() for p in f.artifact("double").iterdir()],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_artifact_is_made_again(name: str, folder: Folder) -> None:
    folder.run()
    path = folder.artifact("double")
    DAMAGES[name](folder)
    assert housekeeping.verify(folder.load())[1]
    assert folder.ran() == ["double"]
    assert folder.artifact("double") == path and fakes.read(path / "doubled.json") == [2.0, 4.0, 6.0]
    assert housekeeping.verify(folder.load())[1] == []


def test_any_byte_flipped_in_a_manifest_is_seen_or_harmless(folder: Folder) -> None:
    folder.run()
    path = folder.artifact("double") / "artifact.json"
    store = folder.runner().store
    before, text = store.get(path.parent.name), path.read_bytes()
    path.chmod(0o644)
    seen = 0
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1 << place % 7]) + text[place + 1 :])
        try:
            assert store.get(path.parent.name) == before, place
        except DamagedError:
            seen += 1
    assert seen > 0.6 * len(text)  # the rest is white space


STATE_DAMAGES: dict[str, tuple[str, list[str]]] = {
    "a truncated record is found in the runs": ("ledger/keys/*.json", []),
    "a truncated run": ("ledger/runs/*.json", []),
    "a truncated report is made again": ("ledger/reports/*.json", ["any"]),
    "a truncated memo": ("cache/digests.json", []),
}


@pytest.mark.parametrize("name", STATE_DAMAGES)
@pytest.mark.parametrize("cut", [0, 0.5, -3])
def test_a_truncated_file_of_the_state(name: str, cut: float, folder: Folder) -> None:
    pattern, reruns = STATE_DAMAGES[name]
    folder.run()
    (folder.state / "cache").mkdir(exist_ok=True)
    (folder.state / "cache" / "digests.json").write_text("{}" * 4)
    path = newest(folder, pattern)
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * cut) if cut >= 0 else int(cut)])
    assert len(folder.ran()) == len(reruns)
    assert folder.ran() == []
    assert housekeeping.verify(folder.load())[1] == []


NONSENSE = ["5", "null", "[]", '"text"', '{"a": 1}', "[" * 100_000, "1" * 5000, "\0"]
FILES = ["ledger/keys/*", "ledger/runs/*", "ledger/reports/*", "store/*/artifact.json", "cache/digests.json"]
FILES += ["running/gate", "work/*.lock", ".gitignore"]
FOLDERS = ["store/*", "ledger/keys", "ledger/runs", "ledger/reports"]
OUTER = ["ledger", "store", "work", "cache", "running"]


@pytest.mark.parametrize(
    ("places", "content"),
    [*((FILES, c) for c in [*NONSENSE, "folder", "link"]), *((p, c) for p in (FOLDERS, OUTER) for c in ("5", "link"))],
)
def test_a_state_of_another_form_is_told_and_made_again(places: list[str], content: str, folder: Folder) -> None:
    folder.run()
    (folder.state / "cache").mkdir(exist_ok=True)
    (folder.state / "cache" / "digests.json").touch()
    (folder.state / "work" / f"{folder.runner().planner.steps()[0].key}.lock").touch()
    outside = folder.write("outside/mine.txt", "mine")
    for path in [p for place in places for p in folder.state.glob(place)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        if content == "folder":
            (path / "inside").mkdir(parents=True)
        elif content == "link":
            path.symlink_to(outside if places is FILES else outside.parent)
        else:
            path.write_text(content)
    project = folder.load()
    planner = plan.open_planner(project)
    for step in planner.steps():
        assert step.artifact is None or places is OUTER
        planner.ledger.head(step.stage.name)
    _, problems = housekeeping.verify(project)
    assert bool(problems) is (places is not OUTER)
    assert housekeeping.collect(project, 1, dry_run=True) is not None
    assert folder.run().passed
    assert housekeeping.collect(project, 1, dry_run=False) is not None
    assert housekeeping.verify(project)[1] == []
    assert folder.ran() == []
    assert outside.read_text() == "mine" and [p.name for p in outside.parent.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("gone", ["store", "ledger", "cache", "work", "running", ""])
def test_a_deleted_part_of_the_state(gone: str, folder: Folder) -> None:
    folder.run()
    paths = {s: folder.artifact(s) for s in ("source", "double", "judge")}
    shutil.rmtree(folder.state / gone, ignore_errors=True)
    ran = folder.ran()
    assert ran == (["source", "double", "judge"] if gone in ("store", "ledger", "") else [])
    assert {s: folder.artifact(s) for s in paths} == paths


@pytest.mark.parametrize("content", ["", "{}", '{"a": 5}', "[]", '{"1.2.3": null}', "\0"])
def test_a_memo_of_nonsense(content: str, folder: Folder) -> None:
    folder.run()
    (folder.state / "cache").mkdir(exist_ok=True)
    (folder.state / "cache" / "digests.json").write_text(content)
    assert folder.ran() == []


# ------------------------------------------------------------------------------------------------ disks


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code), str(arguments[0]) if arguments else None)

    monkeypatch.setattr(os if function == "fsync" else Path, function, refused)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("function", ["fsync", "rename", "replace", "mkdir"])
def test_a_disk_that_refuses(function: str, code: int, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run(["source"])
    with monkeypatch.context() as context:
        refuse(context, function, code)
        done = folder.run()
        states = {r.name: r.state for r in done.results}
        assert states == {"source": "cached", "double": "failed", "judge": "blocked"}
        assert isinstance(done.results[1].error, Unavailable) and done.exit_code == 3
        assert done.results[1].error.what == os.strerror(code) and done.results[1].error.hint
    # What was finished and recorded before the rename was refused is not made again.
    assert folder.ran() == (["judge"] if function == "rename" else ["double", "judge"])


def test_a_read_only_project_that_is_up_to_date_is_all_hits(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()
    for function in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        refuse(monkeypatch, function, errno.EROFS)
    assert folder.ran() == []


def test_a_state_that_is_a_file(folder: Folder) -> None:
    folder.state.write_text("")
    done = folder.run()
    assert done.exit_code == 3
    assert isinstance(done.results[0].error, Unavailable)
    assert "a file lies where a folder should be" in str(done.results[0].error)
    with pytest.raises(OSError, match=r"\.layerline"):
        housekeeping.collect(folder.load(), 3, dry_run=False)
