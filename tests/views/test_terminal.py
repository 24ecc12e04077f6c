"""Tables of the terminal: no column cut in two, no claim about what is not known yet, and long values told apart."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from layerline.pipeline.commands.lookup import Beside
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.run.plan import Step
from layerline.views import json_output, report_output, screen, terminal
from layerline.views.tables import records_table
from tests.views.samples import diff, record

PROFILES = "[{'batch': {'min': 1, 'opt': 1, 'max': 8}}, {'batch': {'min': 8, 'opt': 64, 'max': "
MADE = "2025-03-01T10:00:12Z"


def step(name: str, parts: dict[str, Any] | None = None, *, key: str | None = "a" * 64, **fields: Any) -> Step:
    return Step(stage=cast("Any", SimpleNamespace(name=name)), key=key, parts=parts or {}, **fields)


def fresh(name: str) -> Step:
    made = record(Report(stage=name))
    return step(name, record=made, artifact=cast("Any", SimpleNamespace(digest=made.digest)), reason="fresh")


def lines(width: int, show: Any, *arguments: Any) -> list[str]:
    """What `show` prints on a terminal so wide, without the spaces at the ends of its lines."""
    screen = io.StringIO()
    show(Console(file=screen, width=width, highlight=False), *arguments)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def status(width: int, *steps: Step) -> list[str]:
    states = {s.stage.name: "fresh" if s.artifact else "would run" for s in steps}
    return lines(width, terminal.status, steps, states)


def test_status_leaves_out_columns_that_say_nothing() -> None:
    heads, row = status(80, fresh("train"))
    assert heads.split() == ["stage", "state", "digest", "made", "verdict"]
    assert row.split() == ["train", "fresh", fresh("train").artifact.digest[:12], MADE, "passed"]  # type: ignore[union-attr]
    heads, row = status(80, step("ema", reason="never ran"))
    assert heads.split() == ["stage", "state", "why"] and row == "ema    would run  never ran"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_reason_takes_the_place_of_the_time_where_both_do_not_fit(width: int) -> None:
    reason = "calibrator minmax -> percentile"
    found = status(width, fresh("train"), step("quantize", reason=reason))
    assert max(map(len, found)) <= width
    assert ("made" in found[0]) == (MADE in found[1]) == (width >= 100)
    assert (reason in found[2]) == (width >= 80)
    assert found[1].endswith("passed") and fresh("train").artifact.digest[:12] in found[1]  # type: ignore[union-attr]
    words = " ".join(" ".join(line[21:40].split()) for line in found[2:]) if width == 60 else reason
    assert words == reason, "wrapped between words"


LONG = "model.layers.31.self_attn.projection"
EXTRA = {"isolated_sqnr_db": 31.0, "clipped": 0.00001, "weight_sqnr_db": math.inf, "network_layer": "fused_gemm"}
FULL = diff(
    "linear_31", LONG, "MatMul", 40.0, shape=("batch", 16, 14, 14), max_abs=0.5, cosine=0.99, tolerance=1.0, extra=EXTRA
)
DROPPED = ["engine layer", "shape", "max abs", "cosine", "rel L2", "weight dB", "clipped %", "own dB", "op"]


def test_columns_go_one_by_one_and_the_names_stay() -> None:
    view = records_table([FULL])
    gone: list[str] = []
    for width in range(300, 20, -1):
        head = lines(width, terminal.table, view)[0]
        gone += [label for label in DROPPED if label not in head and label not in gone]
        if width > 80:
            assert LONG in lines(width, terminal.table, view)[1], "no name is wrapped where it has room"
    assert gone == DROPPED
    assert lines(60, terminal.table, view)[0].split() == ["layer", "value", "verdict", "SQNR", "dB"]


@pytest.mark.parametrize("width", [80, 120])
def test_what_an_engine_computes_in_is_shown_at_any_width(width: int) -> None:
    extra = {"network_layer": f"{LONG}/Conv", "type": "CONVOLUTION", "precision": "int8"}
    names = "If_0_then_branch__Inline_0__/stft/Unsqueeze", "If_0_then_branch__Inline_0__/stft/Unsqueeze_output_0"
    record = LayerDiff(name=names[1], module=names[0], op="Conv", shape=("batch", 16), extra=extra)
    head, *rows = lines(width, terminal.table, records_table([record]))
    assert head.split()[:2] == ["layer", "value"] and max(map(len, rows)) <= width
    assert "CONVOLUTION" in rows[0] and "int8" in rows[0]
    columns = [row[:row_end] for row in rows for row_end in [head.index("type")]]
    for start, end, name in ((0, head.index("value"), names[0]), (head.index("value"), None, names[1])):
        assert "".join(column[start:end].strip() for column in columns) == name, "wrapped, and not cut"


def explained(width: int, now: Step, old: dict[str, str] | None, reached: tuple[str, ...] = ()) -> list[str]:
    prints = {"model": Fingerprint("0" * 64, reached)}
    return lines(width, terminal.explain, now, old, prints)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_long_values_that_differ_at_their_ends_are_shown_whole(width: int) -> None:
    old, new = PROFILES + "256}}]", PROFILES + "512}}]"
    parts = {"config.profiles": new, "config.targets": PROFILES + "64}}]"}
    found = explained(width, step("engine", parts, reason="profiles changed"), {**parts, "config.profiles": old})
    assert max(map(len, found)) <= width
    changed = "".join(found[2:-2])
    assert "256}}]" in changed and "512}}]" in changed and changed.count("…") == 0
    same = found[-2]
    assert same.startswith("config.targets") and same.endswith("…"), "one line for what did not change"


def test_an_input_that_is_not_made_yet_may_change() -> None:
    parts = {"stage": "engine"}
    waiting = step("engine", parts, key=None, reason="after quantize")
    old = {**parts, "input.model": "b" * 64, "file.gone.csv": "c" * 64}
    head, _, same, expected, gone, *_ = explained(80, waiting, old)
    assert head == "engine  after quantize  key not known yet"
    assert same.split() == ["stage", "same", "engine"]
    assert expected.split() == ["input.model", "may", "change", "b" * 12, "not", "known", "yet"]
    assert gone.split() == ["file.gone.csv", "changed", "c" * 12]
    told = json_output.explain(waiting, old, {})["parts"]
    assert [told[n]["changed"] for n in ("input.model", "file.gone.csv", "stage")] == [None, True, False]
    settled = json_output.explain(step("engine", parts), old, {})["parts"]
    assert settled["input.model"]["changed"] is True


def test_a_field_is_shown_as_pipe_yaml_has_it() -> None:
    parts = {"config.steps": None, "config.shuffle": True, "config.rate": 1.0}
    rows = [
        row.split() for row in explained(80, step("train", parts), {"config.steps": "None", "config.shuffle": "False"})
    ]
    assert ["config.steps", "same", "unset"] in rows
    assert ["config.shuffle", "changed", "false", "true"] in rows
    assert ["config.rate", "changed", "1.0"] in rows


def test_a_table_of_changes_without_a_change_is_left_out() -> None:
    tables = {"search": [{"layer": "a"}], "slices": [{"slice": 0, "change": 0.0}, {"slice": 1, "change": 0.0}]}
    assert lines(60, report_output.report_tables, Report(stage="quantize", tables=tables), tuple(tables)) == [
        "search",
        "layer",
        "a",
    ]
    tables["slices"][0]["change"] = -0.5
    shown = lines(60, report_output.report_tables, Report(stage="quantize", tables=tables), tuple(tables))
    assert shown[3:] == ["slices", "slice  change", "    0    -0.5", "    1       0"]


def test_what_a_hook_reaches_is_a_paragraph_and_an_absent_hook_is_said() -> None:
    parts = {"stage": "train"}
    assert explained(80, step("train", parts), parts)[-1] == "model() is not defined in the task"
    names = tuple(f"task.py:Block{i}" for i in range(12))
    found = explained(80, step("train", parts), parts, (*names, "task.py:import torch"))[3:]
    assert max(map(len, found)) <= 80 and found[0].startswith("model() reaches task.py:Block0, ")
    assert all(line.startswith("        task.py:") for line in found[1:]) and len(found) > 2
    assert "import" not in "".join(found)


def test_the_heading_of_a_comparison_is_wrapped_between_words() -> None:
    report = Report(stage="quantize", reference="float onnx on onnxruntime", candidate="int8 onnx on onnxruntime",
                    records=(diff("a", db=30.0),))  # fmt: skip
    run = Run("20261129-204222-597146-63", True, (), ())
    beside = Beside(run, report, tuple(f"train: field_{i} 1 -> 2" for i in range(5)))
    first, second, third, fourth, *_ = lines(80, report_output.diff, report, 5, "error", beside)
    assert first == "quantize  float onnx on onnxruntime against int8 onnx on onnxruntime; then: run"
    assert second == "          20261129-204222-597146-63"
    assert third.startswith("changed since then  train: field_0 1 -> 2; ") and fourth.startswith(" " * 20 + "1 -> 2; ")
    two = replace(report, stage="fuse quantize", reference="fuse", candidate="quantize")
    assert lines(80, report_output.diff, two, 5, "error")[0] == "fuse against quantize"
    nothing = lines(80, report_output.diff, report, 5, "error", Beside(run, report, ()))
    assert nothing[2] == "changed since then  nothing that is on record"


def test_only_what_a_run_did_is_wrapped() -> None:
    stages = [f"stage-{i}" for i in range(18)]
    row = {"id": "20261129-204222-597146-63", "time": MADE, "passed": True, "stages": stages, "ran": stages[9:]}
    row |= {
        "sets": [],
        "errors": {},
        "changed": [],
        "settings": {"stage-1": {"lr": "0.1"}},
        "metrics": {"stage-9": {"loss": 0.1}},
    }
    found = lines(80, terminal.runs, [row, row | {"passed": False}])
    assert max(map(len, found)) <= 80
    assert found[0] == f"20261129-204222-597146-63  {MADE}  passed"
    assert found[1].startswith("  ran       stage-9 ") and found[2].startswith(" " * 12 + "stage-")
    assert sum("failed" in line for line in found) == 1
    assert sum("stage-1.lr=0.1" in line for line in found) == 1, "of the oldest run alone"
    assert sum("stage-9: loss 0.1" in line for line in found) == 2


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("132", 132), ("", 160), ("wide", 160)])
def test_a_pipe_is_as_wide_as_it_is_told(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert screen.console().width == width


def test_causes_are_a_list_with_evidence_and_change_and_the_verdict_is_last() -> None:
    cause = {
        "cause": "clipped range",
        "stage": "quantize",
        "layer": "view",
        "value": "view",
        "evidence": "20 % of view lies beyond its range, and more than 0.5 % of 5 other values",
        "advice": "use a calibrator that keeps all values",
        "setting": 'quantize.layers={"a b": "fp16"}',
    }
    rows = {"metric by stage": [{"stage": "quantize", "low_95": -0.5}], "causes": [cause], "worst layers": []}
    report = Report(stage="why", notes=("lost in quantize",), tables=rows)
    assert lines(60, report_output.why, report, tuple(rows)) == [
        "metric by stage",
        "stage     95 % low",
        "quantize      -0.5",
        "causes, the likeliest first",
        " 1  clipped range  quantize  view",
        "    20 % of view lies beyond its range, and more than 0.5 %",
        "    of 5 other values",
        "    use a calibrator that keeps all values: --set",
        '    \'quantize.layers={"a b": "fp16"}\'',
        "verdict",
        "  lost in quantize",
    ]
    assert lines(60, report_output.why, report, ("metric by stage",))[3:] == ["verdict", "  lost in quantize"]


def test_columns_without_room_are_named_in_every_table() -> None:
    row = {"stage": "fuse", "layer": "block.conv", "sqnr_db": 30.0, "value": "conv2d", "op": "Convolution"}
    report = Report(stage="why", tables={"worst layers": [row]})
    printed = lines(36, report_output.why, report, ("worst layers",))
    assert printed[1:4] == [
        "stage  layer       SQNR dB  value",
        "fuse   block.conv     30.0  conv2d",
        "hidden: op; widen the terminal or use --json",
    ]


def test_long_settings_of_the_oldest_run_are_shortened() -> None:
    fields = {f"field_{i}": "x" * 300 for i in range(9)}
    row = {
        "id": "a", "time": "", "passed": True, "stages": ["train"], "ran": ["train"], "errors": {}, "sets": [],
        "changed": [], "settings": {"train": fields}, "metrics": {},
    }  # fmt: skip
    printed = lines(2000, terminal.runs, [row])
    assert printed[-1].split(maxsplit=1)[1].split("; ") == [
        *[f"train.field_{i}={'x' * 59}…" for i in range(6)],
        "and 3 more, which --json lists",
    ]
