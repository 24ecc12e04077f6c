"""A run's lines: which figures they show, and that none is wider than the terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerline.pipeline.report import Report
from layerline.pipeline.runner import Result
from layerline.views.lines import figures, stage_line
from tests.views.samples import diff, record

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"nodes_before": 27, "nodes_after": 17}, ["27 -> 17 nodes"]),
    ({"rewrites": 3, "bytes_before": 119_000, "bytes_after": 42_123}, ["119 kB -> 42.1 kB", "rewrites 3"]),
    ({"bytes_before": 2_250_000, "bytes_after": 2_250_001, "fp16_nodes": 0}, ["2.25 MB", "fp16 nodes 0"]),
    ({"accuracy": 0.979, "accuracy_float": 0.98}, ["accuracy 0.979 (float 0.98)"]),
    ({"onnx_bytes": 5_000_000, "samples_s": 1000.0}, ["onnx 5 MB", "samples/s 1000"]),
    ({"nodes_before": 3, "loss": None}, ["nodes before 3"]),
    ({str(i): i for i in range(9)}, ["0 0", "1 1", "2 2"]),
    (
        {"engine_bytes": 1_944_924, "compute_float32": 4, "compute_int8": 1, "layers": 208},
        ["engine 1.94 MB", "compute float32 4, int8 1", "layers 208"],
    ),
]


@pytest.mark.parametrize(("metrics", "shown"), CASES)
def test_figures(metrics: dict[str, Any], shown: list[str]) -> None:
    assert figures(metrics) == shown


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
@pytest.mark.parametrize("reason", ["never ran", "train.optimizer.weight_decay 0.1 -> 0.2, " * 4])
def test_a_line_is_never_wider_than_the_terminal(width: int, reason: str) -> None:
    worst, metrics = diff("conv", "layer1.0.conv1", db=9.3), {f"figure {i}": i for i in range(3)}
    report = Report(stage="quantize", records=(worst,), metrics=metrics)
    result = Result(name="quantize", state="ran", reason=reason, seconds=12.0, record=record(report))
    line = stage_line(result, 8, width).plain
    assert len(line) <= width and line.startswith("✓ quantize  ran ")
    assert "  worst layer1.0.conv1 9.3 dB" in line and (width < 80 or "  figure 0 0" in line)
    assert width < 100 or reason[:5] in line
    assert width < 160 or len(reason) > 20 or "  figure 1 1  figure 2 2  (never ran)" in line


@pytest.mark.parametrize("reason", ["never ran", "dims.a_long_name_of_a_dimension unset -> 48, dims.other added " * 2])
def test_no_reason_pushes_out_what_an_engine_computes_in(reason: str) -> None:
    metrics = {"engine_bytes": 1_944_924, "compute_float32": 4, "compute_int8": 1, "layers": 208, "build_seconds": 0.8}
    result = Result(name="engine", state="ran", reason=reason, record=record(Report(stage="engine", metrics=metrics)))
    line = stage_line(result, 14, 80).plain
    assert line.endswith("  engine 1.94 MB  compute float32 4, int8 1") and len(line) <= 80
    line = stage_line(result, 14, 120).plain
    assert "compute float32 4, int8 1" in line and len(line) <= 120 and f"({reason[:5]}" in line


@pytest.mark.parametrize(("width", "sizes"), [(60, False), (80, True), (100, True), (120, True)])
def test_of_a_name_too_long_the_end_stays(width: int, sizes: bool) -> None:
    worst = diff("x", "encoder.layers.11.self_attention.output.dense.projection", db=9.3)
    report = Report(stage="quantize", records=(worst,), metrics={"bytes_before": 119_000, "bytes_after": 42_123})
    result = Result(name="quantize", state="ran", reason="never ran", seconds=1.0, record=record(report))
    line = stage_line(result, 8, width).plain
    assert len(line) <= width and "  worst …" in line and "rojection 9.3 dB" in line
    assert ("  119 kB -> 42.1 kB" in line) == sizes


def test_equal_everywhere() -> None:
    report = Report(stage="fuse", records=(diff("conv", "conv", db=math.inf),))
    result = Result(name="fuse", state="cached", reason="fresh", record=record(report))
    assert stage_line(result, 4, 80).plain.endswith("  all equal")


def test_what_is_not_judged_is_not_said_to_be_equal() -> None:
    metrics = {"not_judged": "output z: random (RandomNormalLike)"}
    report = Report(stage="fuse", records=(diff("conv", "conv", db=math.inf), diff("z", "z")), metrics=metrics)
    result = Result(name="fuse", state="cached", reason="fresh", record=record(report))
    line = stage_line(result, 4, 120).plain
    assert line.endswith("  all that is judged equal  not judged output z: random (RandomNormalLike)")


AXES = "batch 1 to 8, image_height 32 to 1333 in steps of 32, image_width 32 to 1333 in steps of 32, boxes 1 to 300"
BOUNDS = [{"batch": "fixed at 2"}, {"axes": "batch 1 to 8"}, {"axes": AXES}, {"batch": "fixed at 2", "axes": AXES}]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 140])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("reason", ["never ran", "export.dynamic added, export.opset 20 -> 17, task.py changed " * 3])
def test_where_a_model_can_be_deployed_is_never_cut(width: int, bounds: dict[str, Any], reason: str) -> None:
    worst = diff("x", "encoder.layers.11.self_attention.output.dense.projection", db=9.3)
    metrics = {"nodes": 812, "values_compared": 790, **bounds, "opset": 20}
    made = record(Report(stage="import-onnx", records=(worst,), metrics=metrics))
    shown = stage_line(Result(name="import-onnx", state="ran", reason=reason, seconds=12.0, record=made), 14, width)
    lines = shown.plain.splitlines()
    assert max(map(len, lines)) <= max(width, 38)
    words = " ".join(shown.plain.split())
    for name, value in bounds.items():
        assert f"{name} {value}" in words
    assert all(line.startswith(" " * 18) for line in lines[1:])


def test_bounds_stand_on_the_line_where_there_is_room() -> None:
    metrics = {"nodes": 27, "values_compared": 23, "axes": "batch 1 to 256", "opset": 20}
    result = Result(name="export", state="cached", reason="", record=record(Report(stage="export", metrics=metrics)))
    assert stage_line(result, 8, 90).plain.endswith("  nodes 27  values compared 23  axes batch 1 to 256")
    narrow = stage_line(result, 8, 70).plain.splitlines()
    assert narrow[0].endswith("  values compared 23  opset 20") and narrow[1:] == [" " * 12 + "axes batch 1 to 256"]
