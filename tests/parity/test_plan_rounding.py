"""What rounding explains of a layer's error: computed, also where inputs' and weights' own errors say little."""

import dataclasses

import numpy as np
import pytest

from layerline.compare.compare_models import compare
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.quantization import convert, qdq
from layerline.graph.quantization.convert import Converted
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.parity.plan_rounding import own_errors
from layerline.pipeline.diagnosis.quantize_causes import UNEXPLAINED_DB
from layerline.pipeline.report import OWN
from tests.graph.test_qdq import model
from tests.graph.test_range_choice import setup

RNG = np.random.default_rng(3)
X = RNG.standard_normal((64, 8)).astype(np.float32)
W = RNG.standard_normal((8, 6)).astype(np.float32)
GREAT = np.where(np.arange(8) == 2, 3000, 1).astype(np.float32)
CASES = {
    "like channels": (X, W),
    "one channel 3,000 times the others, with weights of 1/3,000": (X * GREAT, W / GREAT[:, None]),
    "a mean of 1,000 that the weights cancel": (X + 1000, W - W.mean(0)),
}


@pytest.mark.parametrize("call", ["MatMul (x, w)", "Gemm (x, w)"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_quantised_layer_loses_is_explained(call, case):
    x, w = CASES[case]
    light, placed, histograms, feed = setup(f"g (float[n, 8] x) => (float[n, 6] y) {{ y = {call} }}", x, w=w)
    plan = qdq.make_plan(light, placed, histograms, "minmax")
    weights = qdq.stored_weights(light, plan, {})
    explained = own_errors(converted(light, plan), [feed])["y"]
    # By hand: every input is rounded to its steps.
    value = qdq.activations(plan)[0]
    exact = x.astype(np.float64) @ w
    rounded = qdq.fake_quantized(x, value)[0].astype(np.float64) @ weights["w", "int8"]
    assert explained == pytest.approx(10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum()), abs=0.01)
    [row] = compare(light, qdq.apply(light, plan), [feed], isolated=True)
    assert row.extra[OWN] == pytest.approx(explained, abs=0.01)
    assert (case == "like channels") == (explained > 20)
    # Channels under each other's scales are what the plan doesn't say.
    values = [dataclasses.replace(v, scales=v.scales[::-1]) if v.role == "weight" else v for v in plan.values]
    [row] = compare(light, qdq.apply(light, dataclasses.replace(plan, values=tuple(values))), [feed], isolated=True)
    assert case != "like channels" or explained - row.extra[OWN] > UNEXPLAINED_DB


def test_float8_is_rounded_as_the_model_rounds_it():
    x = X * np.float32(1e-3)  # some numbers are subnormal in float8
    text = "g (float[n, 8] x) => (float[n, 6] y) { y = MatMul (x, w) }"
    light, _, histograms, feed = setup(text, x, w=W)
    plan = qdq.make_plan(light, place(light, Rules(format="fp8")), histograms, "minmax")
    [row] = compare(light, qdq.apply(light, plan), [feed], isolated=True)
    assert 20 < row.extra[OWN] == pytest.approx(own_errors(converted(light, plan), [feed])["y"], abs=0.01)


def test_convolutions_with_zero_points_and_layers_of_other_types():
    body = "a = Conv <pads = [1, 1, 1, 1]> (x, v) r = Relu (a) b = Conv (r, u) y = MatMul (b, b)"
    x, v, u = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4, 4, 1, 1)))
    text = f"g (float[2, 3, 5, 5] x) => (float[2, 4, 5, 5] y) {{ {body} }}"
    light, placed, histograms, feed = setup(text, x, v=v, u=u)
    plan = qdq.make_plan(light, placed, histograms, "minmax")
    values = [dataclasses.replace(item, zero_point=-20) if item.name == "r" else item for item in plan.values]
    plan = dataclasses.replace(plan, values=tuple(values))
    explained = own_errors(converted(light, plan), [feed])
    for row in compare(light, qdq.apply(light, plan), [feed], isolated=True):
        if row.name in explained:
            assert row.extra[OWN] == pytest.approx(explained[row.name], abs=0.01)
    assert {"a", "b"} <= explained.keys()
    # A model that brings a zero point with a weight.
    values = [dataclasses.replace(item, zero_point=1) if item.name == "v" else item for item in plan.values]
    explained = own_errors(converted(light, dataclasses.replace(plan, values=tuple(values))), [feed])
    assert "a" not in explained and "b" in explained


def test_pairs_that_a_model_brings_one_behind_the_other():
    text = """g (float[n, 4] x) => (float[n, 2] y) {
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        p = QuantizeLinear (d, t, z) e = DequantizeLinear (p, t, z)
        v = DequantizeLinear (w, s, z) y = MatMul (e, v)
    }"""
    weight = np.int8([[1, 20], [3, -40], [-5, 60], [7, 8]])
    stored = {"s": np.float32(0.02), "t": np.float32(0.05), "z": np.int8(0), "w": weight}
    brought = convert.with_own_qdq(as_ir(model(text, **stored)), Rules())
    feed = {"x": X[:, :4]}
    [row] = compare(brought.reference, brought.measured, [feed], isolated=True)
    assert row.extra[OWN] > 20 and own_errors(brought, [feed]).keys() <= {"y"}


def converted(light, plan):
    return Converted(reference=light, model=light, measured=light, plan=plan)
