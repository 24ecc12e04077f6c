"""GPTQ against a slow reference, AWQ as the same function in float, and what both gain."""

import dataclasses

import numpy as np
import onnx
import pytest

from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.calib.scales import block_multiples, in_blocks, stored_scales, to_type, whole_scale
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import awq, gptq, own_qdq, qdq, rounding
from layerline.graph.quantization.qdq_placement import Rules, place
from tests.forms import as_ir, proto
from tests.graph.test_qdq import model, run

TYPES = {"int4": ("int4", 32), "nvfp4": ("float4e2m1", 16)}


def slow_gptq(rows, moments, block, dtype):
    """Optimal brain quantisation in a fixed order: after each column the best step of all columns that are left."""
    work = rows.astype(np.float64)
    hessian = moments + 0.01 * np.diagonal(moments).mean() * np.eye(len(moments))
    whole = whole_scale(rows, dtype)
    for k in range(rows.shape[1]):
        if k % block == 0:
            columns = work[:, k : k + block].astype(np.float32)
            multiples = block_multiples(columns, whole, dtype, np.diagonal(moments)[k : k + block])
            scales = stored_scales(multiples, whole, np.float32)
        inverse = np.linalg.inv(hessian[k:, k:])
        chosen = to_type(work[:, k] / scales, dtype).astype(np.float64) * scales
        work[:, k:] -= np.outer((work[:, k] - chosen) / inverse[0, 0], inverse[0])
    return work


