"""Dynamic axes: mistakes in the declaration are named, and the graph carries exactly what was declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from layerline.export.dynamic_axes import Axes, declare, settle, write
from layerline.pipeline.config.field_types import Axis
from layerline.pipeline.errors import ConfigError, StageError
from tests.forms import as_ir

FEED = {"x": np.zeros((2, 3, 8)), "y": np.zeros((2, 5)), "n": np.array(3)}


def axes(**declared: dict[int, str | Axis]) -> Axes:
    by_input = {k: {i: Axis.model_validate(v) for i, v in d.items()} for k, d in declared.items()}
    return declare(FEED, by_input)


def test_places_sizes_and_growth() -> None:
    found = axes(x={0: "batch", -1: Axis(name="w", multiple=8)}, y={0: "batch"})
    assert found.places("batch") == [("x", 0), ("y", 0)]
    assert found.places("w") == [("x", 2)]
    grown = found.grown(FEED)
    # One step of eight is a size of one to whoever traces it.
    assert (grown["x"].shape, grown["y"].shape) == ((2, 3, 16), (2, 5))
    assert found.resized(FEED, {"batch": 5})["y"].shape == (5, 5)


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"min": 0, "max": 4}, "greater than 0"),
        ({"min": 4, "max": 3}, "max 3 is below min 4"),
        ({"min": 33, "max": 63, "multiple": 32}, "no multiple of 32 lies between min 33 and max 63"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(bounds, why) -> None:
    with pytest.raises(ValueError, match=why):
        Axis(name="n", **bounds)


@pytest.mark.parametrize(
    ("declared", "told", "hint"),
    [
        ({"xx": {0: "n"}}, "unknown input 'xx'", "did you mean 'x'"),
        ({"attention_mask": {0: "n"}}, "unknown input 'attention_mask'", "takes x, y, n"),
        ({"x": {3: "n"}}, "has 3 axes, there is no axis 3", ""),
        ({"x": {-4: "n"}}, "no axis -4", ""),
        ({"n": {0: "n"}}, "has 0 axes", ""),
        ({"x": {0: "n", 1: "n"}}, "ties axes whose sizes in the example differ", ""),
        ({"x": {0: Axis(name="n", max=1)}}, "leave nothing to vary", "leave a fixed axis out"),
        ({"x": {0: Axis(name="n", min=3)}}, "size 2 of 'n' is outside", ""),
        ({"x": {1: Axis(name="n", max=2)}}, "size 3 of 'n' is outside", ""),
        ({"x": {1: Axis(name="n", multiple=2)}}, "size 3 of 'n' is outside", ""),
        (
            {"x": {0: Axis(name="n", max=4)}, "y": {0: Axis(name="n", max=8)}},
            "tied to another with other bounds",
            "",
        ),
    ],
)
def test_mistakes_are_named(declared: dict[str, Any], told: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        axes(**declared)
    assert error.value.where.startswith("dynamic.")
    assert hint in error.value.hint


def graph(inputs: str, outputs: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => ({outputs}) {{ o = Relu(x) }}'
    return as_ir(parser.parse_model(text))


def shapes(values: Sequence[ir.Value]) -> list[list[int | str]]:
    return [[size if isinstance(size, int) else size.value for size in value.shape] for value in values]


def test_symbols_get_their_declared_names_everywhere() -> None:
    model = graph("float[s77, 3, s0] x, float[s5, 5] y", "float[n] o")
    model.graph.outputs[0].shape = ir.Shape(["s77", "(s0//2)", "s77*s0", "5"])
    write(model, axes(x={0: "batch", 2: "w"}, y={0: "batch"}))
    assert shapes(model.graph.inputs) == [["batch", 3, "w"], ["batch", 5]]
    assert shapes(model.graph.outputs) == [["batch", "(w//2)", "batch*w", 5]]


def test_multiples_name_the_step_too() -> None:
    model = graph("float[n, 3, w] x", "float[n, w] o")
    model.graph.inputs[0].shape = ir.Shape(["n", 3, "8*_w"])
    model.graph.outputs[0].shape = ir.Shape(["n", "_w"])
    write(model, axes(x={2: Axis(name="w", multiple=8)}))
    assert shapes(model.graph.inputs) == [["n", 3, "w"]]
    assert shapes(model.graph.outputs) == [["n", "w//8"]]


@pytest.mark.parametrize("size", ["2", "'2'"])
def test_an_axis_that_came_out_fixed_is_an_error(size: str) -> None:
    """T02: declared, and still static in the result."""
    model = graph("float[2, 3, 8] x", "float[2] o")
    if size == "'2'":
        model.graph.inputs[0].shape = ir.Shape(["2", 3, 8])
    with pytest.raises(StageError, match=r"fixed at 2") as error:
        write(model, axes(x={0: "batch"}))
    assert error.value.where == "input x, axis 0"


def test_two_names_for_one_size_are_an_error() -> None:
    with pytest.raises(StageError, match="'a' and 'b' to be the same size"):
        write(graph("float[s, 3, 8] x, float[s, 5] y", "float[s] o"), axes(x={0: "a"}, y={0: "b"}))


def test_outputs_are_corrected_by_what_they_were() -> None:
    model = graph("float[n, 3, w] x", "float[2, 3, 8, n] o")
    known = axes(x={0: "n", 2: "w"})
    runs = [({"x": np.zeros((n, 3, w))}, {"o": np.zeros((n, 3, w // 2, n))}) for n, w in ((2, 8), (5, 8), (2, 12))]
    settle(model, known, runs)
    assert shapes(model.graph.outputs) == [["n", 3, "o_2", "n"]]
