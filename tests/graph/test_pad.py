"""Pad into Conv and MaxPool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerline.pipeline.errors import StageError
from tests.forms import proto
from tests.graph.fusing import normal, ops, parse, prove, reason, run

SPATIAL = np.array([0, 0, 1, 2, 0, 0, 0, 1])


def padded(node: str, pads: Any = SPATIAL, value: float = 0.0, before: str = "r = Identity(x)", **tensors: Any) -> Any:
    body = f"{before} p = Pad(r, pads, value) y = {node}"
    return parse("(float[N, 2, 6, 6] x) => (float[] y)", body, pads=np.array(pads), value=np.float32(value), **tensors)


@pytest.mark.parametrize(
    "own", ["", "<pads = [1, 0, 0, 1]>", "<strides = [2, 1], dilations = [1, 2]>", '<auto_pad = "VALID">']
)
def test_conv_pads_for_itself(own: str) -> None:
    model = padded(f"Conv {own}(p, w)", w=normal(3, 2, 3, 3))
    assert ops(prove(model, {"x": normal(2, 2, 6, 6)}).model) == ["Conv"]


def test_axes_of_pad_are_heeded() -> None:
    model = parse("(float[N, 2, 6, 6] x) => (float[] y)", "p = Pad(x, pads, , axes) y = Conv(p, w)", opset=18,
                  pads=np.array([1, 2]), axes=np.array([-1]), w=normal(3, 2, 3, 3))  # fmt: skip
    done = prove(model, {"x": normal(2, 2, 6, 6)})
    assert [list(a.ints) for a in proto(done.model).graph.node[0].attribute if a.name == "pads"] == [[0, 1, 0, 2]]


@pytest.mark.parametrize(
    ("node", "pads", "value", "why"),
    [
        ("Conv(p, w)", SPATIAL, 1.0, "fills with 1.0"),
        ("Conv(p, w)", [0, 0, -1, 0, 0, 0, 0, 0], 0.0, "or cuts"),
        ("Conv(p, w)", [0, 1, 0, 0, 0, 0, 0, 0], 0.0, "changes batch or channels"),
        ("Conv(p, w)", [1, 0, 0, 0, 0, 0, 0, 0], 0.0, "changes batch or channels"),
        ('Conv <auto_pad = "SAME_UPPER">(p, w)', SPATIAL, 0.0, "pads by auto_pad"),
        ("MaxPool <kernel_shape = [3, 3]>(p)", SPATIAL, 0.0, "with -inf"),
        ("MaxPool <kernel_shape = [3, 3]>(p)", SPATIAL, -1.0, "with -inf"),
        ("MaxPool <kernel_shape = [2, 2]>(p)", SPATIAL, -np.inf, "windows of padding alone"),
        ("MaxPool <kernel_shape = [3, 3], dilations = [2, 2]>(p)", SPATIAL, -np.inf, "windows of padding alone"),
        ("MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(p)", SPATIAL, -np.inf, "rounds its size"),
    ],
)
def test_other_padding_stays(node: str, pads: Any, value: float, why: str) -> None:
    channels = 3 if list(pads)[1] else 2
    done = prove(padded(node, pads, value, w=normal(3, channels, 3, 3)), {"x": normal(2, 2, 6, 6)})
    assert ops(done.model)[0] == "Pad"
    rule = "pad-conv"
    if node.startswith("MaxPool"):
        rule = "pad-pool"
    assert why in reason(done, rule)


def test_pad_with_two_readers_stays() -> None:
    model = padded("Conv(p, w) z = Relu(p)", w=normal(3, 2, 3, 3))
    model.graph.output.append(type(model.graph.output[0])(name="z", type=model.graph.output[0].type))
    assert reason(prove(model, {"x": normal(2, 2, 6, 6)}), "pad-conv") == "Pad output p has a second consumer z"


def test_reflection_is_no_padding_of_conv() -> None:
    model = parse("(float[N, 2, 6, 6] x) => (float[] y)", 'p = Pad <mode = "reflect">(x, pads) y = Conv(p, w)',
                  pads=SPATIAL, w=normal(3, 2, 3, 3))  # fmt: skip
    assert "doesn't fill with a constant" in reason(prove(model, {"x": normal(2, 2, 6, 6)}), "pad-conv")


def test_padding_with_0_is_not_maxpools_own() -> None:
    """T08: all -1, padded by 1 with 0, MaxPool 3/3: the corners of the padding win everywhere."""
    model = parse("(float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y)",
                  "p = Pad(x, pads) y = MaxPool <kernel_shape = [3, 3], strides = [3, 3]>(p)",
                  pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]))  # fmt: skip
    feed = {"x": -np.ones((1, 1, 4, 4), np.float32)}
    np.testing.assert_array_equal(run(prove(model, feed).model, feed)["y"], np.zeros((1, 1, 2, 2)))


@pytest.mark.parametrize(
    ("before", "value"),
    [("r = Relu(x)", 0.0), ("r = Clip(x, zero, six)", 0.0), ("r = Sigmoid(x)", 0.0), ("r = Identity(x)", -np.inf)],
)
def test_padding_that_maxpool_would_add_goes_into_it(before: str, value: float) -> None:
    """As Keras' ResNets have it behind their first Relu, and TensorFlow's padding "same" with -inf."""
    pool = "MaxPool <kernel_shape = [3, 3], strides = [2, 2]>(p)"
    model = padded(pool, value=value, before=before, zero=np.float32(0), six=np.float32(6))
    done = prove(model, {"x": normal(2, 2, 6, 6)})
    assert "Pad" not in ops(done.model) and "MaxPool" in ops(done.model)


@pytest.mark.parametrize("before", ["r = LeakyRelu(x)", "r = Clip(x, low)", "r = Neg(x)"])
def test_padding_with_0_stays_where_something_may_be_below(before: str) -> None:
    model = padded("MaxPool <kernel_shape = [3, 3]>(p)", before=before, low=np.float32(-1))
    assert "Pad" in ops(prove(model, {"x": normal(2, 2, 6, 6)}).model)


def test_operators_before_opset_11_are_refused() -> None:
    body = "p = Pad <pads = [0, 0, 1, 1, 0, 0, 1, 1]>(x) y = Conv(p, w)"
    model = parse("(float[N, 2, 6, 6] x) => (float[] y)", body, opset=10, w=normal(3, 2, 3, 3))
    with pytest.raises(StageError, match="opset 10; 11 is the oldest"):
        prove(model, {"x": normal(2, 2, 6, 6)})
