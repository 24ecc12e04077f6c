"""Rounding by the error of a layer's output: better than the nearest step, one step away at most, and repeatable."""

import dataclasses
import itertools

import numpy as np
import pytest

from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.graph.quantization import qdq, rounding
from layerline.graph.quantization.qdq_placement import Rules, place
from tests.forms import proto
from tests.graph import test_qdq
from tests.graph.test_qdq import f32, run
from tests.graph.test_range_choice import setup


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setattr(test_qdq, "RNG", np.random.default_rng(0))


CALLS = [
    ("Conv <pads = [1, 0, 1, 0], strides = [2, 1]> (x, w)", (4, 6, 9, 9), (5, 6, 3, 3)),
    ("Conv <dilations = [2, 2], group = 2> (x, w)", (4, 6, 9, 9), (4, 3, 3, 3)),
    ("Conv <group = 6> (x, w)", (4, 6, 9, 9), (6, 1, 3, 3)),
    ("Conv (x, w)", (8, 6, 30), (5, 6, 3)),
    ("Gemm (x, w)", (300, 12), (12, 5)),
    ("Gemm <transB = 1> (x, w)", (300, 12), (5, 12)),
    ("MatMul (x, w)", (10, 30, 12), (12, 5)),
]


def prepared(call, x_shape, w_shape):
    """A layer whose inputs vary together: the float model, its plan, its feed and its weight."""
    dims, out = ", ".join(map(str, x_shape)), ", ".join(f"d{i}" for i in range(len(x_shape)))
    x, w = 0.2 * f32(*x_shape), f32(*w_shape)
    x += f32(*x_shape).mean(axis=1, keepdims=True) + 0.5
    text = f"g (float[{dims}] x) => (float[{out}] y) {{ y = {call} }}"
    light, placed, histograms, feed = setup(text, x, w=w)
    return light, qdq.make_plan(light, placed, histograms, "minmax"), feed, w


@pytest.mark.parametrize(("call", "x_shape", "w_shape"), CALLS)
def test_the_output_loses_less_than_with_the_nearest_steps(call, x_shape, w_shape):
    light, plan, feed, w = prepared(call, x_shape, w_shape)
    done = rounding.round_weights(light, plan, lambda: [feed])
    weights = done.arrays
    np.testing.assert_array_equal(weights["w"], rounding.round_weights(light, plan, lambda: [feed]).arrays["w"])
    activations = QuantPlan(values=tuple(v for v in plan.values if v.role == "activation"), kept=())
    repaired = rounding.with_scales(plan, done.entries)
    models = (
        qdq.apply(light, activations),
        qdq.apply(light, plan),
        qdq.apply(light, repaired, weights),
    )
    [exact], [nearest], [chosen] = (run(proto(each), feed["x"]) for each in models)
    assert np.square(chosen - exact).sum() < 0.8 * np.square(nearest - exact).sum()
    item = repaired.value("w")
    shape = [1] * w.ndim
    shape[item.axis] = -1
    scales = np.array(item.scales).reshape(shape)
    steps = weights["w"] / scales
    assert np.abs(steps - np.rint(steps)).max() < 1e-3
    assert np.abs(steps).max() < 127.01
    inside = np.abs(w) <= 127 * scales
    assert np.abs(steps - w / scales)[inside].max() < 1.001


def test_inputs_in_uint8_are_taken_as_they_are_stored():
    light, _, feed, _ = prepared("Gemm (x, w)", (300, 12), (12, 5))
    histogram = Histogram()
    histogram.update(feed["x"])
    plan = qdq.make_plan(light, place(light, Rules(target="onnxruntime")), {"x": histogram, "y": histogram}, "minmax")
    assert plan.value("x").zero_point != 0
    # Half of the range is cut off, so that what is stored differs from the float values by far.
    x = dataclasses.replace(plan.value("x"), scales=(plan.value("x").scales[0] / 2,))
    values = tuple(x if value.name == "x" else value for value in plan.values)
    plan = dataclasses.replace(plan, values=values)
    stored = qdq.fake_quantized(feed["x"], x)[0]
    [layer] = rounding.layers_of(light, plan, blocks=False)
    sums, count = rounding._moments(light, [layer], [feed])["w"]
    assert count == 300 and np.abs(stored - feed["x"]).max() > 0.5
    np.testing.assert_allclose(sums[0], stored.T @ stored, rtol=1e-4)


def test_no_single_change_lessens_the_error():
    light, plan, feed, w = prepared("Gemm <transB = 1> (x, w)", (4000, 6), (1, 6))
    done = rounding.round_weights(light, plan, lambda: [feed])
    [chosen] = done.arrays["w"]
    [scale] = done.entries["w"].scales
    [activation] = plan.value("x").scales
    x = np.clip(np.rint(feed["x"] / activation), -128, 127) * activation
    low = np.floor(w[0] / scale)
    errors = {}
    for pattern in itertools.product((0, 1), repeat=6):
        errors[pattern] = np.square(x @ (np.clip(low + pattern, -127, 127) * scale - w[0])).sum()
    taken = tuple(np.rint(chosen / scale - low).astype(int))
    for index in range(6):
        other = list(taken)
        other[index] = 1 - other[index]
        assert errors[tuple(other)] >= 0.99 * errors[taken]


def test_memory_is_bounded_by_passes(monkeypatch):
    runs = []
    text = "g (float[300, 12] x) => (float[300, 5] y) { a = Gemm (x, w) b = Gemm (a, v) y = Gemm (b, w2) }"
    light, placed, histograms, feed = setup(text, f32(300, 12), w=f32(12, 12), v=f32(12, 12), w2=f32(12, 5))
    plan = qdq.make_plan(light, placed, histograms, "minmax")

    def feeds():
        runs.append(1)
        return [feed]

    whole = rounding.round_weights(light, plan, feeds)
    assert len(runs) == 1
    # Room for the moments of two layers: four bytes for each of 12 x 12.
    monkeypatch.setattr(rounding, "MOST_BYTES", 2 * 4 * 144)
    parts = rounding.round_weights(light, plan, feeds)
    assert len(runs) == 3
    for name in ("w", "v", "w2"):
        np.testing.assert_array_equal(whole.arrays[name], parts.arrays[name])
    monkeypatch.setattr(rounding, "MOST_BYTES", 100)
    assert rounding.round_weights(light, plan, feeds).arrays == {}


def test_weights_of_two_types_and_of_eight_bit_floats_keep_their_numbers():
    light, plan, feed, _ = prepared(*CALLS[4])
    weight = plan.value("w")
    other = dataclasses.replace(weight, dtype="float8e4m3fn")
    for values in ((*plan.values, other), (plan.value("x"), other)):
        assert rounding.round_weights(light, QuantPlan(values=values, kept=()), lambda: [feed]).arrays == {}
    changed = dataclasses.replace(weight, scales=tuple(2 * scale for scale in weight.scales))
    again = rounding.with_scales(QuantPlan(values=(weight, other), kept=()), {"w": changed})
    assert [value.scales for value in again.values] == [changed.scales, other.scales]