def correlated(rng, rows, inputs):
    mixed = rng.standard_normal((rows, 8)) @ rng.standard_normal((8, inputs))
    return (mixed + 0.3 * rng.standard_normal((rows, inputs)) + 0.5).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_gptq_gives_what_a_slow_reference_gives(name):
    dtype, block = TYPES[name]
    rng = np.random.default_rng(1)
    x = correlated(rng, 200, 96)
    rows = rng.standard_normal((5, 96)).astype(np.float32)
    moments = x.T.astype(np.float64) @ x
    stored = gptq.round_weight(rows, moments, block, dtype)
    np.testing.assert_allclose(stored.dequantized(), slow_gptq(rows, moments, block, dtype), rtol=1e-5, atol=1e-6)
    nearest = in_blocks(rows, 1, block, dtype).dequantized()
    errors = [np.square(x @ (weight - rows).T).sum() for weight in (stored.dequantized(), nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_gptq_bears_inputs_that_are_never_fed():
    rng = np.random.default_rng(2)
    x = correlated(rng, 20, 64)
    x[:, ::3] = 0
    stored = gptq.round_weight(rng.standard_normal((4, 64)).astype(np.float32), x.T @ x, 32, "int4")
    assert np.isfinite(stored.dequantized()).all()


def test_no_block_of_a_half_precision_weight_has_the_scale_0():
    weight = np.full((2, 64), 0.02, np.float16)
    weight[0, 16:32], weight[1, :16] = 0, 1e-6
    moments = np.eye(64, dtype=np.float32)
    # numpy fails where a number is divided by 0.
    with np.errstate(all="raise", under="ignore"):
        for stored in (in_blocks(weight, 1, 16, "float4e2m1"), gptq.round_weight(weight, moments, 16, "float4e2m1")):
            assert (stored.scales.astype(np.float16) > 0).all()
            np.testing.assert_allclose(stored.dequantized(), weight, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_repairs_leave_out_rows_that_are_not_finite(bad):
    light, feed = net_and_feed(np.random.default_rng(6))
    plan = planned(light, "int4")
    spoilt = {"x": np.concatenate([feed["x"], np.full((1, 64), bad, np.float32)])}
    exact = rounding.round_weights(light, plan, lambda: [feed], blocks=True).arrays
    other = rounding.round_weights(light, plan, lambda: [spoilt], blocks=True).arrays
    assert exact.keys() == other.keys() == {"w1", "w2"}
    for name, stored in exact.items():
        np.testing.assert_array_equal(stored.dequantized(), other[name].dequantized())
    assert awq.scale_inputs(light, plan, lambda: [spoilt]).groups == 2


NET = """g (float[n, 64] x) => (float[n, 32] y) {
  l = LayerNormalization (x, scale, shift)
  a = Gemm <transB = 1> (l, w1, b1)
  r = Relu (a)
  h = MatMul (r, w2)
  y = Add (h, l2)
}"""


def net_and_feed(rng):
    weights = {
        "scale": np.exp(rng.standard_normal(64)), "shift": rng.standard_normal(64), "w1": rng.standard_normal((64, 64)),
        "b1": rng.standard_normal(64), "w2": rng.standard_normal((64, 32)), "l2": rng.standard_normal(32),
    }  # fmt: skip
    net = model(NET, **{name: array.astype(np.float32) for name, array in weights.items()})
    # Inner values have shapes, as those of fuse do.
    light = raise_opset(as_ir(onnx.shape_inference.infer_shapes(net)), 23)
    return light, {"x": correlated(rng, 300, 64)}


@pytest.mark.parametrize("name", TYPES)
def test_awq_computes_the_same_function_and_less_is_lost(name):
    light, feed = net_and_feed(np.random.default_rng(3))
    plan = planned(light, name)
    done = awq.scale_inputs(light, plan, lambda: [feed])
    assert done.groups == 2 and {"l", "a", "r"} <= done.scaled
    [exact], [same] = run(proto(light), feed["x"]), run(proto(done.model), feed["x"])
    assert np.abs(same - exact).max() < 1e-5 * np.abs(exact).max()
    after = planned(done.model, name)
    losses = [loss(exact, each, item, feed["x"]) for each, item in ((light, plan), (done.model, after))]
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", TYPES)
def test_gptq_of_a_model_loses_less_and_what_is_stored_is_what_it_chose(name):
    light, feed = net_and_feed(np.random.default_rng(4))
    plan = planned(light, name)
    done = rounding.round_weights(light, plan, lambda: [feed], blocks=True)
    assert set(done.arrays) == {"w1", "w2"}
    repaired = rounding.with_scales(plan, done.entries)
    assert {value.calibrator for value in repaired.values} == {"gptq"}
    [exact] = run(proto(light), feed["x"])
    assert loss(exact, light, repaired, feed["x"], done.arrays) < 0.7 * loss(exact, light, plan, feed["x"])
    # In another format, or in other blocks, the steps that it chose mean nothing.
    for other in ("nvfp4" if name == "int4" else "int4", "int8"):
        elsewhere = Rules(format=name, formats={"a": other})
        changed = qdq.make_plan(light, place(light, elsewhere), {"l": histogram_of(feed["x"])}, "minmax")
        plain, kept = (qdq.stored_weights(light, changed, arrays) for arrays in ({}, done.arrays))
        np.testing.assert_array_equal(kept["w1", changed.value("w1").dtype], plain["w1", changed.value("w1").dtype])
    # int8 layers are left to AdaRound, and a weight that is read twice to the nearest step.
    assert rounding.round_weights(light, plan, lambda: [feed]).arrays == {}
    twice = tuple(dataclasses.replace(v, readers=(*v.readers, ("y", 1))) for v in plan.values)
    assert rounding.round_weights(light, QuantPlan(values=twice, kept=()), lambda: [feed], blocks=True).arrays == {}


def histogram_of(array):
    histogram = Histogram()
    histogram.update(array)
    return histogram


def planned(light, name):
    return qdq.make_plan(light, place(light, Rules(format=name)), {}, "minmax")


def loss(exact, light, plan, x, rounded=None):
    [result] = run(proto(own_qdq.emulate(as_ir(qdq.apply(light, plan, rounded)))), x)
    return np.square(result - exact).sum()


CONTEXT = 24


def trained_transformer():
    """Two layers that predict the next character of Python's own source."""
    import ast
    import inspect

    import torch
    from torch import nn

    torch.manual_seed(0)
    codes = torch.tensor([ord(c) for c in inspect.getsource(ast) if ord(c) < 128])

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

        def forward(self, x):
            query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
            weights = (query @ key.transpose(1, 2) / 8).softmax(-1)
            x = x + self.out(weights @ value)
            return x + self.mlp(self.norm2(x))

    net = nn.Sequential(nn.Embedding(128, 64), Layer(), Layer(), nn.Flatten(), nn.Linear(64 * CONTEXT, 128))
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(120):
        starts = torch.randint(0, len(codes) - CONTEXT - 1, (64,))
        pieces = codes[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(net(pieces[:, :-1]), pieces[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pieces = codes[torch.arange(256)[:, None] * 97 + torch.arange(CONTEXT)]
    program = torch.onnx.export(net.eval(), (pieces[:2],), dynamo=True, input_names=["x"], verbose=False,
                                dynamic_shapes=({0: torch.export.Dim("n")},))  # fmt: skip
    return program.model_proto, pieces.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_trained_transformer_loses_less_on_samples_that_were_not_read(name):
    import layerline

    trained, x = trained_transformer()
    light = raise_opset(as_ir(layerline.fuse(trained, [{"x": x[:2]}]).model), 23)
    plan = planned(light, name)
    assert len(plan.values) >= 8
    read, fresh = {"x": x[:128]}, x[128:]
    losses = {}
    for repairs in ((), ("awq",), ("gptq",), ("awq", "gptq")):
        model, weights, entries = light, {}, plan
        if "awq" in repairs:
            model = awq.scale_inputs(light, plan, lambda: [read]).model
            entries = planned(model, name)
        if "gptq" in repairs:
            weights = rounding.round_weights(model, entries, lambda: [read], blocks=True).arrays
        [exact] = run(proto(light), fresh)
        losses[repairs] = loss(exact, model, entries, fresh, weights) / np.square(exact).sum()
    print({names: f"{-10 * np.log10(each):.1f} dB" for names, each in losses.items()})
    assert losses["gptq",] < losses[()] and losses["awq", "gptq"] < losses["awq",]
    # Scaling follows the samples that it reads; it must not lose much on others.
    assert losses["awq",] < 1.3 * losses[()]
