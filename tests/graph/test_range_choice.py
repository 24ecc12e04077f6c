"""Ranges by trial: what is measured is what the quantised layer does, and layers that no range serves stay float."""

import numpy as np
import pytest

from layerline.calib import range_candidates
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.calib.scales import scale_of
from layerline.graph.quantization import qdq, range_choice, range_trials
from layerline.graph.quantization.qdq_placement import Rules, place
from tests.forms import as_ir, proto
from tests.graph import test_qdq
from tests.graph.test_qdq import f32, model, run


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setattr(test_qdq, "RNG", np.random.default_rng(0))


CASES = [
    ("Conv <pads = [1, 1, 1, 1]> (x, w)", (2, 3, 5, 5), (4, 3, 3, 3), 4),
    ("ConvTranspose <group = 2> (x, w)", (2, 4, 5, 5), (4, 3, 3, 3), 6),
    ("Gemm <transB = 1> (x, w)", (2, 5), (7, 5), 7),
    ("Gemm (x, w)", (2, 5), (5, 7), 7),
    ("MatMul (x, w)", (2, 3, 5), (5, 7), 7),
    ("MatMul (w, x)", (2, 5, 3), (4, 5), 0),
]


def setup(text, *arrays, **weights):
    """A model at an opset that has Q/DQ, its placement, histograms of all its activations, and its feed."""
    light = as_ir(model(text, **weights))
    placed = place(light)
    feed = dict(zip([i.name for i in light.graph.inputs], arrays, strict=True))
    names = [w.name for w in placed.wanted if w.role == "activation"]
    from layerline.backends.onnxruntime import OnnxRuntime

    values = {**feed, **OnnxRuntime().open(light, names).run(feed)}
    histograms = {n: Histogram() for n in names}
    for name in names:
        histograms[name].update(values[name])
    return light, placed, histograms, feed


@pytest.mark.parametrize(("call", "x_shape", "w_shape", "channels"), CASES)
def test_errors_are_those_of_the_quantised_layer(call, x_shape, w_shape, channels):
    dims = ", ".join(map(str, x_shape))
    out = ", ".join(f"d{i}" for i in range(len(x_shape)))
    x, w = f32(*x_shape), f32(*w_shape)
    light, placed, histograms, feed = setup(f"g (float[{dims}] x) => (float[{out}] y) {{ y = {call} }}", x, w=w)
    activations = [a for a in placed.wanted if a.role == "activation"]
    plan = qdq.make_plan(light, placed, histograms, "minmax")
    weights = QuantPlan(values=tuple(v for v in plan.values if v.role == "weight"), kept=())
    found = range_trials.measure(
        light,
        qdq.apply(light, weights),
        activations,
        {"x": {"half": 1.0, "minmax": histograms["x"].amax}},
        [feed] * 3,
    )
    [want] = run(proto(light), x)
    for name, threshold in (("half", 1.0), ("minmax", histograms["x"].amax)):
        chosen = qdq.make_plan(light, placed, histograms, "minmax", chosen={("x", "int8"): (name, threshold)})
        assert chosen.value("x").scales == (float(str(scale_of(threshold))),)
        [got] = run(proto(qdq.apply(light, chosen)), x)
        error = found["x", name, "y"]
        assert error.error == pytest.approx(3 * np.square(got - want).sum(), rel=1e-3)
        assert error.signal == pytest.approx(3 * np.square(want).sum(), rel=1e-4)
        assert error.shift.size == channels
        if channels:
            axis = 1 if "Conv" in call else want.ndim - 1
            others = tuple(i for i in range(want.ndim) if i != axis)
            np.testing.assert_allclose(error.shift, (got - want).mean(axis=others), atol=1e-5)


def test_the_range_with_the_least_error_at_the_reader_is_taken():
    """The one large number meets weights of 0 in one layer, and large weights in the other."""
    x = f32(4, 8, scale=0.1)
    x[0, 0] = 40
    blind, keen = np.abs(f32(8, 4)), np.abs(f32(8, 4))
    blind[0] = 0
    for w, least, greatest in ((blind, 0.1, 1.0), (keen, 39.9, 40.0)):
        light, placed, histograms, feed = setup("g (float[4, 8] x) => (float[4, 4] y) { y = MatMul (x, w) }", x, w=w)
        chosen = range_choice.choose_ranges(light, Rules(), placed, histograms, [feed], percentile=90)
        assert least <= chosen.thresholds["x", "int8"][1] <= greatest


