"""init, verify, gc."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml

from layerline.pipeline.commands import housekeeping
from layerline.pipeline.commands.housekeeping import Garbage
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.init import from_files
from layerline.pipeline.records.run_lock import at_work, temporary_folder
from layerline.pipeline.run import check
from tests.pipeline.fakes import Folder


def collect(folder: Folder, keep: int, *sets: str, dry_run: bool = False) -> list[str]:
    gone = housekeeping.collect(folder.load(*sets), keep, dry_run=dry_run)
    assert gone is not None
    return [g.path for g in gone]


def stored(folder: Folder) -> set[str]:
    return {p.name for p in (folder.state / "store").iterdir()}


# ------------------------------------------------------------------------------------------------ init


def test_init_writes_a_project_of_two_files(tmp_path: Path) -> None:
    written = from_files.from_template(tmp_path / "new" / "project", "mnist")
    assert sorted(p.name for p in (tmp_path / "new" / "project").iterdir()) == ["pipe.yaml", "task.py"]
    assert [p.name for p in written] == ["pipe.yaml", "task.py"]
    examples = Path(__file__).parents[2] / "examples" / "mnist"
    config, task = ((examples / p.name).read_text() for p in written)
    assert [p.read_text() for p in written] == [config.replace("name: mnist\n", "name: project\n"), task]


@pytest.mark.parametrize("template", ["mnist", "blank"])
@pytest.mark.parametrize("name", ["digits", "10", "on: off # \\1", "null"])
def test_a_project_is_called_after_its_folder(template: str, name: str, tmp_path: Path) -> None:
    from_files.from_template(tmp_path / name, template)
    text = (tmp_path / name / "pipe.yaml").read_text()
    assert yaml.safe_load(text)["name"] == name
    assert "train:" in text  # what follows the name stays


@pytest.mark.parametrize("there", ["pipe.yaml", "task.py"])
def test_init_overwrites_nothing(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(
        ConfigError, match=f"{there}: it is there already\n  choose another folder; nothing was written"
    ):
        from_files.from_template(tmp_path, "mnist")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {there: "mine"}


def test_init_refuses_what_it_can_not_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no template 'nmist'\n  there are: .*mnist"):
        from_files.from_template(tmp_path, "nmist")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        from_files.from_template(tmp_path / "file", "mnist")


# ------------------------------------------------------------------------------------------------ verify


def test_verify_reads_everything_again(folder: Folder) -> None:
    assert housekeeping.verify(folder.load()) == (0, [])
    folder.run()
    checked, problems = housekeeping.verify(folder.load())
    assert (checked, problems) == (6, [])  # three artifacts, three reports
    path = folder.artifact("double")
    (path / "doubled.json").chmod(0o644)
    (path / "doubled.json").write_text("[9]")
    shutil.rmtree(folder.artifact("judge"))
    report = next(p for p in (folder.state / "ledger" / "reports").iterdir() if b"source" in p.read_bytes())
    report.write_text("{}")
    told = {f"{p.what}: {p.fault}" for p in housekeeping.verify(folder.load())[1]}
    assert told == {
        f"artifact {path.name[:12]}: doubled.json has 3 bytes, not 15",
        f"artifact {folder.artifact('judge').name[:12]} of judge: missing",
        f"report of source {report.stem[:12]}: missing or damaged",
    }
    assert folder.ran() == ["source", "double", "judge"]  # as `pipe verify` promises
    assert housekeeping.verify(folder.load())[1] == []


def test_verify_believes_no_memo(folder: Folder) -> None:
    folder.run()
    path = folder.artifact("double") / "doubled.json"
    memo = folder.state / "cache" / "digests.json"
    memo.parent.mkdir(exist_ok=True)
    s = path.stat()
    stamp = f"{s.st_dev}.{s.st_ino}.{s.st_size}.{s.st_mtime_ns}.{s.st_ctime_ns}"
    memo.write_text(json.dumps({stamp: "0" * 64}))
    assert housekeeping.verify(folder.load())[1] == []


# ------------------------------------------------------------------------------------------------ gc


def test_gc_keeps_the_newest_runs_and_what_the_project_needs(folder: Folder) -> None:
    made = {}
    for factor in (2, 3, 4, 5):
        folder.run(None, f"double.factor={factor}")
        made[factor] = {folder.artifact("double").name, folder.artifact("judge").name}
    everything, unneeded = stored(folder), made[3] - made[2] - made[4] - made[5]
    assert collect(folder, 9) == []
    assert stored(folder) == everything

    listed = collect(folder, 2, dry_run=True)
    assert stored(folder) == everything
    assert [p for p in listed if "/store/" in p] == sorted(f".layerline/store/{d}" for d in unneeded)
    assert collect(folder, 2) == listed
    assert stored(folder) == everything - unneeded
    assert collect(folder, 2) == []
    assert folder.ran() == []  # factor 2 is what the project says
    assert folder.ran(None, "double.factor=5") == []
    assert folder.ran(None, "double.factor=3") == ["double"]
    assert housekeeping.verify(folder.load())[1] == []


def test_gc_of_everything_keeps_the_project_as_it_stands(folder: Folder) -> None:
    folder.run(None, "double.factor=5")
    folder.run()
    collect(folder, 0)
    assert not list((folder.state / "ledger" / "runs").iterdir())
    assert folder.ran() == []
    assert len(stored(folder)) == 3


def test_gc_removes_dead_work_and_keeps_what_would_be_resumed(folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {}\n")
    folder.run(["judge"])
    key = folder.runner().planner.steps()[-1].key
    work = folder.state / "work"
    for name in (str(key), "0" * 64):
        (work / name / "scratch").mkdir(parents=True)
        (work / name / "scratch" / "step").write_text("2")
    (folder.state / "store" / ".gone-x").mkdir()
    collect(folder, 1)
    assert [p.name for p in work.iterdir() if p.is_dir()] == [key]
    assert not (folder.state / "store" / ".gone-x").exists()
    done = folder.run()
    assert done.results[-1].record is not None and done.results[-1].record.metrics["resumed_at"] == 2


def test_gc_touches_nothing_while_a_run_goes_on(folder: Folder) -> None:
    folder.run()
    with at_work(folder.state):
        assert housekeeping.collect(folder.load("double.factor=3"), 0, dry_run=False) is None
    assert len(stored(folder)) == 3
    (folder.state / "running" / "12-dead.lock").touch()  # left by a run that was killed
    assert collect(folder, 0, "double.factor=3")
    assert len(stored(folder)) == 1
    assert [p.name for p in (folder.state / "running").iterdir()] == ["gate"]


def test_gc_of_nothing(folder: Folder) -> None:
    assert collect(folder, 3) == []
    assert not folder.state.exists()


def test_only_places_of_the_state_are_counted() -> None:
    paths = [
        ".layerline/store/aa",
        ".layerline/ledger/runs/b.json",
        "/tmp/store/work/layerline-x",
        ".layerline/x/store/y",
    ]
    assert housekeeping.counted([Garbage(path, 0) for path in paths]) == ["1 run", "1 artifact"]
    assert housekeeping.counted([Garbage("/tmp/work/layerline-x", 0)]) == ["1 record"]


def test_gc_counts_bytes(folder: Folder) -> None:
    folder.run()
    gone = housekeeping.collect(folder.load("double.factor=3"), 0, dry_run=True)
    sizes = {g.path: g.size for g in gone or ()}
    path = folder.artifact("double")
    assert sizes[f".layerline/store/{path.name}"] == sum(p.stat().st_size for p in path.iterdir())


def test_gc_removes_what_killed_processes_left_half_written(folder: Folder) -> None:
    folder.run()
    (folder.state / "cache").mkdir(exist_ok=True)
    places = ("ledger/keys", "ledger/reports", "ledger/runs", "cache", ".")
    left = [folder.state / place / ".0123.json.4242.1234567" for place in places]
    for path in left:
        path.write_text("{")
    assert sorted(collect(folder, 9, dry_run=True)) == sorted(p.relative_to(folder.root).as_posix() for p in left)
    collect(folder, 9)
    assert not any(path.exists() for path in left)
    assert (folder.state / ".gitignore").exists() and folder.ran() == []


def test_gc_removes_temporary_folders_of_killed_processes_alone(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("layerline-killed", "layerline-killed-early", "layerline-just-made", "other"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "layerline-killed" / ".held").touch()
    os.utime(tmp_path / "layerline-killed-early", (1, 1))
    (tmp_path / "layerline-link").symlink_to(tmp_path / "other")
    folder.run()
    with temporary_folder() as ours:
        assert ours.parent == tmp_path
        gone = collect(folder, 9)
        assert gone == [str(tmp_path / "layerline-killed"), str(tmp_path / "layerline-killed-early")]
        assert ours.is_dir()
    assert not ours.exists()
    left = {p.name for p in tmp_path.iterdir()} - {"project"}
    assert left == {"layerline-just-made", "layerline-link", "other"} and (tmp_path / "other" / "deep").is_dir()


@pytest.mark.parametrize("id_", ["../../../victim", "/victim"])
def test_gc_removes_nothing_outside_of_the_state(id_: str, folder: Folder, tmp_path: Path) -> None:
    folder.run()
    victim = tmp_path / "victim.json"
    victim.write_text("mine")
    (run,) = (folder.state / "ledger" / "runs").iterdir()
    raw = json.loads(run.read_text())
    named = str(tmp_path / "victim") if id_ == "/victim" else id_
    run.with_name("z.json").write_text(json.dumps(raw | {"id": named}))
    for record in raw["records"]:
        record["report"] = record["digest"] = record["key"] = named
    run.with_name("y.json").write_text(json.dumps(raw | {"id": "y"}))
    (folder.state / "store" / "link").symlink_to(tmp_path)
    (folder.state / "work" / "link").symlink_to(tmp_path)
    told = [p.what for p in housekeeping.verify(folder.load())[1]]
    assert told == ["run y", "run z"]
    collect(folder, 0)
    assert victim.read_text() == "mine" and folder.root.is_dir()
    assert housekeeping.verify(folder.load())[1] == []
    assert folder.ran() == []


def test_gc_follows_no_link_in_the_state(folder: Folder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ".x.1.2").write_text("mine")
    folder.run()
    shutil.rmtree(folder.state / "cache")
    (folder.state / "cache").symlink_to(victim)
    (folder.state / "work" / ("0" * 64)).symlink_to(victim)
    (folder.state / "store" / ("0" * 64)).symlink_to(victim)
    gone = {g.path: g.size for g in housekeeping.collect(folder.load(), 3, dry_run=True) or ()}
    assert gone == {f".layerline/work/{'0' * 64}": 0, f".layerline/store/{'0' * 64}": 0}
    check.remember(folder.load(), "0" * 64)
    collect(folder, 3)
    assert [p.name for p in victim.iterdir()] == [".x.1.2"] and check.passed_before(folder.load(), "0" * 64)


@pytest.mark.parametrize("name", ["work", ".gitignore", "notes.txt"])
def test_a_link_in_the_place_of_the_state_is_refused(name: str, folder: Folder, tmp_path: Path) -> None:
    home = tmp_path / "outside" / "home"
    (home / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    folder.state.symlink_to(home)
    for command in (lambda: collect(folder, 0), folder.run, lambda: housekeeping.verify(folder.load())):
        with pytest.raises(ConfigError, match=r"\.layerline: it is a link to '.*home'"):
            command()
    assert sorted(tmp_path.rglob("*")) == sorted([*before, folder.state])


def test_gc_leaves_what_has_no_name_of_layerline_s(folder: Folder) -> None:
    folder.run()
    places = ("store", "work", "running", "cache", "ledger", "ledger/runs", "ledger/keys", "ledger/reports", ".")
    kept = []
    for place in places:
        for name in ("thesis", ".thesis", "thesis.lock", "thesis.tex"):
            path = folder.state / place / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
            kept.append(path)
    (folder.state / "work" / "photos").mkdir()
    collect(folder, 0)
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)
    assert (folder.state / "work" / "photos").is_dir() and folder.ran() == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_named_pipe_in_the_state_is_damage_and_nothing_waits_for_it(folder: Folder) -> None:
    folder.run()
    damaged = [*(folder.state / "ledger").rglob("*.json"), *(folder.state / "store").rglob("*.json")]
    for file in damaged:
        file.parent.chmod(0o700)
        file.unlink()
        os.mkfifo(file)
    told = housekeeping.verify(folder.load())[1]
    assert {p.what.split()[0] for p in told} == {"artifact", "record", "run"}
    assert len(folder.ran()) == 3
