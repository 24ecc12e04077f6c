"""Convolutions of one input that are added, as one Conv: the branches of RepVGG, MobileOne and ACNet."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from layerline.graph.io.ir_convert import as_ir
from layerline.graph.quantization import calibration_data
from tests.graph.fusing import fired, normal, ops, parse, prove, reason, statistics

X = {"x": normal(2, 4, 9, 8, seed=5)}


def branches(first: str, second: str, channels: int = 4, **weights: Any) -> onnx.ModelProto:
    body = f"a = {first} b = {second} y = Add(a, b)"
    return parse(f"(float[N, 4, H, W] x) => (float[N, {channels}, ?, ?] y)", body, **weights)


@pytest.mark.parametrize(
    ("kernels", "attributes"),
    [
        ([(3, 3), (1, 1)], ["pads = [1, 1, 1, 1]", "pads = [0, 0, 0, 0]"]),
        ([(1, 1), (3, 3)], ["pads = [0, 0, 0, 0]", "pads = [1, 1, 1, 1]"]),
        ([(3, 3), (1, 1)], ["pads = [1, 1, 1, 1], strides = [2, 2]", "strides = [2, 2]"]),
        ([(3, 3), (1, 3)], ["pads = [1, 1, 1, 1]", "pads = [0, 1, 0, 1]"]),
        ([(3, 3), (3, 3)], ["pads = [1, 1, 1, 1]", "pads = [1, 1, 1, 1]"]),
        ([(5, 3), (3, 1)], ["pads = [2, 1, 2, 1]", "pads = [1, 0, 1, 0]"]),
        # The small kernel lies in a corner of the large one.
        ([(3, 3), (1, 1)], ["pads = [0, 2, 2, 0]", "pads = [0, 0, 0, 0]"]),
        # A dilated kernel has an element in the middle, and one of its size.
        ([(3, 3), (1, 1)], ["pads = [2, 2, 2, 2], dilations = [2, 2]", "pads = [0, 0, 0, 0]"]),
        ([(3, 3), (3, 1)], ["pads = [2, 2, 2, 2], dilations = [2, 2]", "pads = [2, 0, 2, 0], dilations = [2, 1]"]),
    ],
)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_smaller_kernel_goes_into_the_larger(
    kernels: list[tuple[int, int]], attributes: list[str], group: int
) -> None:
    model = branches(
        f"Conv <group = {group}, {attributes[0]}>(x, v, s)",
        f"Conv <group = {group}, {attributes[1]}>(x, w)",
        v=normal(4, 4 // group, *kernels[0], seed=2),
        w=normal(4, 4 // group, *kernels[1], seed=3),
        s=normal(4, seed=4),
    )
    done = prove(model, X)
    assert ops(done.model) == ["Conv"] and fired(done) == {"parallel-conv"}


@pytest.mark.parametrize("group", [1, 2, 4])
def test_three_branches_of_repvgg_become_one(group: int) -> None:
    body = f"""
        a = Conv <group = {group}, pads = [1, 1, 1, 1]>(x, v) c = BatchNormalization(a, gamma, beta, mean, var)
        b = Conv <group = {group}>(x, w) d = BatchNormalization(b, gamma, beta, mean, var)
        e = BatchNormalization(x, gamma, beta, mean, var)
        f = Add(c, d) g = Add(e, f) y = Relu(g)"""
    model = parse(
        "(float[N, 4, H, W] x) => (float[N, 4, H, W] y)",
        body,
        v=normal(4, 4 // group, 3, 3, seed=2),
        w=normal(4, 4 // group, 1, 1, seed=3),
        **statistics(4),
    )
    assert ops(prove(model, X, {"x": normal(1, 4, 3, 5)}).model) == ["Conv", "Relu"]


@pytest.mark.parametrize("shape", [(2, 4, 9), (2, 4, 5, 6, 5)])
def test_other_numbers_of_axes(shape: tuple[int, ...]) -> None:
    axes = len(shape) - 2
    model = parse(
        f"(float[N, 4, {', '.join('?' * axes)}] x) => (float[N, 4, {', '.join('?' * axes)}] y)",
        f"a = Conv <pads = {[1] * (2 * axes)}>(x, v) b = Conv(x, w) y = Add(a, b)",
        v=normal(4, 4, *[3] * axes, seed=2),
        w=normal(4, 4, *[1] * axes, seed=3),
    )
    assert ops(prove(model, {"x": normal(*shape)}).model) == ["Conv"]


STAYS = {
    "a cross": ("Conv <pads = [0, 1, 0, 1]>(x, row)", "Conv <pads = [1, 0, 1, 0]>(x, column)", "covers"),
    "other dilations": (
        "Conv <pads = [2, 2, 2, 2], dilations = [2, 2]>(x, large)",
        "Conv <pads = [1, 1, 1, 1]>(x, large)",
        "covers",
    ),
    "between two elements": (
        "Conv <pads = [3, 2, 2, 2], dilations = [2, 2]>(x, large)",
        "Conv <pads = [0, 0, 1, 0]>(x, point)",
        "covers",
    ),
    "other groups": ("Conv <pads = [1, 1, 1, 1]>(x, large)", "Conv <group = 4>(x, depthwise)", "groups"),
    "channels that broadcast": ("Conv(x, point)", "Conv(x, single)", "channels"),
    "second reader": ("Conv <pads = [1, 1, 1, 1]>(x, large)", "Conv(x, point) z = Neg(b)", "second consumer"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_no_single_convolution_stays(name: str) -> None:
    first, second, why = STAYS[name]
    weights = {
        "row": normal(4, 4, 1, 3, seed=2),
        "column": normal(4, 4, 3, 1, seed=3),
        "large": normal(4, 4, 3, 3, seed=4),
        "point": normal(4, 4, 1, 1, seed=5),
        "depthwise": normal(4, 1, 1, 1, seed=6),
        "single": normal(1, 4, 1, 1, seed=7),
    }
    model = branches(first, second, **{key: array for key, array in weights.items() if key in first + second})
    if "z = " in second:
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    done = prove(model, X)
    assert ops(done.model).count("Conv") == 2
    assert why in reason(done, "parallel-conv")


def test_convolutions_of_two_inputs_stay() -> None:
    model = branches("Conv(x, v)", "Conv(n, w)", v=normal(4, 4, 1, 1), w=normal(4, 4, 1, 1, seed=1))
    model.graph.node.insert(0, onnx.helper.make_node("Relu", ["x"], ["n"]))
    assert ops(prove(model, X).model).count("Conv") == 2


def test_a_size_taken_from_a_conv_does_not_keep_it_apart() -> None:
    """torch's exporter reads the sizes behind a BatchNormalization in front of it."""
    body = """
        c = Conv <pads = [1, 1, 1, 1]>(x, w) size = Shape <start = 2>(c)
        n = BatchNormalization(c, gamma, beta, mean, var)
        head = Shape <end = 2>(n) all = Concat <axis = 0>(head, size) o = Resize <mode = "nearest">(x, , , all)
        y = Add(o, n)"""
    model = parse("(float[N, 4, H, W] x) => (float[N, 4, H, W] y)", body, w=normal(4, 4, 3, 3, seed=2), **statistics(4))
    done = prove(model, X, {"x": normal(1, 4, 3, 3)})
    assert "BatchNormalization" not in ops(done.model) and ops(done.model).count("Conv") == 1
    assert "batchnorm" in fired(done)


def test_values_that_an_optimised_session_loses_are_calibrated_all_the_same() -> None:
    """onnxruntime 1.31 merges a sum into a grouped Conv, and refuses the model where that Conv is tapped."""
    model = parse(
        "(float[N, 16, H, W] x) => (float[N, 16, H, W] y)",
        "a = Conv <group = 4, pads = [1, 1, 1, 1]>(x, v, s) b = Conv <group = 4>(x, w, s) c = Add(a, b) y = Relu(c)",
        v=np.full((16, 4, 3, 3), 0.5, np.float32),
        w=np.zeros((16, 4, 1, 1), np.float32),
        s=np.ones(16, np.float32),
    )
    outputs = calibration_data.session(as_ir(model), ["a"]).run({"x": np.ones((1, 16, 1, 1), np.float32)})
    # The middle of each kernel alone, over the four inputs of a group, and the bias.
    np.testing.assert_array_equal(outputs["a"], np.full((1, 16, 1, 1), 3.0))
