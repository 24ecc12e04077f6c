"""The table of `pipe diff`: what a narrow terminal goes without, and what it never cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from rich.cells import cell_len

from layerline.pipeline.report import LayerDiff
from layerline.views import layers
from tests.views.samples import diff

LONG = "model.layers.31.self_attn.projection"
EXTRA = {"isolated_sqnr_db": 31.0, "clipped": 0.00001, "weight_sqnr_db": math.inf, "network_layer": "fused_gemm"}
FULL = diff(
    "linear_31", LONG, "MatMul", 40.0, shape=("batch", 16, 14, 14), max_abs=0.5, cosine=0.99, tolerance=1.0, extra=EXTRA
)


def labels(columns: Sequence[layers.DiffColumn]) -> list[str]:
    return [c.label for c in columns]


def cell(record: LayerDiff, label: str) -> str:
    return next(c for c in layers.columns([record], None) if c.label == label).cells[0].plain


def test_columns_go_one_by_one_and_the_names_stay() -> None:
    found = layers.columns([FULL], None)
    order = ["engine layer", "shape", "max abs", "cosine", "rel L2", "weight dB", "clipped %", "own dB", "op"]
    gone: list[str] = []
    for width in range(300, 0, -1):
        kept = labels(layers.fitting(found, width))
        gone += [label for label in labels(found) if label not in kept and label not in gone]
    assert gone == order
    assert labels(layers.fitting(found, 1)) == ["layer", "value", "SQNR dB", ""]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_rows_fit_and_cut_no_name(width: int) -> None:
    lines = layers.lines(layers.fitting(layers.columns([FULL, diff("relu", "", "Relu", math.inf)], None), width))
    assert max(cell_len(line.plain) for line in lines) <= width
    assert LONG in lines[1].plain and "linear_31" in lines[1].plain


@pytest.mark.parametrize("width", [80, 120])
def test_what_an_engine_computes_in_is_shown_at_any_width(width: int) -> None:
    extra = {"network_layer": f"{LONG}/Conv", "type": "CONVOLUTION", "precision": "int8"}
    names = "If_0_then_branch__Inline_0__/stft/Unsqueeze", "If_0_then_branch__Inline_0__/stft/Unsqueeze_output_0"
    record = LayerDiff(name=names[1], module=names[0], op="Conv", shape=("batch", 16), extra=extra)
    shown = layers.fitting(layers.columns([record], None), width)
    assert {"layer", "value", "type", "precision"} <= set(labels(shown))
    line = layers.lines(shown)[1].plain
    assert cell_len(line) <= width and "CONVOLUTION" in line and "int8" in line
    assert line.count("…") == (2 if width == 80 else 1) and "/Unsqueeze_output_0  CONVOLUTION" in line


def test_columns_without_an_entry_are_left_out() -> None:
    unmeasured = [LayerDiff(name="x", op="Gemm", module="fc", extra={"network_layer": "g"})]
    assert labels(layers.columns(unmeasured, None)) == ["layer", "value", "op", "engine layer"]


def test_a_shape_and_shares_as_people_read_them() -> None:
    assert cell(FULL, "shape") == "batch×16×14×14"
    shares = {0.0: "0", 0.00001: "~0", 0.0001: "0.01", 0.0123: "1.23", 1.0: "100.00"}
    for share, text in shares.items():
        assert cell(diff("x", extra={"clipped": share}), "clipped %") == text


def test_then_is_joined_by_name() -> None:
    records = [diff("a", db=30.0), diff("b", db=40.0)]
    found = {c.label: [t.plain for t in c.cells] for c in layers.columns(records, {"b": diff("b", db=50.0)})}
    assert (found["now dB"], found["then dB"]) == (["30.0", "40.0"], ["", "50.0"])
