"""Bias correction takes the mean error of each channel off, wherever a layer keeps its bias."""

import numpy as np
import pytest

from layerline.graph.quantization import bias_correction, mean_errors, qdq
from layerline.graph.quantization.qdq_placement import Rules, place
from tests.forms import as_ir, proto
from tests.graph import test_qdq
from tests.graph.test_qdq import f32, model, run
from tests.graph.test_range_choice import setup


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setattr(test_qdq, "RNG", np.random.default_rng(0))


LAYERS = [
    ("y = Conv (x, w, b)", (4, 3, 6, 6), (5, 3, 3, 3), (5,), 1),
    ("y = Conv (x, w)", (4, 3, 6, 6), (5, 3, 3, 3), None, 1),
    ("y = ConvTranspose (x, w, b)", (4, 3, 6, 6), (3, 5, 3, 3), (5,), 1),
    ("y = Gemm <transB = 1> (x, w, b)", (64, 6), (5, 6), (5,), 1),
    ("m = MatMul (x, w) y = Add (b, m)", (64, 6), (6, 5), (5,), 1),
]


@pytest.mark.parametrize(("call", "x_shape", "w_shape", "b_shape", "axis"), LAYERS)
def test_no_channel_is_off_on_average_any_more(call, x_shape, w_shape, b_shape, axis):
    dims, out = ", ".join(map(str, x_shape)), ", ".join(f"d{i}" for i in range(len(x_shape)))
    x, weights = np.abs(f32(*x_shape)), {"w": f32(*w_shape)} | ({} if b_shape is None else {"b": f32(*b_shape)})
    light, placed, histograms, feed = setup(f"g (float[{dims}] x) => (float[{out}] y) {{ {call} }}", x, **weights)
    # A range that cuts half of the numbers moves every channel.
    plan = qdq.make_plan(light, placed, histograms, "minmax", chosen={("x", "int8"): ("half", 0.6)})
    quantized = qdq.apply(light, plan)
    # Often enough that the mean is certain.
    shifts = mean_errors.measure(light, quantized, bias_correction.axes(light, plan), [feed] * 500)
    corrected, count = bias_correction.correct(quantized, shifts)
    assert count == 1
    [want], [before], [after] = (run(proto(m), x) for m in (light, quantized, corrected))
    others = tuple(i for i in range(want.ndim) if i != axis)
    assert np.abs((before - want).mean(axis=others)).max() > 0.2
    assert np.abs((after - want).mean(axis=others)).max() < 0.03
    assert np.linalg.norm(after - want) < np.linalg.norm(before - want)
    assert [n.op_type for n in proto(corrected).graph.node] == [n.op_type for n in proto(quantized).graph.node]


def test_a_value_of_two_formats_is_corrected_in_the_layers_of_both():
    x = np.abs(f32(64, 6))
    weights = {"w": f32(6, 5), "v": f32(6, 5), "b": f32(5)}
    text = "g (float[64, 6] x) => (float[64, 5] y, float[64, 5] z) { y = Gemm (x, w, b) z = Gemm (x, v, b) }"
    light, _, histograms, feed = setup(text, x, **weights)
    placed = place(light, Rules(formats={"z": "fp8"}))
    chosen = {("x", "int8"): ("half", 0.6), ("x", "float8e4m3fn"): ("half", 0.9)}
    plan = qdq.make_plan(light, placed, histograms, "minmax", chosen=chosen)
    quantized = qdq.apply(light, plan)
    shifts = mean_errors.measure(light, quantized, bias_correction.axes(light, plan), [feed] * 500)
    corrected, count = bias_correction.correct(quantized, shifts)
    assert count == 2
    results = zip("yz", *(run(proto(m), x) for m in (light, quantized, corrected)), strict=True)
    for name, exact, before, after in results:
        assert np.abs((before - exact).mean(axis=0)).max() > 0.1
        np.testing.assert_allclose(shifts[name], (before - exact).mean(axis=0), atol=1e-3)
        np.testing.assert_allclose((after - exact).mean(axis=0), 0, atol=1e-3)


def clipped(light, placed, histograms, end):
    """The quantised model whose ranges end at a share of what was measured, so that every layer moves."""
    ends = {(w.name, w.dtype): ("share", end * histograms[w.name].amax) for w in placed.wanted if w.role != "weight"}
    plan = qdq.make_plan(light, placed, histograms, "minmax", chosen=ends)
    return plan, qdq.apply(light, plan)


