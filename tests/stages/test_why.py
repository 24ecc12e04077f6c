"""`pipe why` on a trained network: silent where nothing is lost, and right about a range that cuts values off."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from layerline import cli
from layerline.pipeline.config.project import load
from layerline.pipeline.diagnosis import why
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import LayerDiff, Report


@pytest.mark.parametrize("measured", [True, False])
def test_outputs_that_lost_their_signal_are_a_loss_where_no_metric_was_measured(tmp_path, measured) -> None:
    (tmp_path / "pipe.yaml").write_text("import-onnx: {file: net.onnx}\nquantize: {mode: int8}\n")
    warning = "WARNING: output y has 14.3 dB: its error is 19 % of its size"
    notes = (warning,) if measured else (warning, "no metric was measured: the task has no eval_data()")
    conv = LayerDiff(name="y", op="Conv", extra={"isolated_sqnr_db": 7.7, "gain_db": 3.7})
    report = Report(stage="quantize", records=(conv,), notes=notes)
    causes = why.from_reports(load(tmp_path), Run("1", True, (), ()), {"quantize": report}, {})
    if measured:
        assert not causes
        return
    outlier = replace(report, notes=("WARNING: calibration sample 3 is an outlier", notes[1]))
    assert not why.from_reports(load(tmp_path), Run("1", True, (), ()), {"quantize": outlier}, {})
    (cause,) = causes
    assert (cause.stage, cause.value, cause.setting) == ("quantize", "y", 'quantize.layers={"y": "fp16"}')
    assert "7.7 dB with exact inputs; the outputs gain 3.7 dB" in cause.evidence


@pytest.mark.slow
def test_why_names_the_clipped_range_and_tries_the_change(tmp_path, capfd) -> None:
    def pipe(*arguments):
        code = cli.app([*arguments], prog_name="pipe", standalone_mode=False)
        return code or 0, capfd.readouterr().out

    folder = str(tmp_path / "digits")
    pipe("init", folder, "--template", "mnist")
    short = ("--set", "train.steps=150")
    code, _ = pipe("run", "quantize", "-C", folder, *short)
    assert code == 0
    code, said = pipe("why", "-C", folder, "--json")
    report = json.loads(said)["report"]
    assert code == 0 and report["notes"] == ["no loss was found in any stage"] and not report["tables"]["causes"]
    stages = [row["stage"] for row in report["tables"]["metric by stage"]]
    assert stages == ["train", "ema", "export", "fuse", "quantize"]
    code, said = pipe("why", "-C", folder, "--try", "--repro", str(tmp_path / "none"))
    assert code == 0 and "no loss was found in any stage" in said
    assert "nothing to try: no cause was found" in said and not (tmp_path / "none").exists()
    clipping = ("--set", "quantize.calibrator=percentile", "--set", "quantize.percentile=70")
    code, _ = pipe("run", "quantize", "-C", folder, *short, *clipping)
    assert code == 1
    bug = tmp_path / "bug"
    _, said = pipe("why", "-C", folder, "--try", "--repro", str(bug), "--json")
    document = json.loads(said)
    assert document["repro"]["value"] and (bug / "model.onnx").is_file()
    script = [sys.executable, str(bug / "repro.py")]
    error = subprocess.run(script, capture_output=True, text=True, check=True).stdout.rsplit(maxsplit=1)[-1]
    assert float(error) > 0.1
    cause = document["report"]["tables"]["causes"][0]
    assert (cause["cause"], cause["stage"]) == ("clipped range", "quantize")
    assert document["try"]["setting"] == "quantize.calibrator=minmax"
    before = document["report"]["tables"]["metric by stage"][-1]
    after = document["try"]["report"]["tables"]["metric by stage"][-1]
    assert before["change"] < -0.05 < after["change"]
    code, said = pipe(
        "diff", "fuse", "quantize@last", "-C", folder, "--sort", "effect", "--json", "--fail-under", "sqnr=0"
    )
    worst = json.loads(said)["report"]["records"][0]
    assert code == 0 and worst["extra"]["outputs_sqnr_db"] > 10
    code, _ = pipe("diff", "quantize@last", "quantize@previous", "-C", folder, "--csv", "--fail-under", "own=10")
    assert code == 1
    with_settings = ("-C", folder, *short, *clipping)
    code, said = pipe("plan", *with_settings, "--diff", "last", "--json")
    changes = json.loads(said)["changes"]
    assert code == 0 and any("range by percentile" in row["now"] for row in changes)
    _, said = pipe("path", "quantize", "-C", folder)
    shutil.rmtree(said.strip())
    _, said = pipe("why", "-C", folder, "--json")
    notes = json.loads(said)["report"]["notes"]
    assert notes[0].startswith("quantize was not evaluated: its artifact was removed")
