"""Bias correction takes the mean error of each channel off, wherever a layer keeps its bias."""

import numpy as np
import pytest

from layerline.graph.quantization import bias_correction, qdq, range_choice
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
    corrected, count = bias_correction.correct(quantized, range_choice.shifts(light, plan, [feed] * 500))
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
    shifts = range_choice.shifts(light, plan, [feed] * 500)
    quantized = qdq.apply(light, plan)
    corrected, count = bias_correction.correct(quantized, shifts)
    assert count == 2
    results = zip("yz", *(run(proto(m), x) for m in (light, quantized, corrected)), strict=True)
    for name, exact, before, after in results:
        assert np.abs((before - exact).mean(axis=0)).max() > 0.1
        np.testing.assert_allclose(shifts[name], (before - exact).mean(axis=0), atol=1e-3)
        np.testing.assert_allclose((after - exact).mean(axis=0), 0, atol=1e-3)


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
