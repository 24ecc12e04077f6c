"""Channels are evened out: the float model computes the same, and one scale serves all channels better."""

import dataclasses

import numpy as np
import onnx
import pytest

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.collect import Ranges
from layerline.graph.quantization import convert, equalization, qdq, repairs
from layerline.graph.quantization.qdq_placement import Rules, place
from tests.forms import as_ir, proto
from tests.graph import test_qdq
from tests.graph.test_qdq import f32, model, run
from tests.graph.test_range_choice import setup

SPREAD = np.float32([40, 1, 0.5, 8, 1, 0.25])


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setattr(test_qdq, "RNG", np.random.default_rng(0))


def conv(outputs, inputs, size=3):
    return f32(outputs, inputs, size, size)


def spread(weight, axis=0):
    """A weight whose output channels differ 160 times in size."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    return weight * SPREAD.reshape(shape)


IMAGE, ROWS = ("float[2, 3, 8, 8] x", (2, 3, 8, 8)), ("float[4, 7, 6] x", (4, 7, 6))
BETWEEN_LAYERS = {
    "Conv": (IMAGE, "a = Conv (x, w) r = Relu (a) y = Conv (r, v)", lambda: {"w": spread(conv(6, 3)), "v": conv(4, 6)}),
    "bias": (IMAGE, "a = Conv (x, w, b) r = LeakyRelu (a) y = Conv (r, v)",
             lambda: {"w": spread(conv(6, 3)), "b": SPREAD * f32(6), "v": conv(4, 6)}),
    "grouped": (IMAGE, "a = Conv (x, w) r = Relu (a) y = Conv <group = 2> (r, v)",
                lambda: {"w": spread(conv(6, 3)), "v": conv(4, 3)}),
    "depthwise": (IMAGE, "a = Conv (x, w) r = Relu (a) y = Conv <group = 6> (r, v)",
                  lambda: {"w": spread(conv(6, 3)), "v": conv(6, 1)}),
    "ConvTranspose": (IMAGE, "a = ConvTranspose (x, w) r = Abs (a) y = ConvTranspose (r, v)",
                      lambda: {"w": spread(conv(3, 6), 1), "v": conv(6, 4)}),
    "residual": (IMAGE, "a = Conv (x, w) p = Conv <pads = [1, 1, 1, 1]> (a, u) s = Add (a, p) y = Conv (s, v)",
                 lambda: {"w": spread(conv(6, 3)), "u": spread(conv(6, 6)) / SPREAD[:, None, None], "v": conv(4, 6)}),
    "flattened": (IMAGE, "a = Conv (x, w) f = Flatten (a) y = Gemm <transB = 1> (f, v)",
                  lambda: {"w": spread(conv(6, 3)), "v": f32(5, 6 * 36)}),
    "open clip": (IMAGE, "a = Conv (x, w) r = Clip (a, zero) y = Conv (r, v)",
                  lambda: {"w": spread(conv(6, 3)), "zero": np.float32(0), "v": conv(4, 6)}),
    "MatMul": (ROWS, "a = MatMul (x, w) s = Add (b, a) r = Relu (s) y = MatMul (r, v)",
               lambda: {"w": spread(f32(6, 6), 1), "b": SPREAD * f32(6), "v": f32(6, 5)}),
}  # fmt: skip
BEHIND_NORMS = {
    "LayerNormalization": (ROWS, "a = LayerNormalization (x, g, b) q = MatMul (a, v) k = MatMul (a, u) y = Add (q, k)",
                           lambda: {"g": SPREAD, "b": f32(6), "v": f32(6, 5), "u": f32(6, 5)}),
    "product": (ROWS, "m = Tanh (x) a = Mul (g, m) y = MatMul (a, v)", lambda: {"g": SPREAD, "v": f32(6, 5)}),
    "BatchNormalization": (IMAGE, "t = Concat <axis = 1> (x, x) a = BatchNormalization (t, g, b, b, m) y = Conv (a, v)",
                           lambda: {"g": SPREAD, "b": f32(6), "m": np.abs(f32(6)), "v": conv(4, 6)}),
}  # fmt: skip
CASES = [(False, *case) for case in BETWEEN_LAYERS.values()] + [(True, *case) for case in BEHIND_NORMS.values()]


def built(source, body, weights):
    """A model whose inner values have shapes, as those of fuse do, with its plan and its feed."""
    declared, shape = source
    rank = 3 if source is ROWS else 4
    if "Gemm" in body:
        rank = 2
    out = ", ".join(f"d{i}" for i in range(rank))
    text = f"g ({declared}) => (float[{out}] y) {{ {body} }}"
    inferred = onnx.shape_inference.infer_shapes(model(text, **weights))
    _, _, histograms, feed = setup(text, f32(*shape), **weights)
    light = as_ir(inferred)
    return light, qdq.make_plan(light, place(light), histograms, "minmax"), feed


@pytest.mark.parametrize(("norms", "source", "body", "weights"), CASES, ids=[*BETWEEN_LAYERS, *BEHIND_NORMS])
def test_the_float_model_computes_the_same_and_its_channels_are_alike(norms, source, body, weights):
    light, plan, feed = built(source, body, weights())
    done = equalization.equalize(light, plan, [feed], norms=norms)
    assert done.groups == 1
    before, after = (run(proto(each), feed["x"])[0] for each in (light, done.model))
    assert np.abs(before - after).max() < 1e-6 * np.abs(before).max()
    read = next(value.name for value in plan.values if value.role == "activation" and value.name in done.scaled)
    axis = 2 if source is ROWS else 1
    ranges = []
    for each in (light, done.model):
        value = OnnxRuntime().open(each, [read]).run(feed)[read]
        rows = np.moveaxis(value, axis if value.ndim > 2 else 1, 0).reshape(6, -1)
        ranges.append(np.abs(rows).max(axis=1))
    assert ranges[1].max() / ranges[1].min() < 0.5 * ranges[0].max() / ranges[0].min()
    # Only the other kind of group is there.
    assert equalization.equalize(light, plan, [feed], norms=not norms).groups == 0


def test_a_channel_that_few_samples_reach_has_its_range_from_all_of_them():
    body = "a = MatMul (x, w) r = Relu (a) y = MatMul (r, v)"
    light, plan, rich = built(ROWS, body, {"w": np.diag(SPREAD), "v": f32(6, 5)})
    poor = {"x": rich["x"] * np.float32([1e-4, 1, 1, 1, 1, 1])}
    ranges = Ranges(histograms={}, samples=0)
    calibrated = convert.Calibrated(model=light, rules=Rules(), plan=plan, ranges=ranges, feeds=[poor], held_out=[])
    repairer = repairs.Repairer(lambda model: dataclasses.replace(calibrated, model=model), lambda: [poor, rich])
    repaired, changed = repairer.apply("equalize", calibrated)
    assert changed == "groups of values scaled: 1"
    channels = OnnxRuntime().open(repaired.model, ["r"]).run(rich)["r"].reshape(-1, 6).max(axis=0)
    assert channels[0] < 3 * np.median(channels)


def test_channels_in_uint8_are_evened_out_too():
    body = "a = Conv (x, w) r = Relu (a) y = Conv (r, v)"
    light, plan, feed = built(IMAGE, body, {"w": spread(conv(6, 3)), "v": conv(4, 6)})
    unsigned = dataclasses.replace(plan, values=tuple(
        dataclasses.replace(value, dtype="uint8", zero_point=128) if value.role == "activation" else value
        for value in plan.values
    ))  # fmt: skip
    done = equalization.equalize(light, unsigned, [feed], norms=False)
    assert done.scaled == {"a", "r"}


NOT = {
    "function": ("a = Conv (x, w) r = Sigmoid (a) y = Conv (r, v)", {}),
    "Swish": ("a = Conv (x, w) s = Sigmoid (a) r = Mul (a, s) y = Conv (r, v)", {}),
    "bound": ("a = Conv (x, w) r = Clip (a, zero, six) y = Conv (r, v)", {"zero": np.float32(0), "six": np.float32(6)}),
    "input": ("r = Relu (x) y = Conv (r, w)", {}),
}


@pytest.mark.parametrize(("body", "weights"), NOT.values(), ids=NOT)
def test_what_is_not_homogeneous_stays_as_it_is(body, weights):
    light, plan, feed = built(IMAGE, body, {"w": spread(conv(6, 3)), "v": conv(4, 6), **weights})
    done = equalization.equalize(light, plan, [feed], norms=False)
    assert (done.groups, done.scaled) == (0, frozenset()) and done.model is light


def test_an_output_of_the_model_and_a_weight_of_two_layers_keep_their_numbers():
    weights = {"w": spread(conv(6, 3)), "v": conv(6, 6)}
    text = "g (float[2, 3, 8, 8] x) => (float[d0, d1, d2, d3] y, float[e0, e1, e2, e3] {}) {{ a = Conv (x, w) {} }}"
    for output, body in (("a", "y = Conv (a, v)"), ("z", "y = Conv (a, v) b = Relu (y) z = Conv (b, v)")):
        light = as_ir(onnx.shape_inference.infer_shapes(model(text.format(output, body), **weights)))
        _, placed, histograms, feed = setup(text.format(output, body), f32(2, 3, 8, 8), **weights)
        plan = qdq.make_plan(light, placed, histograms, "minmax")
        assert equalization.equalize(light, plan, [feed], norms=False).groups == 0


def test_channels_that_are_alike_are_left_alone():
    light, plan, feed = built(IMAGE, BETWEEN_LAYERS["Conv"][1], {"w": conv(6, 3), "v": conv(4, 6)})
    assert equalization.equalize(light, plan, [feed], norms=False).groups == 0


def test_channels_that_are_scaled_up_keep_headroom_by_the_number_of_samples():
    channels = equalization.Channels(np.array([8.0, 1.0, 6.0, 0.0]), np.ones(4), samples=16)
    # A factor of 1/8 would raise the second channel to the end of the range; 1 + 4 / sqrt(16) = 2 below it is the most.
    factors = np.array([1.0, 1 / 8, 1.0, 1.0])
    np.testing.assert_allclose(equalization._excess(channels, factors), [1, 2, 1, 1])
    # What is near the end already is not raised at all, and what is lowered is free.
    np.testing.assert_allclose(equalization._excess(channels, np.array([1.0, 1.0, 0.75, 1.0])), [1, 1, 4 / 3, 1])
    np.testing.assert_allclose(equalization._excess(channels, np.array([1.0, 2.0, 2.0, 2.0])), np.ones(4))
