"""What runs, and what does not: edit -> stages that work; early cut-off; gates; what is told of it all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from layerline.pipeline.config.project import load
from layerline.pipeline.errors import ConfigError, StageError, TaskError, Unavailable
from layerline.pipeline.keys import env
from layerline.pipeline.run.runner import Runner
from layerline.views.terminal import Silent
from tests.pipeline import fakes
from tests.pipeline.fakes import Folder

ALL = ["source", "double", "judge"]


def states(done: object) -> dict[str, str]:
    return {r.name: r.state for r in done.results}  # type: ignore[attr-defined]


def test_the_first_run_makes_everything_and_the_second_nothing(folder: Folder) -> None:
    first = folder.run()
    assert states(first) == dict.fromkeys(ALL, "ran")
    assert [r.reason for r in first.results] == ["never ran"] * 3
    second = folder.run()
    assert states(second) == dict.fromkeys(ALL, "cached")
    assert [r.reason for r in second.results] == ["fresh"] * 3
    assert second.run == first.run  # it leaves no trace of its own
    assert second.exit_code == 0 and folder.listener.began == []


# edit of a file, or --set -> the stages that run, and the reason of the first
RERUNS: dict[str, tuple[tuple[str, ...], list[str], str]] = {
    "a comment": (("task.py", "BIAS = 1", "BIAS = 1  # one"), [], ""),
    "a docstring": (("task.py", "How many are right.", "Right ones."), [], ""),
    "the project's name": (("pipe.yaml", "name: p", "name: q"), [], ""),
    "metric()": (("task.py", "a == b", "a >= b"), ["judge"], "metric() changed"),
    "eval_data()": (("task.py", "2.0, 4.0", "2.0, 4.5"), ["judge"], "eval_data() changed"),
    "model()": (("task.py", "BIAS = 1", "BIAS = 2"), ALL, "model() changed"),
    "a helper": (("helper.py", "WIDTH * bias", "bias * WIDTH * 2"), ALL, "model() changed"),
    "an unused helper": (("helper.py", "return 0", "return 1"), [], ""),
    "loss(), to the same effect": (("task.py", "model * x", "x * model"), ["source"], "loss() changed"),
    "a default written out": (("pipe.yaml", "source: {}", "source: {epochs: 1, rate: 1.0}"), [], ""),
    "a field": (("pipe.yaml", "source: {}", "source: {epochs: 2}"), ALL, "epochs 1 -> 2"),
    "a nested field, to the same effect": (
        ("pipe.yaml", "source: {}", "source: {schedule: {warmup: 3}}"),
        ["source"],
        "schedule.warmup 0 -> 3",
    ),
    "a field of a later stage": (
        ("pipe.yaml", "double: {}", "double: {factor: 3}"),
        ["double", "judge"],
        "factor 2 -> 3",
    ),
    "a declared data file, to the same effect": (
        ("data/a.csv", "1", "2"),
        ["source", "judge"],
        "file data/a.csv changed",
    ),
}


@pytest.mark.parametrize("name", RERUNS)
def test_an_edit_reruns_what_it_can_have_changed(name: str, folder: Folder) -> None:
    (file, old, new), expected, reason = RERUNS[name]
    folder.write("pipe.yaml", "name: p\nsource: {}\ndouble: {}\ndata: [data/*]\n")
    folder.write("data/a.csv", "1")
    folder.run()
    folder.edit(file, old, new)
    done = folder.run()
    assert [r.name for r in done.results if r.state == "ran"] == expected
    assert [r.reason for r in done.results if r.state == "ran"][:1] == ([reason] if expected else [])


def test_the_same_edits_by_set(folder: Folder) -> None:
    folder.run()
    assert folder.ran(None, "double.factor=3") == ["double", "judge"]
    assert folder.ran() == []  # what was made before is still there
    assert folder.ran(None, "source.ignored=x") == ["source"]
    assert folder.ran(None, "double.factor=3", "source.ignored=x") == []


def test_a_rerun_that_gives_the_same_content_stops_there(folder: Folder) -> None:
    first = folder.run()
    digest = folder.artifact("source").name
    folder.edit("task.py", "model * x", "1 * model * x")
    done = folder.run()
    assert states(done) == {"source": "ran", "double": "cached", "judge": "cached"}
    assert folder.artifact("source").name == digest
    assert done.run != first.run


def test_side_files_are_kept_and_change_no_digest(folder: Folder) -> None:
    folder.run()
    kept = folder.artifact("source")
    assert folder.ran(["source"], force=True) == ["source"]
    assert folder.artifact("source") == kept
    assert (kept / "timing.txt").read_text().isdigit()


@pytest.mark.parametrize(
    ("names", "ran"),
    [(None, ALL), (["source"], ["source"]), (["judge"], ["judge"]), (["source", "judge"], ["source", "judge"])],
)
def test_force_reruns_just_what_is_named(names: list[str] | None, ran: list[str], folder: Folder) -> None:
    folder.run()
    done = folder.run(names, force=True)
    assert folder.listener.began == ran
    assert {r.reason for r in done.results if r.state == "ran"} == {"forced"}


def test_one_stage_runs_with_what_it_needs_and_tells_what_is_out_of_date(folder: Folder) -> None:
    done = folder.run(["double"])
    assert states(done) == {"source": "ran", "double": "ran"}
    assert [(s.stage.name, s.reason) for s in done.out_of_date] == [("judge", "never ran")]
    folder.run()
    assert folder.run(["source"]).out_of_date == ()
    folder.edit("task.py", "BIAS = 1", "BIAS = 5")
    done = folder.run(["source"])
    assert [(s.stage.name, s.reason) for s in done.out_of_date] == [
        ("double", "input model changed"),
        ("judge", "after double"),
    ]


def test_an_unknown_stage_names_the_nearest(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"there is no stage 'sauce' here\n  did you mean 'source'\?"):
        folder.run(["sauce"])


def test_a_gate_that_fails_stops_the_run_and_stays_failed(folder: Folder) -> None:
    folder.write("pipe.yaml", "judge: {at_least: 9}\nslow: {}\n")
    done = folder.run()
    assert states(done) == {"source": "ran", "double": "ran", "judge": "failed", "slow": "blocked"}
    assert not done.passed and done.exit_code == 1
    assert str(done.results[2].error) == "judge: score: 3, expected at least 9\n  train longer"
    assert done.results[3].reason == "judge failed"
    again = folder.run()
    assert states(again) == {"source": "cached", "double": "cached", "judge": "failed", "slow": "blocked"}
    assert folder.listener.began == [] and again.exit_code == 1
    assert folder.artifact("judge").is_dir()  # it can be looked at
    folder.write("pipe.yaml", "judge: {at_least: 3}\nslow: {}\n")
    assert folder.ran() == ["judge", "slow"]


def test_a_layer_beyond_its_tolerance_is_named(folder: Folder) -> None:
    done = folder.run(["double"], "double.tolerance=0.15")
    assert done.exit_code == 1
    told = str(done.results[1].error)
    assert told.startswith("double: mul_2 (Mul layers.2): rel_l2 0.2, tolerance 0.15")
    assert "pipe diff double" in told


def test_the_document_has_the_shape_that_scripts_read(folder: Folder) -> None:
    folder.write("pipe.yaml", "judge: {at_least: 9}\nslow: {}\n")
    done = folder.run()
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    told = {
        "error": "score: 3, expected at least 9",
        "where": "judge",
        "hint": "train longer",
        "exit_code": 1,
    }
    assert {k: v for k, v in document.items() if k not in ("run", "passed", "stages")} == told
    assert document["run"] == done.run and document["passed"] is False
    fields = ["name", "state", "reason", "key", "digest", "seconds", "passed", "error", "worst", "metrics"]
    assert [list(s) for s in document["stages"]] == [fields] * 4
    source, double, judge, slow = document["stages"]
    assert [s["error"] for s in document["stages"]] == [None, None, told, None]
    assert (source["name"], source["state"], source["passed"], source["worst"]) == ("source", "ran", True, None)
    assert source["metrics"] == {"sum": 6.0, "worst_case": "nan"}
    assert len(source["key"]) == len(source["digest"]) == 64 and source["seconds"] >= 0
    assert double["worst"] == {"layer": "layers.2", "value": "mul_2", "sqnr_db": 58.0, "cosine": None}
    assert (judge["state"], judge["passed"], judge["metrics"]) == ("failed", False, {"score": 3.0})
    assert (slow["state"], slow["passed"], slow["key"], slow["digest"], slow["seconds"]) == (
        "blocked",
        False,
        None,
        None,
        0,
    )


# ------------------------------------------------------------------------------------------------ T38, T39, T40


def test_t38_a_byte_changed_under_the_same_size_and_mtime_is_seen(folder: Folder) -> None:
    folder.write("pipe.yaml", "data: [x.bin]")
    path = folder.write("x.bin", "aaaa")
    folder.run()
    before = path.stat()
    path.write_text("aaba")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size
    assert folder.ran() == ["source", "judge"]


def test_t38_a_byte_changed_in_an_artifact_is_seen_and_it_is_made_again(folder: Folder) -> None:
    folder.run()
    path = folder.artifact("double") / "doubled.json"
    before, text = path.stat(), path.read_text()
    path.chmod(0o644)
    path.write_text(text.replace("2.0", "9.0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = folder.run()
    assert states(done) == {"source": "cached", "double": "ran", "judge": "cached"}
    assert "doubled.json has changed since it was written" in done.results[1].reason
    assert path.read_text() == text


def test_t38_touching_changes_nothing(folder: Folder) -> None:
    folder.write("pipe.yaml", "data: [x.bin]")
    folder.write("x.bin", "aaaa")
    folder.run()
    for path in folder.root.rglob("*"):
        os.utime(path, (1, 1))
    assert folder.ran() == []


def test_t38_a_copied_and_a_moved_project_is_all_hits(folder: Folder, tmp_path: Path) -> None:
    folder.write("pipe.yaml", "data: [x.bin]")
    folder.write("x.bin", "aaaa")
    folder.run()
    shutil.copytree(folder.root, tmp_path / "copy" / "of it")
    folder.root.rename(tmp_path / "moved")
    for root in (tmp_path / "copy" / "of it", tmp_path / "moved"):
        moved = object.__new__(Folder)
        moved.root, moved.state = root, root / ".layerline"
        assert moved.ran() == []


def test_t39_two_contents_are_two_entries_and_each_gets_its_own(folder: Folder) -> None:
    results: dict[int, Path] = {}
    for factor in (3, 4, 3):
        folder.run(None, f"double.factor={factor}")
        path = folder.artifact("double")
        results.setdefault(factor, path)
        assert results[factor] == path
        assert fakes.read(path / "doubled.json") == [factor * 1.0, factor * 2.0, factor * 3.0]
    assert results[3] != results[4]


def test_t40_a_configuration_in_another_order_is_the_same(folder: Folder) -> None:
    folder.write("pipe.yaml", "source:\n  sizes: {1: 2, 3: 4}\n  schedule: {warmup: 1, decay: linear}\n  epochs: 2\n")
    folder.run()
    folder.write("pipe.yaml", "source:\n  epochs: 2\n  schedule: {decay: linear, warmup: 1}\n  sizes: {3: 4, 1: 2}\n")
    assert folder.ran() == []


@pytest.mark.parametrize(
    ("fact", "ran"),
    [
        ("torch", ["source"]),
        ("onnxruntime", ["double"]),
        ("tensorrt", ["judge"]),
        ("gpu", ["judge"]),
        ("leftpad", []),
    ],
)
def test_t42_a_new_version_reruns_the_stages_it_feeds(
    fact: str, ran: list[str], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "fact", lambda name: "1.0")
    folder.run()
    assert folder.ran() == []  # a new session in the same process
    monkeypatch.setattr(env, "fact", lambda name: "2.0" if name == fact else "1.0")
    done = folder.run()
    assert [r.name for r in done.results if r.state == "ran"] == ran
    assert [r.reason for r in done.results if r.state == "ran"] == [f"{fact} 1.0 -> 2.0"] * len(ran)


def test_t42_a_new_version_of_a_stage_reruns_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()
    monkeypatch.setattr(fakes.Double, "version", 2)
    assert folder.ran() == ["double"]


# ------------------------------------------------------------------------------------------------ nothing absolute


def test_nothing_absolute_is_kept(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.root.parent))
    folder.write("pipe.yaml", "data: [data/x.csv]\nslow: {}\n")
    folder.write("data/x.csv", "1")
    folder.edit("task.py", "return [1, 2, 3]", f"open({str(folder.root / 'data/x.csv')!r}); return [1, 2, 3]")
    folder.edit("task.py", "return [2.0", "globals(); return [2.0")
    assert folder.ran() == [*ALL, "slow"]
    for path in folder.state.rglob("*"):
        if path.is_file():
            assert str(folder.root.parent).encode() not in path.read_bytes(), path


def test_a_project_that_starts_from_a_file(folder: Folder) -> None:
    folder.write("numbers.json", "[1.0, 2.0]")
    folder.write("pipe.yaml", "source: {}\nimport-numbers: {file: numbers.json}\n")
    with pytest.raises(ConfigError, match="the project starts at import-numbers, after this stage"):
        folder.run()
    folder.write("pipe.yaml", "import-numbers: {file: numbers.json}\n")
    assert folder.ran() == ["import-numbers", "double", "judge"]
    folder.edit("numbers.json", "2.0", "3.0")
    assert folder.ran() == ["import-numbers", "double", "judge"]


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("how", "error", "code", "told"),
    [
        ("stage", StageError, 1, "conv1.weight: channel 3 is all zeros"),
        ("full", Unavailable, 3, "weights.bin: No space left on device\n  make room"),
        ("read-only", Unavailable, 3, "weights.bin: Read-only file system\n  the project lies on"),
        ("memory", Unavailable, 3, "this machine ran out of memory"),
        ("link", StageError, 1, "it left link: an artifact holds plain files"),
        ("manifest", StageError, 1, "it left artifact.json: an artifact holds plain files"),
        ("answer", StageError, 1, "stage fault returned int, not a Report"),
    ],
)
def test_a_stage_that_goes_wrong(how: str, error: type, code: int, told: str, folder: Folder) -> None:
    folder.write("pipe.yaml", f"fault: {{how: {how}}}\n")
    done = folder.run()
    assert states(done) == {"source": "ran", "double": "ran", "judge": "ran", "fault": "failed"}
    fault = done.results[-1]
    assert type(fault.error) is error and str(fault.error).startswith(told)
    assert done.exit_code == code
    folder.write("pipe.yaml", "fault: {how: none}\n")
    assert folder.ran() == ["fault"]


def test_an_errored_run_is_the_last_run_and_once(folder: Folder) -> None:
    """Or the one before would pass for it: `pipe report` would show that as good."""
    good = folder.run().run
    folder.write("helper.py", "def build(bias:\n")
    bad = folder.run()
    ledger = folder.runner().ledger
    last = ledger.find_run("last")
    assert (last.id, last.passed, last.records) == (bad.run, False, ())
    assert folder.run().run == bad.run and len(list(ledger.runs())) == 2
    assert ledger.find_run("last", "source").id == good  # what `pipe diff` compares with went through the stage
    folder.write("helper.py", fakes.HELPER)
    assert folder.run().run == ledger.find_run("last").id != bad.run and ledger.find_run("last").passed


def test_an_error_after_stages_that_were_fresh_is_filed_too(folder: Folder) -> None:
    folder.run()
    folder.write("pipe.yaml", "fault: {how: stage}\n")
    done = folder.run()
    last = folder.runner().ledger.find_run("last")
    assert last.id == done.run and not last.passed and [r.stage for r in last.records] == ALL


def test_work_that_was_cut_short_is_told_with_its_checkpoint(folder: Folder) -> None:
    step = folder.runner().planner.steps()[0]
    assert step.reason == "never ran"
    (folder.state / "work" / str(step.key) / "scratch" / "checkpoints").mkdir(parents=True)
    assert folder.runner().planner.steps()[0].reason == "never ran"
    (folder.state / "work" / str(step.key) / "scratch" / "checkpoints" / "step-00000003.safetensors").touch()
    assert folder.runner().planner.steps()[0].reason == "cut short; goes on from its checkpoint"


@pytest.mark.parametrize("how", ["bug", "interrupt"])
def test_what_is_no_fault_of_the_user_is_not_told_as_one(how: str, folder: Folder) -> None:
    folder.write("pipe.yaml", f"fault: {{how: {how}}}\n")
    with pytest.raises(ZeroDivisionError if how == "bug" else KeyboardInterrupt):
        folder.run()
    folder.write("pipe.yaml", "fault: {}\n")
    assert folder.ran() == ["fault"]  # what was finished is kept


def test_a_task_that_does_not_parse_fails_the_stage_that_needs_it(folder: Folder) -> None:
    folder.run()
    folder.write("helper.py", "def build(bias:\n")
    done = folder.run()
    assert states(done) == {"source": "failed", "double": "blocked", "judge": "blocked"}
    assert isinstance(done.results[0].error, TaskError) and done.exit_code == 2
    assert str(done.results[0].error).startswith("helper.py:1: it is not valid Python")


def test_a_later_stage_that_could_not_be_planned_does_not_lose_this_run(folder: Folder) -> None:
    folder.edit("task.py", "    return sum(", "    from broken import f\n    return sum(")
    folder.write("broken.py", "def (")
    done = folder.run(["double"])
    assert done.passed
    assert [(s.stage.name, s.reason) for s in done.out_of_date] == [
        ("judge", "broken.py:1: it is not valid Python: invalid syntax")
    ]


def test_a_stage_whose_file_is_missing_says_so(folder: Folder) -> None:
    folder.write("pipe.yaml", "import-numbers: {file: numbers.json}\n")
    done = folder.run()
    assert (
        str(done.results[0].error) == "pipe.yaml: stage import-numbers reads numbers.json, which is not in the project"
    )


def test_scratch_of_finished_work_is_gone(folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {}\n")
    folder.run()
    assert [p for p in (folder.state / "work").iterdir() if p.is_dir()] == []


def test_an_edit_between_the_key_and_the_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("{}\n")
    (tmp_path / "task.py").write_text("def model(): return 1\n")
    runner = Runner(load(tmp_path), Silent())
    runner.planner.fingerprint("model")  # what planning does
    (tmp_path / "task.py").write_text("def model(): return 2\n")
    with pytest.raises(TaskError, match=r"model\(\) reaches was edited while the run was starting"):
        runner._task.call("model")


def test_a_stand_in_runs_in_the_place_of_the_stage_and_has_a_key_of_its_own(folder: Folder) -> None:
    folder.run()
    done = folder.run(None, "double.use=treble")
    assert states(done) == {"source": "cached", "double": "ran", "judge": "ran"}
    assert "use unset -> treble" in done.results[1].reason
    assert fakes.read(folder.artifact("double") / "doubled.json") == [3.0, 6.0, 9.0]
    assert folder.ran() == []  # what the standard stage made is still there


def test_an_edit_between_two_runs_of_one_process_is_no_edit_during_the_second(folder: Folder) -> None:
    folder.run()  # imports task.py and helper.py
    folder.edit("task.py", "BIAS = 1", "BIAS = 1  # one")
    folder.edit("helper.py", "return 0", "return 5")
    done = folder.run(None, "double.factor=3")  # source is cached, and double calls no hook
    assert states(done) == {"source": "cached", "double": "ran", "judge": "ran"}


def test_an_edit_after_the_import_counts_from_the_next_run_on(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("{}\n")
    (tmp_path / "task.py").write_text("def model(): return 1\ndef metric(): return 1\n")
    runner = Runner(load(tmp_path), Silent())
    before = runner.planner.fingerprint("model").digest
    assert runner._task.call("model") == 1
    (tmp_path / "task.py").write_text("def model(): return 2\ndef metric(): return 2\n")
    assert runner._task.call("metric") == 1
    assert runner.planner.fingerprint("model").digest == before
    # Asked for the first time only now, it still speaks of the code this process runs.
    fresh = Runner(load(tmp_path), Silent()).planner
    assert runner.planner.fingerprint("metric").digest != fresh.fingerprint("metric").digest


def test_a_run_says_what_it_was_given_and_what_ran_it(folder: Folder) -> None:
    folder.run(None, "double.factor=3")
    last = folder.runner().ledger.find_run("last")
    assert last.sets == ("double.factor=3",)
    for record in last.records:
        assert record.versions == env.versions()
        assert list(record.versions) == ["layerline", "python", "system"]
        assert record.versions["python"].startswith("3.") and env.ABSENT not in record.versions.values()
