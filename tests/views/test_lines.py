"""A run's lines: which figures they show, and that none is wider than the terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from layerline.pipeline.report import Report
from layerline.pipeline.run.outcome import Result
from layerline.views.lines import figures
from layerline.views.screen import Screen
from layerline.views.terminal import Live
from tests.views.samples import diff, record

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"nodes_before": 27, "nodes_after": 17}, ["27 -> 17 nodes"]),
    ({"rewrites": 3, "bytes_before": 119_000, "bytes_after": 42_123}, ["119 kB -> 42.1 kB file size", "rewrites 3"]),
    ({"initializer_bytes_before": 1600, "initializer_bytes_after": 3200}, ["1.6 kB -> 3.2 kB in initializers"]),
    (
        {"bytes_before": 2_250_000, "bytes_after": 2_250_001, "fp16_nodes": 0},
        ["2.25 MB file size, as before", "fp16 nodes 0"],
    ),
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


def shown(result: Result, name_width: int, width: int) -> list[str]:
    """The lines that a terminal so wide shows, without the spaces at their ends."""
    file = io.StringIO()
    Live(Screen(file=file, width=width), name_width).finished(result)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
@pytest.mark.parametrize("reason", ["never ran", ", ".join(["train.optimizer.weight_decay 0.1 -> 0.2"] * 4)])
def test_a_line_is_wrapped_where_the_terminal_ends_and_nothing_is_cut(width: int, reason: str) -> None:
    worst, metrics = diff("conv", "layer1.0.conv1", db=9.3), {f"figure {i}": i for i in range(3)}
    report = Report(stage="quantize", records=(worst,), metrics=metrics)
    result = Result(name="quantize", state="ran", reason=reason, seconds=12.0, record=record(report))
    lines = shown(result, 8, width)
    assert max(map(len, lines)) <= width
    facts = "worst layer1.0.conv1 9.3 dB figure 0 0 figure 1 1 figure 2 2"
    assert words(lines) == f"✓ quantize ran 12.0 s {facts} ({reason})"
    assert len(lines) == 1 or width < 160 or len(reason) > 20
    assert all(line.startswith(" " * 12) for line in lines[1:])


def test_the_layer_that_makes_the_greatest_error_itself_is_named() -> None:
    own = diff("conv", "net.conv", db=5.0, extra={"isolated_sqnr_db": 30.0})
    report = Report(stage="quantize", records=(own, diff("relu", "net.relu", db=4.0, extra={"isolated_sqnr_db": 40.0})))
    result = Result(name="quantize", state="cached", reason="fresh", record=record(report))
    assert shown(result, 8, 120)[0].endswith("  worst net.conv own 30.0 dB")


def test_equal_everywhere() -> None:
    report = Report(stage="fuse", records=(diff("conv", "conv", db=math.inf),))
    result = Result(name="fuse", state="cached", reason="fresh", record=record(report))
    assert shown(result, 4, 80)[0].endswith("  all equal")


def test_what_is_not_judged_is_not_said_to_be_equal() -> None:
    metrics = {"not_judged": "output z: random (RandomNormalLike)"}
    report = Report(stage="fuse", records=(diff("conv", "conv", db=math.inf), diff("z", "z")), metrics=metrics)
    result = Result(name="fuse", state="cached", reason="fresh", record=record(report))
    line = shown(result, 4, 120)[0]
    assert line.endswith("  all that is judged equal  not judged output z: random (RandomNormalLike)")


AXES = "batch 1 to 8, image_height 32 to 1333 in steps of 32, image_width 32 to 1333 in steps of 32, boxes 1 to 300"
BOUNDS = [{"batch": "fixed at 2"}, {"axes": "batch 1 to 8"}, {"axes": AXES}, {"batch": "fixed at 2", "axes": AXES}]


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_where_a_model_can_be_deployed_is_shown(width: int, bounds: dict[str, Any]) -> None:
    metrics = {"nodes": 812, "values_compared": 790, **bounds, "opset": 20}
    made = record(Report(stage="import-onnx", metrics=metrics))
    lines = shown(Result(name="import-onnx", state="ran", reason="never ran", seconds=12.0, record=made), 14, width)
    assert max(map(len, lines)) <= width
    for name, value in bounds.items():
        assert f"{name} {value}" in words(lines)
