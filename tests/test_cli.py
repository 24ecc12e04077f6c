"""The command `pipe`, with fake stages: what it prints, the documents for scripts, and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from layerline import cli
from layerline.pipeline import stage_table
from layerline.pipeline.commands import housekeeping
from layerline.pipeline.errors import StageError
from layerline.pipeline.init import from_files
from layerline.pipeline.keys import env
from layerline.pipeline.records import run_lock
from layerline.pipeline.report import Gate, Report
from layerline.pipeline.run.outcome import Result
from layerline.pipeline.stage import Work
from layerline.views import live, terminal
from tests.pipeline import driver, fakes
from tests.pipeline.conftest import fake_stages, folder
from tests.pipeline.fakes import Folder

__all__ = ["fake_stages", "folder"]
ROOT = Path(__file__).parents[1]
REAL_STAGES = tuple(stage_table.BUILT_IN)  # before the fakes take their place


@dataclass(frozen=True)
class Said:
    """What one command came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Pipe = Callable[..., Said]


@pytest.fixture
def pipe(folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Pipe:
    """Runs `pipe ARGUMENTS` in the project's folder."""
    monkeypatch.chdir(folder.root)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Said(caught.value.code or 0, out, err)  # type: ignore[arg-type]

    return run


# ------------------------------------------------------------------------------------------------ run


def test_run_prints_one_line_a_stage_and_the_next_command(pipe: Pipe) -> None:
    said = pipe("run", "all")
    lines = said.out.splitlines()
    assert (said.code, said.err, len(lines)) == (0, "", 4)
    pattern = r"✓ source  ran  +\d+\.\d s  sum 6  worst case nan  \(never ran\)"
    assert re.fullmatch(pattern, lines[0])
    assert re.fullmatch(r"✓ double  ran .* worst layers\.2 58.0 dB  \(never ran\)", lines[1])
    assert lines[3] == "next: pipe report"
    again = pipe("run", "all").out.splitlines()
    assert [line.split()[:3] for line in again[:3]] == [["✓", name, "cached"] for name in ("source", "double", "judge")]
    assert again[3] == "next: pipe report"


def test_run_one_stage_tells_what_is_out_of_date(pipe: Pipe) -> None:
    said = pipe("run", "source")
    assert said.out.splitlines()[1:] == [
        "out of date double (never ran)",
        "out of date judge (after double)",
        "next: pipe run all",
    ]
    assert pipe("run", "double", "judge").out.splitlines()[-1] == "next: pipe report"


def test_run_force_and_set(pipe: Pipe) -> None:
    pipe("run", "all")
    states = {
        s["name"]: (s["state"], s["reason"]) for s in pipe("run", "double", "--force", "--json").document["stages"]
    }
    assert states == {"source": ("cached", "fresh"), "double": ("ran", "forced")}
    done = pipe("run", "all", "--set", "double.factor=3", "--set", "source.ignored=x", "--json").document
    assert [s["reason"] for s in done["stages"]] == ["ignored unset -> x", "factor 2 -> 3", "input model changed"]


def test_a_gate_that_fails_exits_1_and_says_what_to_do(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "judge: {at_least: 9}\nslow: {}\n")
    said = pipe("run", "all")
    assert said.code == 1
    assert re.search(r"^✗ judge   failed .* score 3  \(never ran\)$", said.out, re.M)
    assert re.search(r"^– slow    blocked +\(judge failed\)$", said.out, re.M)
    assert said.out.splitlines()[-1] == "next: pipe diff judge"
    assert said.err == "error judge: score: 3, expected at least 9\n  train longer\n"
    again = pipe("run", "all", "--json")
    assert (again.code, again.document["passed"]) == (1, False)
    assert again.document["stages"][2]["reason"] == "failed before; nothing that it depends on has changed"


def test_run_json_is_one_document_and_nothing_else(pipe: Pipe, folder: Folder) -> None:
    folder.edit("task.py", "BIAS = 1\n", "BIAS = 1\nimport os\nprint('on import')\n")
    talk = "    print('a hook')\n    os.write(1, b'a library')\n    os.system('echo a child')\n"
    folder.edit("task.py", "    return [1, 2, 3]\n", talk + "    return [1, 2, 3]\n")
    said = pipe("run", "all", "--json")
    assert said.out.count("\n") == 1
    document = said.document
    assert list(document) == ["run", "passed", "stages"] and document["passed"] is True
    fields = ["name", "state", "reason", "key", "digest", "seconds", "passed", "error", "worst", "metrics"]
    for stage in document["stages"]:
        assert list(stage) == fields and stage["error"] is None
    assert document["stages"][1]["worst"] == {"layer": "layers.2", "value": "mul_2", "sqnr_db": 58.0, "cosine": None}
    for talk in ("on import", "a hook", "a library", "a child"):
        assert talk in said.err
    assert pipe("run", "all", "--json").document["run"] == document["run"]


def test_run_json_says_what_failed_in_the_document_too(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "fault: {how: full}\nslow: {}\n")
    said = pipe("run", "all", "--json")
    assert said.code == 3
    assert [s["state"] for s in said.document["stages"]] == ["ran", "ran", "ran", "failed", "blocked"]
    assert said.err.startswith("error weights.bin: No space left on device\n  make room")
    told = {k: said.document[k] for k in ("error", "where", "hint", "exit_code")}
    assert told["error"] == "No space left on device" and told["where"] == "weights.bin" and told["exit_code"] == 3
    assert [s["error"] for s in said.document["stages"]] == [None, None, None, told, None]


def test_project_is_as_if_the_command_was_given_there(
    pipe: Pipe, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("x.csv", "5")
    folder.edit("task.py", "[1, 2, 3]", "[int(open('x.csv').read())]")
    monkeypatch.chdir(tmp_path)
    said = pipe("run", "all", "-C", "project")
    assert said.code == 0 and said.out.splitlines()[-1] == "next: pipe report -C project"
    assert Path.cwd() == tmp_path
    assert pipe("path", "judge", "--project", "project").out.startswith(str(folder.root))
    assert pipe("status").code == 2  # no project here
    missing = pipe("run", "all", "-C", "nowhere")
    assert missing.code == 2 and "there is no pipe.yaml in" in missing.err and "pipe init" in missing.err


# ------------------------------------------------------------------------------------------------ resume


ASKED: list[int] = []


class Trainer(fakes.Source):
    """Goes on from checkpoints, it says, and proves it for an even number of steps."""

    def prove_resume(self, work: Work, steps: int) -> Report:
        ASKED.append(steps)
        print("a hook")
        gate = Gate("goes on bit for bit", steps % 2 == 0, f"{steps} steps", "no difference", "look there")
        return Report(stage=self.name, gates=(gate,), metrics={"steps": steps})


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`source` is a Trainer: the steps it was asked to prove."""
    monkeypatch.setitem(fakes.STANDARD, "source", f"{__name__}:Trainer")
    stage_table.stage_class.cache_clear()
    ASKED.clear()
    return ASKED


def test_resume_alone_is_run(pipe: Pipe, proved: list[int]) -> None:
    said = pipe("resume")
    assert (said.code, proved) == (0, []) and re.search(r"^✓ source  ran .*\(never ran\)$", said.out, re.M)
    assert said.out.splitlines()[-1] == "next: pipe run all"
    assert pipe("resume", "--set", "source.rate=2", "--json").document["stages"][0]["reason"] == "rate 1 -> 2"
    assert pipe("resume", "--steps", "3") == Said(
        2, "", "error --steps needs --prove\n  pipe.yaml says how long to train\n"
    )


def cut_short(folder: Folder, *sets: str, at: int) -> Path:
    """What a training leaves that is killed after its first checkpoint."""
    step = folder.runner(*sets).planner.steps()[0]
    work = folder.state / "work" / str(step.key)
    checkpoints = work / "scratch" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-1.safetensors").touch()
    (work / "sets.json").write_text(json.dumps(sets))
    os.utime(work / "sets.json", ns=(at, at))
    return work


def test_resume_goes_on_with_what_was_set(pipe: Pipe, proved: list[int], folder: Folder) -> None:
    cut_short(folder, "source.rate=3", at=1)
    cut_short(folder, "source.rate=2", "double.factor=3", at=2)
    said = pipe("resume")
    assert said.out.splitlines()[0] == "resuming with --set source.rate=2 --set double.factor=3"
    assert "(cut short; goes on from its checkpoint)" in said.out
    assert said.out.splitlines()[-1] == "next: pipe run all --set source.rate=2 --set double.factor=3"
    document = pipe("resume", "--json")
    assert document.err == "resuming with --set source.rate=3\n"
    assert document.document["stages"][0]["state"] == "ran"


def test_resume_says_where_it_begins_anew(pipe: Pipe, proved: list[int], folder: Folder) -> None:
    anew = "no interrupted training has these settings: source starts from the beginning"
    cut_short(folder, "source.rate=3", at=1)
    assert pipe("resume", "--set", "source.rate=4").out.splitlines()[0] == anew
    assert "going on" not in pipe("resume", "--set", "source.rate=3").out, "as it was asked"
    cut_short(folder, "source.rate=7", at=2)
    folder.write("pipe.yaml", "source: {epochs: 2}\n")  # with these, rate 7 would be another training
    assert pipe("resume").out.splitlines()[0] == anew
    assert pipe("resume").out.splitlines()[0].startswith("✓ source  cached")


def test_resume_says_what_left_no_checkpoint(pipe: Pipe, proved: list[int], folder: Folder) -> None:
    cut_short(folder, "source.rate=3", at=1)
    (checkpoint,) = (cut_short(folder, "source.rate=2", at=2) / "scratch" / "checkpoints").iterdir()
    checkpoint.unlink()
    lost, going_on, *_ = pipe("resume").out.splitlines()
    rate = "--set source.rate=2"
    assert (
        lost == f"the most recent training, with {rate}, left no checkpoint; to start it again: pipe run source {rate}"
    )
    assert going_on == "resuming with --set source.rate=3"
    assert pipe("resume").out.splitlines()[0] == lost, "there is none to go on with any more"


def test_the_proof_is_of_what_was_set(pipe: Pipe, proved: list[int], folder: Folder) -> None:
    cut_short(folder, "source.rate=3", at=1)
    said = pipe("resume", "--prove")
    assert said.out.splitlines()[0] == "with --set source.rate=3, as the interrupted training"
    assert "source.rate" not in pipe("resume", "--prove", "--set", "source.rate=4").out


def test_gc_keeps_the_training_that_resume_goes_on_with(pipe: Pipe, proved: list[int], folder: Folder) -> None:
    kept = cut_short(folder, "source.rate=3", at=2)
    cut_short(folder, "source.rate=2", at=1)
    cut_short(folder, "source.epochs=2", at=3)
    edited = folder.state / "work" / ("0" * 64)  # whose overrides give another key by now
    next(w for w in edited.parent.iterdir() if "epochs" in (w / "sets.json").read_text()).rename(edited)
    assert pipe("gc", "--keep", "0").out.startswith("removed 2 unfinished stages")
    assert list(edited.parent.iterdir()) == [kept]
    assert pipe("resume").out.startswith("resuming with --set source.rate=3\n")
    assert pipe("gc", "--keep", "0").code == 0 and not kept.exists()


def test_a_run_leaves_its_overrides_to_resume(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "fault: {how: interrupt}\n")
    assert pipe("run", "all", "--set", "fault.how=interrupt").code == 130
    (left,) = folder.state.glob("work/*/sets.json")
    assert json.loads(left.read_text()) == ["fault.how=interrupt"]


def test_resume_prove(pipe: Pipe, proved: list[int], folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe("resume", "--prove")
    assert (said.code, said.err, proved) == (0, "", [10])
    assert "✓ goes on bit for bit: 10 steps, expected no difference" in said.out.splitlines()
    assert not folder.state.exists(), "it only looks"
    failed = pipe("resume", "--prove", "--steps", "3")
    assert failed.code == 1
    assert failed.err == "error source: goes on bit for bit: 3 steps, expected no difference\n  look there\n"
    document = pipe("resume", "--prove", "--steps", "3", "--json").document
    assert document["passed"] is False and document["exit_code"] == 1 and document["hint"] == "look there"
    assert document["error"] == "goes on bit for bit: 3 steps, expected no difference"
    assert document["report"]["gates"][0]["seen"] == "3 steps"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in pipe("resume", "--prove").err


def test_resume_where_nothing_is_trained(pipe: Pipe) -> None:
    told = "error this project has no training; its stages are source, double, judge\n  pipe run all\n"
    assert pipe("resume", "--prove") == Said(2, "", told)


# ------------------------------------------------------------------------------------------------ looking at it


def test_status(pipe: Pipe, folder: Folder) -> None:
    pipe("run", "all")
    folder.edit("task.py", "a == b", "a >= b")
    said = pipe("status")
    assert said.code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in said.out.splitlines()]
    assert rows[0] == ["stage", "state", "why", "digest", "made", "verdict"]
    assert rows[1][:2] == ["source", "fresh"] and rows[1][-1] == "passed"
    assert rows[3] == ["judge", "would run", "metric() changed"]
    stages = pipe("status", "--json").document["stages"]
    assert [(s["name"], s["state"], s["passed"]) for s in stages] == [
        ("source", "fresh", True),
        ("double", "fresh", True),
        ("judge", "would run", None),
    ]
    assert pipe("status", "--set", "double.factor=3", "--json").document["stages"][1]["reason"] == "factor 2 -> 3"


def test_explain_shows_each_part_with_its_old_and_new_value(pipe: Pipe, folder: Folder) -> None:
    pipe("run", "all")
    same = pipe("explain", "source")
    assert "changed" not in same.out
    assert re.search(r"^config\.rate +same +1\.0 *$", same.out, re.M)
    assert "model() reaches helper.py:WIDTH, helper.py:build, task.py:BIAS, task.py:model" in same.out
    folder.edit("task.py", "BIAS = 1", "BIAS = 2")
    changed = pipe("explain", "source", "--set", "source.rate=2").out
    assert "model() changed" in changed.splitlines()[0]
    assert re.search(r"^config\.rate +changed +1\.0 +2\.0 *$", changed, re.M)
    assert re.search(r"^hook\.model +changed +[0-9a-f]{12} +[0-9a-f]{12} *$", changed, re.M)
    assert re.search(r"^hook\.loss +same", changed, re.M)
    document = pipe("explain", "source", "--json").document
    assert document["parts"]["config.rate"] == {"now": "1.0", "before": "1.0", "changed": False}
    assert document["parts"]["hook.model"]["changed"] is True
    assert document["hooks"]["model"]["reached"][-1] == "task.py:model"
    folder.edit("task.py", "return model * x", "return globals() and model * x")
    assert "note loss(): task.py counts whole: loss uses globals" in pipe("explain", "source").out


def test_explain_shows_what_is_gone(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "data: [x.csv]\n")
    folder.write("x.csv", "1")
    pipe("run", "all")
    folder.write("pipe.yaml", "")
    gone = pipe("explain", "source", "--json").document["parts"]["file.x.csv"]
    assert gone["now"] is None and len(gone["before"]) == 64 and gone["changed"]
    assert re.search(r"^file\.x\.csv +changed", pipe("explain", "source").out, re.M)


def test_diff_shows_the_worst_first_by_module(pipe: Pipe) -> None:
    first = pipe("run", "all", "--json").document["run"]
    rows = pipe("diff", "double").out.splitlines()
    assert rows[0].strip() == "double  numbers against doubled"
    assert [r.split()[:3] for r in rows[2:]] == [[f"layers.{i}", f"mul_{i}", "Mul"] for i in (2, 1, 0)]
    top = pipe("diff", "double", "--top", "1").out.splitlines()
    assert len(top) == 4 and top[-1] == "1 of 3 values, the lowest SQNR first; --top N shows more"
    pipe("run", "all", "--set", "double.tolerance=0.15")
    rows = pipe("diff", "double", "--against", first[:20]).out.splitlines()
    assert rows[0].endswith(f"; then: run {first}")
    assert rows[1] == "changed since then  double: tolerance unset -> 0.15"
    rows.pop(1)
    assert rows[1].split() == ["layer", "value", "op", "verdict", "now", "dB", "then", "dB", "rel", "L2"]
    assert "✗ failed" in rows[2] and "passed" in rows[3]
    document = pipe("diff", "double", "--against", "previous", "--json", "--top", "2").document
    assert [[r["name"] for r in document[side]["records"]] for side in ("report", "against")] == [
        ["mul_2", "mul_1"],
        ["mul_1", "mul_2"],
    ]
    document = pipe("diff", "double", "--against", "previous", "--json").document
    assert document["stage"] == "double" and document["run"] == first
    assert [r["name"] for r in document["report"]["records"]] == ["mul_0", "mul_1", "mul_2"]
    assert document["against"]["records"][0]["tolerance"] is None
    findings = pipe("diff", "judge").out
    assert "✓ score: 3, expected at least 0" in findings and "note measured here" in findings


def test_diff_against_shows_what_changed_and_the_figures_then(pipe: Pipe, folder: Folder) -> None:
    first = pipe("run", "all", "--json").document["run"]
    folder.edit("task.py", "a == b", "a >= b")
    pipe("run", "all", "--set", "source.rate=2", "--set", "double.factor=3")
    said = pipe("diff", "judge", "--against", first).out
    told = "changed since then  source: rate 1 -> 2; double: factor 2 -> 3; judge: metric() changed"
    assert told in said.splitlines()
    assert re.search(r"^figure +now +then *\nscore +3 +3 *$", said, re.M)
    assert re.search(r"^sum +12 +6 *$", pipe("diff", "source", "--against", first).out, re.M)
    document = pipe("diff", "source", "--against", "previous", "--json").document
    assert document["changed"] == ["source: rate 1 -> 2"]
    assert [document[side]["metrics"]["sum"] for side in ("report", "against")] == [12.0, 6.0]


def test_a_run_or_settings_choose_what_is_shown(pipe: Pipe, folder: Folder) -> None:
    first = pipe("run", "all", "--json").document["run"]
    usual = pipe("path", "double").out
    second = pipe("run", "all", "--set", "double.factor=3", "--json").document["run"]
    other = pipe("path", "double")
    assert other.out != usual and "other settings" in other.err
    assert pipe("path", "double", "--run", first) == Said(0, usual, "")
    assert pipe("path", "double", "--run", "last") == Said(0, other.out, "")
    assert pipe("path", "double", "--set", "double.factor=3") == Said(0, other.out, "")
    assert pipe("path", "double", "--set", "double.factor=2").out == usual
    judged = [pipe("diff", "judge", *which, "--json").document["report"] for which in ([], ["--run", first])]
    assert judged == [pipe("diff", "judge", "--set", f"double.factor={n}", "--json").document["report"] for n in (3, 2)]
    assert pipe("report", "--set", "double.factor=2", "--json").document == {"run": first, "page": "report.html"}
    assert pipe("report", "--set", "double.factor=3", "--json").document["run"] == second
    folder.edit("task.py", "BIAS = 1", "BIAS = 2")
    assert pipe("path", "double", "--set", "double.factor=2").out == usual, "the settings are asked for, not the code"
    for command in ("diff", "path"):
        said = pipe(command, "double", "--set", "double.factor=9")
        told = "stage double has not run with --set double.factor=9\n  pipe run double --set double.factor=9\n"
        assert said == Said(2, "", f"error {told}")
        assert "give one of the two" in pipe(command, "double", "--set", "double.factor=2", "--run", first).err
    settings = ("--set", "double.factor=3")
    assert "give one of the two" in pipe("diff", f"double@{first}", *settings).err
    assert "give one of the two" in pipe("diff", f"double@{first}", "double@last", *settings).err
    # With one stage left to --set, both are chosen; these stages only lack what the commands read.
    assert "leaves no model.onnx" in pipe("diff", f"double@{first}", "double", *settings).err
    assert "no run had --set double.factor=9" in pipe("report", "--set", "double.factor=9").err
    pipe("run", "double", "--set", "double.factor=4")
    assert "no run had" in pipe("report", "--set", "judge.at_least=1").err
    assert pipe("diff", "double", "--run", "lasst").err.startswith(
        "error no run matches 'lasst'\n  did you mean 'last'?"
    )


def test_previous_is_what_the_stage_gave_before_it_changed(pipe: Pipe) -> None:
    first = pipe("run", "all", "--json").document["run"]
    assert "stage double has had one result so far" in pipe("diff", "double", "--against", "previous").err
    pipe("run", "all", "--set", "judge.at_least=1")
    assert "stage double has had one result so far" in pipe("diff", "double", "--against", "previous").err
    pipe("run", "all", "--set", "double.tolerance=0.9", "--set", "judge.at_least=1")
    pipe("run", "all", "--set", "double.tolerance=0.9", "--set", "judge.at_least=2")
    document = pipe("diff", "double", "--against", "previous", "--json").document
    assert document["against"]["records"][0]["tolerance"] is None
    assert document["run"] > first, "of the runs with that result the newest"
    assert (
        pipe("diff", "judge", "--against", "previous", "--json").document["against"]["gates"][0]["expected"]
        == "at least 1"
    )


def test_path_is_for_scripts(pipe: Pipe, folder: Folder) -> None:
    assert pipe("path", "double") == Said(2, "", "error stage double has not run yet\n  pipe run double\n")
    pipe("run", "all")
    said = pipe("path", "double")
    where = Path(said.out.strip())
    assert said.out.count("\n") == 1 and where.is_absolute() and where == folder.artifact("double").resolve()
    assert (where / "doubled.json").is_file()
    pipe("gc", "--keep", "0")
    assert pipe("path", "double") == said  # no run is left, but the result is


def test_path_says_when_the_newest_is_not_the_configured_one(pipe: Pipe, folder: Folder) -> None:
    pipe("run", "all")
    usual = pipe("path", "double")
    assert usual.err == ""
    pipe("run", "double", "--set", "double.factor=3")
    other = pipe("path", "double")
    assert other.out != usual.out and other.err.startswith("note: the newest run of double had other settings")
    pipe("run", "all")
    assert pipe("path", "double") == usual
    assert pipe("run", "all", "--set", "judge.at_least=1e9").code == 1
    assert pipe("path", "judge").err == "note: the newest run of judge did not pass\n"


def test_path_of_what_is_damaged_or_gone(pipe: Pipe, folder: Folder) -> None:
    pipe("run", "all")
    where = folder.artifact("double")
    (where / "doubled.json").unlink()
    said = pipe("path", "double")
    assert said.code == 1 and said.out == ""
    assert (
        said.err == f"error double {where.name[:12]}: doubled.json is missing\n  make it again with: pipe run double\n"
    )
    where.rename(folder.root / "elsewhere")
    assert "the artifact of double is gone from the store" in pipe("path", "double").err


def test_report_writes_one_page(pipe: Pipe, folder: Folder) -> None:
    run = pipe("run", "all", "--json").document["run"]
    assert pipe("report", "--output", "page.html", "--run", run[:15]).out == "wrote page.html\n"
    assert "layers.2" in (folder.root / "page.html").read_text()


def test_a_run_is_shown_while_it_goes_on_and_its_page_is_written_at_the_end(
    pipe: Pipe, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = pipe("report", "--serve")
    assert said.code == 2 and "no run is going on" in said.err and "pipe run all" in said.err
    assert "--port: it needs --serve" in pipe("report", "--port", "8000").err
    assert "--run" in pipe("report", "--serve", "--run", "last").err
    pipe("run", "all")
    with run_lock.at_work(folder.state):
        monkeypatch.setattr(live.LiveServer, "watch", lambda server, project: "")  # as if the run ended now
        said = pipe("report", "--serve", "--json")
    assert re.search(r"http://127\.0\.0\.1:\d+/ shows the run", said.err)
    assert said.document == {"run": pipe("runs", "--json").document["runs"][0]["id"], "page": "report.html"}
    assert "Follow a layer" in (folder.root / "report.html").read_text()


def test_the_page_is_of_the_run_that_was_shown_and_else_a_note_says_of_which(
    pipe: Pipe, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pipe("run", "all", "--json").document["run"]
    newest = pipe("run", "all", "--set", "source.rate=2", "--json").document["run"]
    pages = []
    for watched in (first, newest, "a run that was killed"):
        monkeypatch.setattr(live.LiveServer, "watch", lambda server, project, run_id=watched: run_id)
        with run_lock.at_work(folder.state):
            said = pipe("report", "--serve", "--json")
        pages.append((said.document["run"], f"the page is of {newest}" in said.err))
    assert pages == [(first, False), (newest, False), (newest, True)]


def test_the_page_tells_the_causes_that_the_reports_hold_without_foreign_code(
    pipe: Pipe, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pipe("run", "all", "--set", "judge.at_least=9").code == 1
    foreign = metadata.EntryPoint("foreign", "os:abort", "layerline.causes")
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [foreign] if "causes" in group else [])
    assert pipe("report").code == 0
    head = (folder.root / "report.html").read_text().partition("</header>")[0]
    assert "Likely causes" in head and "<b>score</b> judge" in head


def test_the_page_puts_runs_side_by_side(pipe: Pipe, folder: Folder) -> None:
    first, second = (
        pipe("run", "all", "--set", f"double.factor={n}", "--json").document["run"] for n in (2, 3)
    )  # fmt: skip
    pipe("report", "-o", "a.html")
    page = (folder.root / "a.html").read_text()
    assert "Beside the run before" in page and f"<code>{first}</code>" in page and "double: factor 2 -&gt; 3" in page
    pipe("report", "-o", "b.html", "--run", first)
    assert "Beside" not in (folder.root / "b.html").read_text()
    assert pipe("report", "-o", "b.html", "--run", first, "--compare", second[:22], "--compare", "last").code == 0
    assert "Beside other runs" in (folder.root / "b.html").read_text()
    assert "no run matches 'x'" in pipe("report", "--compare", "x").err
    (folder.root / ".layerline/ledger/reports" / f"{_report_of(folder, first)}.json").write_text("{")
    assert pipe("report", "-o", "c.html").code == 0
    assert "Beside" not in (folder.root / "c.html").read_text(), "nobody asked for the damaged run"
    assert "damaged" in pipe("report", "--compare", first).err


def _report_of(folder: Folder, run: str) -> str:
    records = json.loads((folder.root / f".layerline/ledger/runs/{run}.json").read_text())["records"]
    return str(next(record["report"] for record in records if record["stage"] == "judge"))


def test_verify_says_what_is_damaged(pipe: Pipe, folder: Folder) -> None:
    pipe("run", "all")
    assert pipe("verify") == Said(0, "6 checked, 0 damaged\n", "")
    where = folder.artifact("double")
    (where / "doubled.json").unlink()
    said = pipe("verify")
    assert said.code == 1
    assert (
        said.out
        == f"artifact {where.name[:12]}: doubled.json is missing\n6 checked, 1 damaged; pipe run all makes them again\n"
    )
    problem = {"what": f"artifact {where.name[:12]}", "fault": "doubled.json is missing"}
    assert pipe("verify", "--json").document == {
        "checked": 6,
        "error": "1 of 6 are damaged",
        "where": None,
        "hint": "pipe run all makes them again",
        "exit_code": 1,
        "problems": [problem],
    }
    pipe("run", "all")
    assert pipe("verify").code == 0


def test_gc(pipe: Pipe, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe("run", "all", "--set", "double.factor=7")
    old = folder.artifact("double").name
    pipe("run", "all")
    assert pipe("gc").out == "nothing to remove\n"
    assert pipe("gc", "--keep", "1", "--dry-run").out == "would remove 1 run, 2 artifacts, 0.0 MB\n"
    assert f"would remove .layerline/store/{old}\n" in pipe("gc", "--keep", "1", "--dry-run", "--verbose").out
    document = pipe("gc", "--keep", "1", "--json").document
    assert f".layerline/store/{old}" in document["removed"] and document["bytes"] > 0
    assert (document["dry_run"], document["busy"]) == (False, False)
    assert pipe("gc", "--keep", "-1").code == 2
    monkeypatch.setattr(housekeeping, "collect", lambda *_, **__: None)
    assert "a run is in progress in this project: nothing was removed" in pipe("gc").out
    assert pipe("gc", "--json").document["busy"] is True


def test_init_makes_a_project_that_can_be_looked_at(pipe: Pipe, folder: Folder) -> None:
    said = pipe("init", "new/project")
    assert said.out.splitlines()[-1] == "next: cd new/project && pipe run all"
    assert {p.name for p in (folder.root / "new" / "project").iterdir()} == {"pipe.yaml", "task.py"}
    assert pipe("init", "new/project").code == 2
    assert "there are: blank, mnist" in pipe("init", "x", "--template", "nmist").err


def test_runs(pipe: Pipe) -> None:
    assert pipe("runs").out == "there is no run yet: pipe run all\n"
    pipe("run", "source")
    assert "error there is only one run" in pipe("report", "--run", "previous").err
    newest = pipe("run", "all", "--json").document["run"]
    first, second = pipe("runs", "--json").document["runs"]
    assert first["id"] == newest and first["passed"] is True
    assert [first["stages"], second["stages"]] == [["source", "double", "judge"], ["source"]]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second["time"])
    rows = [line.split() for line in pipe("runs").out.splitlines()]
    assert rows[:3] == [[newest, first["time"], "passed"], ["ran", "double", "judge"], ["kept", "source"]]
    assert [first["ran"], second["ran"]] == [["double", "judge"], ["source"]]


def test_runs_show_settings_and_figures(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "source: {rate: 2, schedule: {warmup: 3}}\n")
    pipe("run", "all")
    pipe("run", "all", "--set", "double.factor=3", "--set", "judge.at_least=-1")
    last, first = pipe("runs", "--json").document["runs"]
    assert last["sets"] == ["double.factor=3", "judge.at_least=-1"] and first["sets"] == []
    assert first["settings"] == {"source": {"rate": "2.0", "schedule.warmup": "3"}}
    assert last["settings"] == {**first["settings"], "double": {"factor": "3"}, "judge": {"at_least": "-1.0"}}
    assert last["changed"] == ["double: factor 2 -> 3", "judge: at_least 0 -> -1"] and first["changed"] == []
    assert last["metrics"] == {"source": {"sum": 12.0, "worst_case": "nan"}, "double": {}, "judge": {"score": 0.0}}
    assert [line.split(maxsplit=1) for line in pipe("runs").out.splitlines()] == [
        [last["id"], f"{last['time']}  passed"],
        ["ran", "double judge"],
        ["kept", "source"],
        ["--set", "double.factor=3; judge.at_least=-1"],
        ["changed", "double: factor 2 -> 3; judge: at_least 0 -> -1"],
        ["figures", "judge: score 0"],
        [first["id"], f"{first['time']}  passed"],
        ["ran", "source double judge"],
        ["settings", "source.rate=2.0; source.schedule.warmup=3"],
        ["figures", "source: sum 12, worst case nan; judge: score 0"],
    ]


def test_the_page_shows_settings_versions_and_overrides(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "source: {rate: 2}\n")
    pipe("run", "all", "--set", "double.factor=3")
    pipe("report")
    page = (folder.root / "report.html").read_text()
    assert "run with <code>--set double.factor=3</code>" in page
    assert "<dt>settings</dt><dd>rate: 2.0</dd>" in page and "<dt>settings</dt><dd>factor: 3</dd>" in page
    assert "<dt>settings</dt><dd>the defaults</dd>" in page, "of judge"
    facts = env.versions()
    told = ", ".join(f"{name} {version}" for name, version in facts.items())
    assert f"<dt>versions</dt><dd>{told}, onnxruntime {env.fact('onnxruntime')}</dd>" in page
    row = '<th scope="row"><span>rate</span></th><td class="text">2.0</td><td class="text">1.0</td>'
    assert row in page


def test_a_run_names_the_stage_that_ended_in_an_error(pipe: Pipe, folder: Folder) -> None:
    folder.write("pipe.yaml", "fault: {how: stage}\n")
    pipe("run", "source")
    pipe("run", "all")
    row = pipe("runs", "--json").document["runs"][0]
    assert (row["passed"], row["ran"], row["stages"]) == (
        False,
        ["double", "judge", "fault"],
        ["source", "double", "judge"],
    )
    told = {"error": "channel 3 is all zeros", "where": "conv1.weight", "hint": "prune it"}
    assert row["errors"] == {"fault": told}
    assert "  error     fault: conv1.weight: channel 3 is all zeros" in pipe("runs").out.splitlines()
    pipe("report")
    page = (folder.root / "report.html").read_text()
    assert "<li><b>fault</b> conv1.weight: channel 3 is all zeros<br><span>prune it</span></li>" in page
    pipe("run", "all")
    assert len(pipe("runs", "--json").document["runs"]) == 2, "the same error again is no other run"
    folder.write("pipe.yaml", "fault: {how: full}\n")
    pipe("run", "all")
    newest = pipe("runs", "--json").document["runs"][0]
    assert newest["errors"]["fault"]["error"] == "No space left on device", "another error is"


def test_a_run_that_goes_back_has_its_own_time_and_says_what_it_kept(pipe: Pipe, folder: Folder) -> None:
    first = pipe("run", "all", "--json").document["run"]
    pipe("run", "all", "--set", "double.factor=3")
    back = pipe("run", "all", "--json").document["run"]
    runs = pipe("runs", "--json").document["runs"]
    assert [(r["id"], r["ran"]) for r in runs][::2] == [(back, []), (first, ["source", "double", "judge"])]
    for run in runs:
        assert run["id"].startswith(re.sub("[-:Z]", "", run["time"]).replace("T", "-"))
    pipe("report", "--run", first)
    assert "from an earlier run" not in (folder.root / "report.html").read_text()
    pipe("report")
    page = (folder.root / "report.html").read_text()
    assert (
        "0.0 s of work · " in page
        and " · 3 stages from an earlier run" in page
        and page.count(" s, in an earlier run") == 3
    )


def test_next_repeats_overrides_and_says_nothing_without_a_report(pipe: Pipe, folder: Folder) -> None:
    said = pipe("run", "source", "--set", "source.ignored=a b")
    assert said.out.splitlines()[-1] == "next: pipe run all --set 'source.ignored=a b'"
    folder.write("pipe.yaml", "fault: {how: stage}\n")
    assert "next:" not in pipe("run", "all").out


def test_status_of_what_is_behind_a_change(pipe: Pipe, folder: Folder) -> None:
    states = [s["state"] for s in pipe("status", "--json").document["stages"]]
    assert states == ["would run"] * 3  # none of them ever ran
    pipe("run", "all")
    folder.edit("task.py", "BIAS = 1", "BIAS = 2")
    states = [s["state"] for s in pipe("status", "--json").document["stages"]]
    assert states == ["would run", "may run", "may run"]


def test_the_state_folder_stays_out_of_git(pipe: Pipe, folder: Folder) -> None:
    pipe("status")
    assert (folder.state / ".gitignore").read_text() == "*\n"
    (folder.state / ".gitignore").write_text("# mine\n")
    pipe("run", "all")
    assert (folder.state / ".gitignore").read_text() == "# mine\n"


def test_a_missing_task_file_is_told_before_anything_runs(pipe: Pipe, folder: Folder) -> None:
    (folder.root / "task.py").unlink()
    for command in (["status"], ["run", "all"], ["run", "double"]):
        said = pipe(*command)
        assert (said.code, said.out) == (2, "") and said.err.startswith("error task.py: there is no such task file")
    assert pipe("runs").code == 0


@pytest.mark.parametrize("form", [["-C", "project"], ["--project=project"], ["-Cproject"]], ids=" ".join)
def test_the_folder_may_stand_before_the_command(
    form: list[str], pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pipe(*form, "run", "all").out.splitlines()[-1] == "next: pipe report -C project"
    assert pipe(*form).code == 2


def test_json_stays_pure_whatever_a_library_holds_back(folder: Folder) -> None:
    talk = "    import ctypes, sys\n    ctypes.CDLL(None).printf(b'from C')\n    sys.__stdout__.write('kept')\n"
    folder.edit("task.py", "    return [1, 2, 3]\n", talk + "    return [1, 2, 3]\n")
    done = driver.run(folder.root, "run", "all", "--json")
    assert json.loads(done.stdout)["passed"] and "from C" in done.stderr and "kept" in done.stderr


def test_diff_on_needs_a_model_and_no_other_run(pipe: Pipe) -> None:
    pipe("run", "all")
    said = pipe("diff", "double", "--on", "onnxruntime")
    assert said.code == 2 and "stage double leaves no model.onnx" in said.err
    assert pipe("diff", "double", "--on", "onnxruntime", "--against", "previous").code == 2
    assert pipe("diff", "double", "--on", "onnxruntime", "--json").document["exit_code"] == 2


# ------------------------------------------------------------------------------------------------ mistakes


def test_version_and_help(pipe: Pipe) -> None:
    from layerline import __version__

    assert pipe("--version") == Said(0, f"{__version__}\n", "")
    for command in ("run", "diff", "explain", "path"):
        shown = " ".join(pipe(command, "--help").out.split()).replace("- ", "-")
        assert all(name in shown for name in REAL_STAGES), f"{command} names every stage"
    said = pipe("--help")
    assert said.code == 0
    for command in (
        "init",
        "run",
        "status",
        "explain",
        "diff",
        "report",
        "path",
        "verify",
        "gc",
        "runs",
        "debug",
        "resume",
    ):
        assert re.search(rf"^  {command} ", said.out, re.M)


USAGE = [
    ["nosuch"],
    ["run"],
    ["run", "all", "--bogus"],
    ["diff"],
    ["diff", "double", "--top", "0"],
    ["diff", "double", "--top", "x"],
    ["run", "sauce"],
    ["run", "all", "source"],
    ["report", "-o", "no/where.html"],
    ["status", "-C", "task.py"],
    ["explain", "sauce"],
    ["path", "sauce"],
    ["diff", "source", "--against", "2099"],
    ["report", "--run", "2099"],
    ["run", "all", "--set", "nonsense"],
    ["resume"],
    ["resume", "--prove"],
    ["resume", "--prove", "--steps", "0"],
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_usage_exits_2_with_one_sentence(arguments: list[str], pipe: Pipe) -> None:
    pipe("run", "all")
    said = pipe(*arguments)
    assert said.code == 2 and said.err and "internal error" not in said.err


MISTAKES: dict[str, tuple[dict[str, str], int, str]] = {
    "pipe.yaml is wrong": (
        {"pipe.yaml": "source:\n  epoch: 3\n"},
        2,
        "error pipe.yaml:2:3: source.epoch: unknown field",
    ),
    "pipe.yaml is no YAML": ({"pipe.yaml": "source: ["}, 2, "error pipe.yaml:1:10: not valid YAML"),
    "task.py is no Python": ({"task.py": "def model(:\n"}, 2, "error task.py:1: it is not valid Python"),
    "task.py raises": ({"task.py": fakes.TASK + "\n1 / 0\n"}, 2, "error task.py:"),
    "task.py exits": ({"task.py": fakes.TASK + "\nraise SystemExit(5)\n"}, 2, "error task.py:"),
    "task.py is missing": ({"pipe.yaml": "task: other.py\n"}, 2, "there is no such task file"),
    "a hook raises": (
        {"helper.py": "def build(bias):\n    return [][1]\n"},
        2,
        "error helper.py:2: model() raised IndexError",
    ),
    "a hook is missing": (
        {"task.py": "def model(): return 1\n"},
        2,
        "error task.py: this stage needs the hook train_data()",
    ),
    "a hook exits": ({"helper.py": "import sys\ndef build(bias): sys.exit(4)\n"}, 2, "model() raised SystemExit: 4"),
    "a stage fails": (
        {"pipe.yaml": "fault: {how: stage}\n"},
        1,
        "error conv1.weight: channel 3 is all zeros\n  prune it",
    ),
    "the disk is full": ({"pipe.yaml": "fault: {how: full}\n"}, 3, "error weights.bin: No space left on device"),
    "the disk is read-only": (
        {"pipe.yaml": "fault: {how: read-only}\n"},
        3,
        "error weights.bin: Read-only file system",
    ),
    "memory runs out": ({"pipe.yaml": "fault: {how: memory}\n"}, 3, "error this machine ran out of memory"),
    "a bug": ({"pipe.yaml": "fault: {how: bug}\n"}, 1, "error internal error, ZeroDivisionError: a bug"),
    "Ctrl-C": ({"pipe.yaml": "fault: {how: interrupt}\n"}, 130, "\ninterrupted; what was finished is kept"),
}


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_clear_sentence(name: str, form: list[str], pipe: Pipe, folder: Folder) -> None:
    files, code, told = MISTAKES[name]
    for file, text in files.items():
        folder.write(file, text)
    said = pipe("run", "all", *form)
    assert said.code == code
    assert told in said.err and len(said.err.strip().splitlines()) <= 2
    if form:
        document = said.document
        assert document["exit_code"] == code and document.get("passed") is not True
        place = f"{document['where']}: " if document["where"] else ""
        head = "\n" if code == 130 else f"error {place}"
        assert said.err.startswith(f"{head}{document['error']}")
        assert (document["hint"] or "") in said.err


# command -> exit code, place, beginning of the error, beginning of the hint
FAILURES: dict[str, tuple[int, str | None, str, str]] = {
    "rn all": (2, "pipe", "No such command 'rn'. Did you mean 'run'", "usage: pipe"),
    "xyz": (2, "pipe", "No such command 'xyz'", "usage: pipe"),
    "run": (2, "pipe run", "Missing argument", "usage: pipe run"),
    "run al": (2, None, "there is no stage 'al' here", "did you mean 'all'?"),
    "run duoble": (2, None, "there is no stage 'duoble' here", "did you mean 'double'?"),
    "run all source": (2, None, "`all` means every stage", "pipe run all"),
    "run all --force=1": (2, None, "Option '--force' does not take a value", ""),
    "run all --set a.b c": (2, "--set", "expected key=value, saw 'a.b'", "for example: --set"),
    "run all --set source.epoch=1": (
        2,
        "--set source.epoch=1",
        "source.epoch: unknown field",
        "did you mean 'epochs'?",
    ),
    "run all -C nowhere": (2, None, "there is no pipe.yaml in ", "make a project: pipe init DIR"),
    "resume": (2, None, "this project has no training", "pipe run all"),
    "resume --prove": (2, None, "this project has no training", "pipe run all"),
    "resume --steps 0": (2, "pipe resume", "Invalid value for '--steps'", "usage: pipe resume"),
    "status --bogus": (2, "pipe status", "No such option: --bogus", "usage: pipe status"),
    "runs -C task.py": (2, "task.py", "it is a file, not a folder", ""),
    "why": (2, None, "there is no run yet", "pipe run all"),
    "explain sauce": (2, None, "there is no stage 'sauce' here", "did you mean 'source'?"),
    "check -C nowhere": (2, None, "there is no pipe.yaml in ", "make a project: pipe init DIR"),
    "diff double": (2, None, "stage double has not run yet", "pipe run double"),
    "diff duble": (2, None, "there is no stage 'duble' here", "did you mean 'double'?"),
    "debug double": (2, None, "stage double has nothing to debug", "see: pipe diff double"),
    "report": (2, None, "there is no run yet", "pipe run all"),
    "report -o no/where.html": (2, None, "there is no folder no", "create it"),
    "tune --max-drop 1": (2, "--set quantize.search=true", "quantize: unknown key", ""),
    "plan duble": (2, None, "there is no stage 'duble' here", "did you mean 'double'?"),
    "plan pipe.yaml": (2, "pipe.yaml", "it holds no quantisation plan", "give a plan.json"),
    "path double": (2, None, "stage double has not run yet", "pipe run double"),
    "verify --keep 1": (2, "pipe verify", "No such option: --keep", "usage: pipe verify"),
    "gc --keep x": (2, "pipe gc", "Invalid value for '--keep'", "usage: pipe gc"),
    "init p --template nmist": (2, None, "there is no template 'nmist'", "there are: blank, mnist"),
    "init p --trust": (2, None, "--from-checkpoint and --model go together", ""),
}


@pytest.mark.parametrize("command", FAILURES)
def test_every_failure_is_one_document_under_json(command: str, pipe: Pipe) -> None:
    code, where, error, hint = FAILURES[command]
    said = pipe(*command.split(), "--json")
    document = said.document
    assert said.out.count("\n") == 1 and list(document) == ["error", "where", "hint", "exit_code"]
    assert (said.code, document["exit_code"], document["where"]) == (code, code, where)
    assert document["error"].startswith(error) and (document["hint"] or "").startswith(hint)
    assert said.err.startswith(f"error {f'{where}: ' if where else ''}{error}"), "people read the same"


def test_every_command_has_a_failure_in_the_table() -> None:
    commands = {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}
    assert commands <= {name.split()[0] for name in FAILURES}


def test_a_crash_of_a_command_that_only_looks_is_a_document_too(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def crash(*_: Any, **__: Any) -> Any:
        raise Mute

    monkeypatch.setattr(housekeeping, "collect", crash)
    said = pipe("gc", "--json")
    assert (said.code, said.document["exit_code"]) == (1, 1)
    assert said.document["error"] == "internal error, Mute: its text can't be made"
    assert said.document["error"] in said.err and "--debug" in said.document["hint"]


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e:bug:[red]x[/red]"
PLAIN = "\\x1b]0;owned\\x07\\x1b[2J\\u202e:bug:[red]x[/red]"


def test_nothing_in_a_name_is_a_command_to_the_terminal(pipe: Pipe, folder: Folder) -> None:
    folder.edit("task.py", "    return [1, 2, 3]", f"    raise ValueError({ESCAPE!r})")
    said = pipe("run", "all")
    assert said.code == 2 and PLAIN in said.err
    assert all(c.isprintable() or c == "\n" for c in said.out + said.err)
    assert ESCAPE in pipe("run", "all", "--json").document["error"], "a document holds the text itself"
    assert "\x1b" not in pipe("run", "all", "--json").out
    for command in (
        ["run", ESCAPE],
        [ESCAPE],
        ["diff", "source", "--against", ESCAPE],
        ["init", "p", "--template", ESCAPE],
    ):
        said = pipe(*command)
        assert said.code == 2 and all(c.isprintable() or c == "\n" for c in said.out + said.err)


@pytest.mark.parametrize("place", [["--debug", "run", "all"], ["run", "--debug", "all"], ["run", "all", "--debug"]])
@pytest.mark.parametrize("how", ["stage", "bug"])
def test_debug_shows_the_traceback_wherever_it_stands(
    place: list[str], how: str, pipe: Pipe, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("pipe.yaml", f"fault: {{how: {how}}}\n")
    monkeypatch.setattr(sys, "argv", ["pipe", *place])
    with pytest.raises(StageError if how == "stage" else ZeroDivisionError) as caught:
        cli.main()
    assert any(entry.name == "run" and Path(entry.path).name == "fakes.py" for entry in caught.traceback)


def test_a_state_that_can_not_be_written(pipe: Pipe, folder: Folder) -> None:
    folder.state.write_text("")
    for arguments in (["run", "all"], ["gc"]):
        said = pipe(*arguments)
        assert said.code == 3 and ".layerline" in said.err and "a file lies where a folder should be" in said.err
    assert pipe("status").code == 0


# ------------------------------------------------------------------------------------------------ processes


HEAVY = {
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "tensorrt",
    "tensorrt_rtx",
    "torchao",
    "numpy",
}


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["run", "all"]], ids=" ".join)
def test_what_has_nothing_to_do_imports_nothing_heavy(arguments: list[str], folder: Folder, tmp_path: Path) -> None:
    folder.edit("task.py", "import helper\n", "import helper\nimport numpy\n")
    folder.run()
    modules = tmp_path / "modules"
    done = driver.run(folder.root, *arguments, MODULES_TO=str(modules))
    assert done.returncode == 0, done.stderr
    loaded = set(modules.read_text().split())
    assert "layerline.cli" in loaded and not loaded & HEAVY


@pytest.mark.slow
def test_the_blank_project_runs_as_it_stands(tmp_path: Path) -> None:
    written = from_files.from_template(tmp_path / "mine", "blank")
    assert [p.name for p in written] == ["pipe.yaml", "task.py"]
    command = [sys.executable, "-m", "layerline.cli", "run", "all", "--json"]
    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [s["state"] for s in json.loads(done.stdout)["stages"]] == ["ran"] * 6


def test_a_reader_that_goes_away_is_no_error_of_ours(folder: Folder) -> None:
    process = driver.start(folder.root, "run", "all")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.wait(20)
    process.stderr.close()
    assert "Traceback" not in err and "internal error" not in err


def test_an_encoding_that_knows_few_letters(folder: Folder) -> None:
    folder.edit("task.py", "def metric(outputs, targets):", "def metric(outputs, targets):  # é")
    folder.edit("task.py", '"""How', 'print("☃"); """How')
    done = driver.run(folder.root, "run", "all", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("? source  ran")
    assert json.loads(driver.run(folder.root, "run", "all", "--json", PYTHONIOENCODING="ascii").stdout)["passed"]


def test_the_traceback_of_a_process(folder: Folder) -> None:
    folder.write("pipe.yaml", "fault: {how: stage}\n")
    done = driver.run(folder.root, "run", "all", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "StageError: conv1.weight: channel 3 is all zeros" in done.stderr


# ------------------------------------------------------------------------------------------------ drawing


def test_warnings_and_log_records_are_plain(folder: Folder) -> None:
    log = "logging.getLogger('x').warning(name)"
    talk = ["import logging, warnings", f"name = {ESCAPE!r}", "warnings.warn(name)", log]
    lines = "".join(f"    {line}\n" for line in talk)
    folder.edit("task.py", "    return [1, 2, 3]\n", f"{lines}    return [1, 2, 3]\n")
    done = driver.run(folder.root, "run", "all")
    assert done.returncode == 0 and done.stderr.count(PLAIN) == 2
    assert "\x1b" not in done.stderr + done.stdout


def test_a_terminal_sees_a_bar_while_a_stage_works() -> None:
    screen = io.StringIO()
    out = Console(file=screen, force_terminal=True, width=120, highlight=False)
    live = terminal.Live(out, width=8)
    stage = fakes.Source()
    live.started(stage, "loss() [changed]")
    live.progress(3, 10, loss=0.12345, lr="2e-3", note="[/]")
    live.say("a [red]word[/red]")
    live.finished(Result(name="source", state="failed", reason="never [ran]"))
    live.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "3/10" in text and "loss 0.1235" in text and "[changed]" in text and "a [red]word[/red]" in text
    assert "✗ source    failed" in text and "(never [ran])" in text


def test_no_reason_pushes_the_bar_out() -> None:
    screen = io.StringIO()
    live = terminal.Live(Console(file=screen, force_terminal=True, width=80, highlight=False), width=14)
    live.started(fakes.Source(), "dims.a unset -> 48, profiles changed and 9 more; " * 3)
    live.progress(3, 8)
    live.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    shown = [line for line in drawn if "3/8" in line]
    assert shown and all(
        "source" in line and sum(c in "━╺╸" for c in line) == 24 and "dims.a" in line for line in shown
    )
    assert max(map(len, drawn)) <= 80


def test_nothing_is_drawn_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    live = terminal.Live(terminal.console(), width=8)
    live.started(fakes.Source(), "never ran")
    live.progress(1, 2)
    live.close()
    assert capfd.readouterr() == ("", "")
    assert os.environ.get("COLUMNS") or terminal.console().width >= 80


@pytest.mark.parametrize("width", ["²", "9" * 5000, "-1", "", "12345678"])
def test_a_width_that_is_none_is_left_out(width: str, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    said = pipe("status")
    assert said.code == 0 and "source  would run  never ran" in said.out


def test_numbers_beyond_those_of_the_machine(pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # gc also removes what killed processes of this user left in the temporary folder, which is none of this test's.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipe("run", "all")
    assert pipe("gc", "--keep", str(10**30)).out == "nothing to remove\n"
    assert pipe("diff", "double", "--top", str(10**30)).code == 0
    assert pipe("gc", "--keep", "9" * 5000).code == 2


def test_a_value_of_set_apart_from_its_key(pipe: Pipe) -> None:
    for words in (("status", "--set", "source.rate", "2"), ("run", "all", "--set", "source.rate", "=", "2")):
        said = pipe(*words)
        assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error --set: expected key=value, saw 'source.rate'")