def test_a_layer_is_corrected_for_what_the_layers_before_it_still_shift():
    x = np.abs(f32(64, 3, 6, 6))
    weights = {name: f32(5, channels, 3, 3) for name, channels in (("u", 3), ("v", 5), ("w", 5))}
    text = """g (float[64, 3, 6, 6] x) => (float[64, 5, d, e] y) {
        a = Conv (x, u) b = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (b, v) d = Relu (c) e = Add (b, d) y = Conv (e, w)
    }"""
    light, placed, histograms, feed = setup(text, x, **weights)
    plan, quantized = clipped(light, placed, histograms, 0.3)
    axes = bias_correction.axes(light, plan)
    assert axes == {"a": 1, "c": 1, "y": 1}
    # Often enough that the means are certain.
    shifts = mean_errors.measure(light, quantized, axes, [feed] * 200)
    corrected, _ = bias_correction.correct(quantized, shifts)
    [exact], [before], [after] = (run(proto(m), x) for m in (light, quantized, corrected))
    assert np.abs((before - exact).mean(axis=(0, 2, 3))).max() > 2
    np.testing.assert_allclose((after - exact).mean(axis=(0, 2, 3)), 0, atol=0.1)


def test_sequences_and_values_that_bodies_read_pass_from_layer_to_layer():
    x = np.abs(f32(64, 6))
    weights = {"w": f32(3, 5), "v": f32(3, 5), "b": f32(5), "zero": np.array(0), "one": np.array(1)}
    weights |= {"halves": np.array([3, 3]), "yes": np.array(True)}
    text = """g (float[64, 6] x) => (float[64, 5] y, float[64, 5] z) {
        parts = SplitToSequence <axis = 1> (x, halves)
        first = SequenceAt (parts, zero)
        y = Gemm (first, w, b)
        second = SequenceAt (parts, one)
        sum = If (yes) <then_branch = t () => (float[64, 3] s) { s = Add (first, second) },
                        else_branch = e () => (float[64, 3] r) { r = Sub (first, second) }>
        z = Gemm (sum, v, b)
    }"""
    net, other = model(text, **weights), model(text, **weights | {"w": weights["w"] + 1, "v": weights["v"] + 1})
    shifts = mean_errors.measure(as_ir(net), as_ir(other), {"y": -1, "z": -1}, [{"x": x}] * 500)
    for name, want, got in zip("yz", run(net, x), run(other, x), strict=True):
        # By the sum over the inputs of that layer, on average.
        assert (got - want).mean(axis=0).min() > 1
        np.testing.assert_allclose(shifts[name], (got - want).mean(axis=0), rtol=1e-3)


def test_samples_are_dropped_where_their_values_take_too_much_memory(monkeypatch):
    x = np.abs(f32(200, 6))
    text = "g (float[n, 6] x) => (float[n, 5] z) { y = Gemm (x, w, b) r = Relu (y) z = Gemm (r, v, b) }"
    light, placed, histograms, _ = setup(text, x, w=f32(6, 5), v=f32(5, 5), b=f32(5))
    plan, quantized = clipped(light, placed, histograms, 0.3)
    axes, feeds = bias_correction.axes(light, plan), [{"x": x * factor} for factor in range(1, 6)]
    by_count = [mean_errors.measure(light, quantized, axes, feeds[:count]) for count in (1, 3, 5)]
    # Both models hold the output of the sample that is done, and the inputs of those that follow.
    of_input, of_output = 2 * x.nbytes, 2 * 200 * 5 * 4
    limits = [0, of_output + 2 * of_input, of_output + 4 * of_input]
    for limit, want in zip(limits, by_count, strict=True):
        monkeypatch.setattr(mean_errors, "MOST_BYTES", limit)
        got = mean_errors.measure(light, quantized, axes, feeds)
        for layer in "yz":
            np.testing.assert_array_equal(got[layer], want[layer])
    assert np.abs(by_count[0]["y"] - by_count[2]["y"]).max() > 0.1


def test_a_product_without_a_bias_and_a_shared_bias_of_others_stay_as_they_are():
    net = model("g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = MatMul (x, w) u = Add (x, b) z = Relu (u) }",
                w=f32(4, 4), b=f32(4))  # fmt: skip

    corrected, count = bias_correction.correct(as_ir(net), {"y": np.ones(4), "u": np.ones(4)})
    assert count == 0
    x = f32(3, 4)
    for got, want in zip(run(proto(corrected), x), run(net, x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_bias_that_two_layers_share_is_corrected_for_each_alone():
    net = model("g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = Gemm (x, w, b) z = Gemm (y, w, b) }",
                w=f32(4, 4), b=f32(4))  # fmt: skip

    corrected, count = bias_correction.correct(as_ir(net), {"y": np.full(4, 2.0)})
    assert count == 1
    x = f32(3, 4)
    np.testing.assert_allclose(run(proto(corrected), x)[0], run(net, x)[0] - 2, atol=1e-5)
    assert {"b", "y/bias"} <= {t.name for t in proto(corrected).graph.initializer}