CONCAT = """g (float[n, 4] a, float[n, 4] b) => (float[n, 4] y, float[n, 4] z) {
  c = Concat <axis = 1> (a, b) y = MatMul (c, w) z = MatMul (b, v) }"""


def test_a_concat_of_very_different_inputs_shares_no_scale_and_a_layer_that_loses_all_stays_float():
    w = f32(8, 4)
    w[:4] *= 1e-6  # what is large hardly matters: the small input decides
    a, b = f32(6, 4) * 200, f32(6, 4) * 0.3
    light, placed, histograms, feed = setup(CONCAT, a, b, w=w, v=f32(4, 4))
    assert any(x.shared for x in placed.wanted)
    rules, placed = range_choice.apart(light, Rules(), placed, histograms)
    assert not any(x.shared for x in placed.wanted)
    [reason] = [k.reason for k in placed.kept if k.name == "c"]
    assert reason.startswith("its inputs differ ") and reason.endswith("so each keeps its own scale")
    chosen = range_choice.choose_ranges(light, rules, placed, histograms, [feed], percentile=99.99)
    assert set(chosen.floated) == {"y"} and chosen.floated["y"] < range_choice.FLOOR_DB
    plan = qdq.make_plan(light, chosen.placement, histograms, "mse", chosen=chosen.thresholds)
    assert [k.reason for k in plan.kept if k.name == "y"] == [
        f"int8 would leave it {chosen.floated['y']:.1f} dB by itself"
    ]
    for got, want in zip(run(proto(qdq.apply(light, plan)), a, b), run(proto(light), a, b), strict=True):
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_inputs_of_a_concat_that_are_alike_go_on_sharing_their_scale():
    light, placed, histograms, _ = setup(CONCAT, f32(6, 4), f32(6, 4) * 3, w=f32(8, 4), v=f32(4, 4))
    assert range_choice.apart(light, Rules(), placed, histograms)[1] == placed


@pytest.mark.parametrize("calibrator", ["entropy", "percentile", "minmax", "mse"])
def test_a_softmax_takes_its_bound_whatever_was_observed(calibrator):
    text = "g (float[n, 64] x) => (float[n, 4] y) { s = Softmax (x) y = MatMul (s, w) }"
    light, placed, histograms, feed = setup(text, f32(3, 64), w=f32(64, 4))
    assert histograms["s"].amax < 0.5
    value = qdq.make_plan(light, placed, histograms, calibrator).value("s")
    assert (value.amax, value.calibrator) == (1.0, range_candidates.BOUND)
    chosen = range_choice.choose_ranges(light, Rules(), placed, histograms, [feed], percentile=99.99)
    assert chosen.thresholds.get(("s", "int8"), (0, 1.0))[1] == 1


def test_names_of_the_model_may_be_those_that_a_trial_uses():
    text = "g (float[n, 4] x) => (float[n, 4] e) { q = MatMul (x, w) sums = Relu (q) e = MatMul (sums, w) }"
    light, placed, histograms, feed = setup(text, f32(3, 4), w=f32(4, 4))
    errors = range_choice.choose_ranges(light, Rules(), placed, histograms, [feed], percentile=99.99).errors
    assert {layer for _, _, layer in errors} == {"q", "e"}


def test_a_layer_that_fp8_does_not_serve_stays_float():
    # Two large channels cancel in the product: what is left is below a step of fp8, of which each has 3 bits.
    x = np.abs(f32(64, 8)) + 1
    x[:, 1] = x[:, 0] = 100 * x[:, 0]
    weight = np.eye(8, dtype=np.float32)[:, :3].copy()
    weight[:2] = [[1, 1, 1], [-1, -1, -1.003]]
    text = "g (float[64, 8] x) => (float[64, 3] y, float[64, 8] z) { y = MatMul (x, w) z = MatMul (x, v) }"
    light, _, histograms, feed = setup(text, x, w=weight, v=np.eye(8, dtype=np.float32))
    rules = Rules(format="fp8")
    placed = place(light, rules)
    from layerline.graph.io.opset import raise_opset

    light = raise_opset(light, 19)
    chosen = range_choice.choose_ranges(light, rules, placed, histograms, [feed], percentile=99.99)
    assert list(chosen.floated) == ["y"] and chosen.floated["y"] < 10
    assert chosen.rules.keep["y"].startswith("fp8 would leave it")
    [x_only] = [item for item in chosen.placement.wanted if item.role == "activation"]
    assert x_only.readers == (("z", 0),)
    assert chosen.thresholds["x", "float8e4m3fn"] == ("minmax", pytest.approx(float(np.abs(x).max())))
