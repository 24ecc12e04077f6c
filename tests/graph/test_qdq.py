"""Q/DQ goes where TensorRT wants it, with the right numbers, and renames nothing."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.collect import collect
from layerline.calib.samples import Batch
from layerline.graph.io import onnx_files
from layerline.graph.quantization import qdq
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.pipeline.errors import ConfigError, StageError
from tests.forms import as_ir, proto

RNG = np.random.default_rng(0)
HALF = TensorProto.FLOAT16


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def f32(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def model(text, opset=20, **weights):
    """A model from onnx's text form; the weights become initializers."""
    out = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    out.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    return out


def run(model, *arrays):
    session = OnnxRuntime().open(model.SerializeToString())
    found = session.run(dict(zip(session.inputs, arrays, strict=True)))
    return [found[o] for o in session.outputs]


def quantize(model, *arrays, rules=None, calibrator="minmax", nonfinite="stop"):
    """Plan and quantised model, calibrated on one batch."""
    placement = place(as_ir(model), rules)
    session = OnnxRuntime().open(model.SerializeToString())
    feed = dict(zip(session.inputs, arrays, strict=True))
    names = [w.name for w in placement.wanted if w.role == "activation"]
    ranges = collect(
        lambda taps: OnnxRuntime().open(model.SerializeToString(), taps), [Batch(feed, None, 1)], names,
        nonfinite=nonfinite,
    )  # fmt: skip
    plan = qdq.make_plan(as_ir(model), placement, ranges.histograms, calibrator)
    quantized = proto(qdq.apply(as_ir(model), plan))
    onnx.checker.check_model(quantized, full_check=True)
    return plan, quantized


def wanted(plan):
    return {v.name: [r for r, _ in v.readers] for v in plan.values}


def reasons(plan):
    return {k.name: k.reason for k in plan.kept}


def stored(model):
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def dequantizers(model):
    return {n.input[0]: n for n in model.graph.node if n.op_type == "DequantizeLinear"}


def close(quantized, reference, *arrays, steps=0.04):
    for a, b in zip(run(quantized, *arrays), run(reference, *arrays), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=steps * np.abs(b).max())


RESIDUAL = """g (float[n, 4, 8, 8] x) => (float[n, 3] y) {
  a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
  r1 = Relu (a)
  c = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
  s = Add (c, r1)
  r2 = Relu (s)
  p = GlobalAveragePool (r2)
  f = Flatten (p)
  y = Gemm <transB = 1> (f, wf, bf)
}"""


OF_RESIDUAL = {"w1": f32(4, 4, 3, 3), "b1": f32(4), "w2": f32(4, 4, 3, 3), "b2": f32(4), "wf": f32(3, 4), "bf": f32(3)}


def residual():
    return model(RESIDUAL, **OF_RESIDUAL)


def test_a_residual_network_is_quantised_at_its_layers_inputs_alone():
    x = f32(2, 4, 8, 8)
    plan, quantized = quantize(residual(), x)
    assert wanted(plan) == {
        "x": ["a"], "w1": ["a"], "r1": ["c", "s"], "w2": ["c"], "r2": ["p"], "f": ["y"], "wf": ["y"],
    }  # fmt: skip
    assert {v.name: v.axis for v in plan.values if v.role == "weight"} == {"w1": 0, "w2": 0, "wf": 0}
    close(quantized, residual(), x)


def test_names_stay_and_the_float_value_keeps_its_own():
    x = f32(1, 4, 8, 8)
    _, quantized = quantize(residual(), x)
    before = [n.output[0] for n in residual().graph.node]
    assert [n.output[0] for n in quantized.graph.node if n.output[0] in before] == before
    assert [o.name for o in quantized.graph.output] == ["y"]
    made = {n.output[0]: n for n in quantized.graph.node}
    assert list(made["r1"].input) == ["a"] and made["c"].input[0] == "r1/dequantized"
    assert list(made["r1/dequantized"].input) == ["r1/quantized", "r1/scale", "r1/zero_point"]


def test_everything_is_symmetric_int8_and_biases_stay_float():
    _, quantized = quantize(residual(), f32(1, 4, 8, 8))
    tensors = stored(quantized)
    zeros = [t for name, t in tensors.items() if name.endswith("/zero_point")]
    assert zeros and all(z.dtype == np.int8 and not z.any() for z in zeros)
    assert {n for n, t in tensors.items() if t.dtype == np.int8 and t.ndim > 1} == {
        f"{w}/quantized" for w in ("w1", "w2", "wf")
    }
    assert all(tensors[b].dtype == np.float32 for b in ("b1", "b2", "bf"))
    assert not {"w1", "w2", "wf"} & set(tensors)


def test_node_metadata_says_the_module():
    net = residual()
    net.graph.node[2].metadata_props.add(key="layerline.module", value="layer1.conv2")
    plan, quantized = quantize(net, f32(1, 4, 8, 8))
    assert plan.value("w2").module == "layer1.conv2"
    made = {n.output[0]: {p.key: p.value for p in n.metadata_props} for n in quantized.graph.node}
    assert made["w2/dequantized"]["layerline.module"] == made["c"]["layerline.module"] == "layer1.conv2"


# T13, T14: tiny weights with big biases, and tensors shared by several layers


@pytest.mark.parametrize("per_channel", [True, False])
def test_t13_tiny_weights_leave_a_big_bias_as_it_is(per_channel):
    w = np.float32([[1e-7, -1e-7], [-1e-7, 0.99e-7]]).reshape(2, 2, 1, 1)
    net = model("g (float[n, 2, 1, 1] x) => (float[n, 2, 1, 1] y) { y = Conv (x, w, b) }", w=w, b=np.float32([5, -4.5]))
    x = np.float32([63.5, 20]).reshape(1, 2, 1, 1)
    _, quantized = quantize(net, x, rules=Rules(per_channel=per_channel))
    [y] = run(quantized, x)
    assert y.ravel() == pytest.approx([5, -4.5], abs=1e-4)
    assert stored(quantized)["b"].tolist() == [5, -4.5]


@pytest.mark.parametrize("factor", [0.01, 1.0, 300.0])
def test_t14_layers_that_share_weight_and_bias_are_both_right(factor):
    net = model(
        """g (float[n, 3, 4, 4] x) => (float[n, 5, 4, 4] y1, float[n, 5, 4, 4] y2) {
          y1 = Conv (x, w, b)
          z = Mul (x, k)
          y2 = Conv (z, w, b)
        }""", w=f32(5, 3, 1, 1), b=f32(5), k=np.float32(factor),
    )  # fmt: skip
    x = f32(2, 3, 4, 4)
    plan, quantized = quantize(net, x)
    assert wanted(plan)["w"] == ["y1", "y2"] and len(plan.values) == 3
    close(quantized, net, x, steps=1.5 / 127)


# T15: an activation is never dropped, for a symmetric range cannot clip at 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Conv (x, w)\n y = Relu (a)", [0, 0, 0, 1, 2]),
        ("a = Conv (x, w)\n r = Relu (a)\n y = Conv (r, w)", [0, 0, 0, 1, 2]),
        ("r = Relu (x)\n y = Conv (r, w)", [0, 0, 0, 1, 2]),
        ("a = Clip (x, low, high)\n y = Conv (a, w)", [0, 0, 0, 1, 1]),
        ("a = Conv (x, w)\n r = Relu (a)\n b = Conv (r, w)\n y = Add (b, a)", [-2, -1, 0, 2, 4]),
    ],
)
def test_t15_activations_survive(body, expected):
    weights = {"w": np.ones((1, 1, 1, 1), np.float32), "low": np.float32(0), "high": np.float32(1)}
    text = f"g (float[n, 1, 1, 5] x) => (float[n, 1, 1, 5] y) {{ {body} }}"
    net = model(text, **{k: v for k, v in weights.items() if f" {k}" in body})
    x = np.float32([-2, -1, 0, 1, 2]).reshape(1, 1, 1, 5)
    [y] = run(quantize(net, x)[1], x)
    assert y.ravel() == pytest.approx(expected, abs=2 / 127 + 1e-6)


# T16: the axis is there, and an opset that knows it

WEIGHTED = [
    ("Conv", "Conv (x, w)", (2, 3, 5, 5), (8, 3, 3, 3), 0),
    ("Conv", "Conv <group = 3> (x, w)", (2, 3, 5, 5), (6, 1, 3, 3), 0),
    ("Conv", "Conv (x, w)", (2, 3, 7), (4, 3, 2), 0),
    ("ConvTranspose", "ConvTranspose (x, w)", (2, 4, 5, 5), (4, 6, 3, 3), 1),
    ("ConvTranspose", "ConvTranspose <group = 2> (x, w)", (2, 4, 5, 5), (4, 3, 3, 3), 1),
    ("Gemm", "Gemm (x, w)", (2, 5), (5, 7), 1),
    ("Gemm", "Gemm <transB = 1> (x, w)", (2, 5), (7, 5), 0),
    ("MatMul", "MatMul (x, w)", (2, 3, 5), (5, 7), 1),
    ("MatMul", "MatMul (x, w)", (2, 3, 5), (2, 5, 7), None),
    ("MatMul", "MatMul (x, w)", (2, 3, 5), (5,), None),
    ("MatMul", "MatMul (w, x)", (2, 3, 5), (4, 3), None),
]


@pytest.mark.parametrize("opset", [11, 13, 20])
@pytest.mark.parametrize(("op", "call", "x_shape", "w_shape", "axis"), WEIGHTED)
def test_t16_the_scales_run_along_the_output_channels(op, call, x_shape, w_shape, axis, opset):
    w = f32(*w_shape)
    if axis is not None:
        # Channels of very different size: one scale for all, or along the wrong axis, would lose the small ones.
        size = [-1 if i == axis else 1 for i in range(w.ndim)]
        w *= np.geomspace(1e-3, 1, w_shape[axis]).reshape(size).astype(np.float32)
    dims = ", ".join(map(str, x_shape))
    net = model(f"g (float[{dims}] x) => (float y) {{ y = {call} }}", opset=opset, w=w)
    net.graph.output[0].CopyFrom(helper.make_empty_tensor_value_info("y"))
    x = f32(*x_shape)
    _, quantized = quantize(net, x)
    node = dequantizers(quantized)["w/quantized"]
    axes = [a.i for a in node.attribute if a.name == "axis"]
    assert axes == ([] if axis is None else [axis])
    assert stored(quantized)["w/scale"].shape == (() if axis is None else (w_shape[axis],))
    assert quantized.opset_import[0].version >= 13
    [got], [want] = run(quantized, x), run(net, x)
    channel = 1 if "Conv" in op else -1
    others = tuple(i for i in range(want.ndim) if i != channel % want.ndim)
    if axis is not None:
        np.testing.assert_array_less(np.abs(got - want).max(axis=others), 0.04 * np.abs(want).max(axis=others))


@pytest.mark.parametrize(("groups", "shape"), [(8, (8, 1, 4, 4)), (4, (4, 2, 3, 3))])
def test_each_channel_of_a_depthwise_transposed_convolution_keeps_its_own_scale(groups, shape):
    w = f32(*shape) * np.geomspace(1e-3, 100, groups).reshape(-1, 1, 1, 1).astype(np.float32)
    net = model(
        f"g (float[2, {groups}, 6, 6] x) => (float[2, c, h, k] y) {{ y = ConvTranspose <group = {groups}> (x, w) }}",
        w=w,
    )
    x = f32(2, groups, 6, 6)
    plan, quantized = quantize(net, x)
    assert plan.value("w").axis == 0 and len(plan.value("w").scales) == groups
    [got], [want] = run(quantized, x), run(net, x)
    lost = np.linalg.norm(got - want, axis=(2, 3)) / np.linalg.norm(want, axis=(2, 3))
    assert lost.max() < 0.03  # more than 30 dB in every channel


@pytest.mark.parametrize("groups", [2, 3])
def test_a_grouped_transposed_convolution_stays_float_where_groups_cannot_share_scales(groups):
    w = f32(6, 2, 3, 3)
    text = f"g (float[2, 6, 6, 6] x) => (float[2, c, h, k] y) {{ y = ConvTranspose <group = {groups}> (x, w) }}"
    alike = place(as_ir(model(text, w=np.sign(w))))
    assert {w.axis for w in alike.wanted if w.role == "weight"} == {1}
    assert f"each scale shared by its {groups} groups" in alike.wanted[1].why
    w = np.sign(w)
    w[0] *= 100
    apart = place(as_ir(model(text, w=w)))
    assert apart.wanted == ()
    assert apart.kept[0].reason == (
        f"its {groups} groups would share scales along axis 1, and its channels differ 100 times"
    )


NORM = """g (float[n, 4] x) => (float[n, 4] y) {
  m = ReduceMean (x, axes) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, axes) e = Add (v, eps) s = Sqrt (e)
  n = Div (d, s) h = MatMul (n, w) r = Relu (h) y = Sigmoid (r)
}"""


def test_all_that_stays_float_is_listed_and_what_fuses_or_moves_is_not():
    net = model(NORM, w=f32(4, 4), axes=np.int64([1]), eps=np.float32(1e-5))
    plan, _ = quantize(net, f32(3, 4))
    assert set(reasons(plan)) == {"m", "d", "q", "v", "e", "s", "n", "y"}  # not r: it fuses into h
    assert reasons(plan)["m"] == "there is no int8 rule for ReduceMean"
    fused = model("g (float[n, 4] x) => (float[n, 4] y) { l = LayerNormalization (x, g)\n y = MatMul (l, w) }",
                  w=f32(4, 4), g=f32(4))  # fmt: skip
    assert reasons(quantize(fused, f32(3, 4))[0]) == {"l": "there is no int8 rule for LayerNormalization"}


def test_one_scale_per_weight_when_asked():
    plan, _ = quantize(residual(), f32(1, 4, 8, 8), rules=Rules(per_channel=False))
    assert all(v.axis is None and len(v.scales) == 1 for v in plan.values)


# T18: dead channels, tiny channels, outputs that are always 0


@pytest.mark.parametrize("weight", [0.0, 1e-12, 1e-38, 1e-45])
@pytest.mark.parametrize("per_channel", [True, False])
def test_t18_every_scale_is_usable_and_live_channels_are_unhurt(weight, per_channel):
    w = f32(3, 2, 1, 1)
    w[1] = weight
    net = model(
        """g (float[n, 2, 4, 4] x) => (float[n, 3, 4, 4] y, float[n, 2, 4, 4] z) {
          y = Conv (x, w)
          n = Abs (x)
          m = Neg (n)
          dead = Relu (m)
          z = Conv (dead, v)
        }""", w=w, v=f32(2, 2, 1, 1),
    )  # fmt: skip
    x = f32(2, 2, 4, 4)
    _, quantized = quantize(net, x, rules=Rules(per_channel=per_channel))
    for name, scale in stored(quantized).items():
        if name.endswith("/scale"):
            assert np.isfinite(scale).all() and (scale > 0).all() and (scale.astype(np.float16) > 0).all()
    y, z = run(quantized, x)
    expected, _ = run(net, x)
    assert np.abs(y[:, 1]).max() <= 1e-6 and not z.any()
    np.testing.assert_allclose(y[:, ::2], expected[:, ::2], atol=0.03 * np.abs(expected).max())


# T17: what is not finite never becomes a scale


def test_t17_a_nan_in_calibration_stops_or_is_left_out():
    net = model("g (float[n] x) => (float[n, 2] y) { l = Log (x)\n c = Unsqueeze (l, a)\n y = MatMul (c, w) }",
                w=f32(1, 2), a=np.int64([1]))  # fmt: skip
    x = np.float32([0, 1, np.e])
    with pytest.raises(StageError, match="c: 0 NaN and 1 Inf elements in calibration batch 0"):
        quantize(net, x)
    plan, _ = quantize(net, x, nonfinite="skip")
    assert plan.value("c").seen == (0, pytest.approx(1))


# T20: control flow, and weights with several readers

BRANCHES = """g (bool c, float[n, 4] x, int64[k] i) => (float[n, 4] y, float[k, 4] e) {
  e = Gather (W, i)
  y = If (c) <
    then_branch = t () => (float[n, 4] yt) { mt = MatMul (x, W) yt = Add (mt, one) },
    else_branch = f () => (float[n, 4] yf) { mf = MatMul (x, W) yf = Mul (mf, two) }
  >
}"""


W = f32(4, 4)


def branches(extra=""):
    text = BRANCHES.replace("y = If", f"{extra} y = If")
    return model(text, W=W, one=np.float32(1), two=np.float32(2))


@pytest.mark.parametrize("condition", [True, False])
def test_t20_bodies_are_listed_with_the_reason_and_stay_right(condition):
    inputs = np.array(condition), f32(3, 4), np.array([1, 3])
    plan, quantized = quantize(branches(), *inputs)
    assert plan.values == ()
    assert reasons(plan) == dict.fromkeys(["mt", "mf"], "it is inside the body of If y, where ranges are not observed")
    close(quantized, branches(), *inputs, steps=1e-6)


@pytest.mark.parametrize("condition", [True, False])
def test_t20_a_tied_weight_is_int8_for_every_reader_and_no_float_copy_stays(condition):
    net = branches("h = MatMul (x, W)")
    net.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["n", 4]))
    inputs = np.array(condition), f32(3, 4), np.array([1, 3])
    plan, quantized = quantize(net, *inputs)
    assert sorted(wanted(plan)["W"]) == ["e", "h", "mf", "mt"]
    assert "W" not in stored(quantized)
    close(quantized, net, *inputs)


@pytest.mark.parametrize("condition", [True, False])
def test_names_that_a_body_has_are_taken(condition):
    """What quantisation adds is called h/quantized, W/scale and so on: here the branches have these already."""
    text = BRANCHES.replace("y = If", "h = MatMul (x, W)\n s = MatMul (h, W)\n y = If")
    text = text.replace(
        "mt = MatMul (x, W)",
        """"W/dequantized" = MatMul (x, W)
        "x/quantized" = Abs ("W/dequantized") "h/scale" = Neg ("x/quantized") mt = Identity ("h/scale")""",
    )
    text = text.replace(
        "mf = MatMul (x, W)",
        """"x/dequantized" = MatMul (x, W)
        "W/zero_point" = Abs ("x/dequantized") "h/quantized" = Neg ("W/zero_point") mf = Add ("h/quantized", s)""",
    )
    net = model(text, W=W, one=np.float32(1), two=np.float32(2))
    inputs = np.array(condition), f32(3, 4), np.array([1, 3])
    plan, quantized = quantize(net, *inputs)
    assert {"W", "h", "x"} <= wanted(plan).keys()
    close(quantized, net, *inputs)
    names = [o for graph in onnx_files.graphs(quantized) for node in graph.node for o in node.output]
    assert len(names) == len(set(names)) and not set(names) & stored(quantized).keys()


def test_a_skipped_layer_keeps_the_float_weight_that_others_read_in_int8():
    net = model(
        "g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = MatMul (x, w) z = MatMul (x, w) }", w=f32(4, 4)
    )
    x = f32(2, 4)
    plan, quantized = quantize(net, x, rules=Rules(skip=("z",)))
    assert wanted(plan) == {"x": ["y"], "w": ["y"]} and reasons(plan) == {"z": "skip"}
    np.testing.assert_array_equal(run(quantized, x)[1], run(net, x)[1])


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 4, 5)])
def test_a_products_weight_of_three_axes_runs_in_a_default_session(shape):
    """onnxruntime's integer kernels refuse scales a channel there: "b zero point is not valid"."""
    given = model("g (float[n, 2, 3, 4] x) => (float[n, 2, 3, 5] y) { y = MatMul (x, w) }", w=f32(*shape))
    x = f32(2, 2, 3, 4)
    plan, quantized = quantize(given, x)
    (weight,) = (v for v in plan.values if v.name == "w")
    assert weight.axis is None and len(weight.scales) == 1
    session = OnnxRuntime(defaults=True).open(quantized.SerializeToString())
    np.testing.assert_allclose(session.run({"x": x})["y"], run(quantized, x)[0], atol=1e-4)


def test_a_stack_of_matrices_whose_channels_differ_stays_float():
    weight = f32(2, 4, 5) * np.geomspace(1e-3, 1, 5).astype(np.float32)
    given = model("g (float[n, 3, 4] x) => (float[n, 3, 5] y) { y = MatMul (x, w) }", w=weight)
    plan, _ = quantize(given, f32(2, 3, 4))
    assert plan.values == ()
    assert any("its weight has 3 axes" in k.reason for k in plan.kept)


def test_a_weight_read_along_two_axes_gets_one_scale():
    net = model(
        "g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = Gemm (x, w) z = Gemm <transB = 1> (x, w) }",
        w=f32(4, 4),
    )
    x = f32(2, 4)
    plan, quantized = quantize(net, x)
    assert plan.value("w").axis is None and "several axes" in plan.value("w").why
    close(quantized, net, x)


# T22: weights that are not plain initializers


@pytest.mark.parametrize("form", ["constant", "identity", "cast", "transpose", "transpose of constant", "chain"])
@pytest.mark.parametrize("opset", [11, 20])
def test_t22_weights_behind_constant_nodes_and_casts_are_the_same_bytes(form, opset):
    w = f32(6, 3, 3, 3).astype(np.float16).astype(np.float32)
    x, text = f32(2, 3, 5, 5), "g (float[n, 3, 5, 5] x) => (float[n, 6, 3, 3] y) {{ {0} y = Conv (x, w) }}"
    plain = quantize(model(text.format(""), opset=opset, w=w), x)[1]
    swapped = np.ascontiguousarray(w.transpose(1, 0, 2, 3))
    bodies = {
        "constant": ("", {}),
        "identity": ("w = Identity (w0)", {"w0": w}),
        "cast": ("w = Cast <to = 1> (w0)", {"w0": w.astype(np.float16)}),
        "transpose": ("w = Transpose <perm = [1, 0, 2, 3]> (w0)", {"w0": swapped}),
        "transpose of constant": ("w = Transpose <perm = [1, 0, 2, 3]> (w0)", {}),
        "chain": ("w1 = Cast <to = 1> (w0) w2 = Transpose <perm = [1, 0, 2, 3]> (w1) w = Identity (w2)",
                  {"w0": swapped.astype(np.float16)}),
    }  # fmt: skip
    body, weights = bodies[form]
    net = model(text.format(body), opset=opset, **weights)
    if "constant" in form:
        name, array = ("w", w) if form == "constant" else ("w0", swapped)
        node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
        net.graph.node.insert(0, node)
    plan, quantized = quantize(net, x)
    assert plan.value("w").role == "weight"
    for name in ("w/quantized", "w/scale"):
        np.testing.assert_array_equal(stored(quantized)[name], stored(plain)[name])
    assert {n.op_type for n in quantized.graph.node} == {"Conv", "QuantizeLinear", "DequantizeLinear"}
    close(quantized, net, x)


def test_a_constant_that_something_else_reads_through_a_transpose_is_left_to_it():
    text = """g (float[n, 4] x, int64[k] i) => (float[n, 6] y, float[k, 4] e) {
      t = Transpose (w)
      y = MatMul (x, t)
      e = Gather (w, i)
    }"""
    net, inputs = model(text, w=f32(6, 4)), (f32(2, 4), np.array([0, 5]))
    plan, quantized = quantize(net, *inputs)
    assert wanted(plan) == {"x": ["y"], "t": ["y"]} and "w" in stored(quantized)
    close(quantized, net, *inputs)


# The rules for Add, Concat, pooling and attention


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_convs_before_an_add_the_shorter_branch_is_quantised(swapped):
    add = "s = Add (d, c2)" if swapped else "s = Add (c2, d)"
    net = model(
        f"""g (float[n, 3, 6, 6] x) => (float[n, 3, 6, 6] s) {{
          c1 = Conv (x, w1)
          r = Relu (c1)
          c2 = Conv (r, w2)
          d = Conv (x, w3)
          {add}
        }}""", w1=f32(3, 3, 1, 1), w2=f32(3, 3, 1, 1), w3=f32(3, 3, 1, 1),
    )  # fmt: skip
    x = f32(1, 3, 6, 6)
    plan, quantized = quantize(net, x)
    assert wanted(plan)["d"] == ["s"] and "c2" not in wanted(plan)
    close(quantized, net, x)


def test_sizes_that_are_unknown_on_both_sides_are_no_broadcast():
    text = """g (float[n, 2, h, w] x) => (float[n, 2, p, q] s) {
      c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
      c2 = Conv (x, w2)
      s = Add (c1, c2)
    }"""
    net, x = model(text, w1=f32(2, 2, 3, 3), w2=f32(2, 2, 1, 1)), f32(1, 2, 5, 6)
    plan, quantized = quantize(net, x)
    assert wanted(plan)["c1"] == ["s"]
    close(quantized, net, x)


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        ("c = Conv (x, w)\n s = Add (x, x)\n y = Mul (c, s)", "s", "cannot fuse into one"),
        ("c = Conv (x, w)\n s = Add (c, x)\n y = Mul (c, s)", "s", "cannot fuse into one"),
        ("c = Conv (x, w)\n s = Add (c, k)\n y = Relu (s)", "s", "adds a constant"),
        ("c = Conv (x, w)\n p = GlobalAveragePool (x)\n s = Add (c, p)\n y = Relu (s)", "s", "broadcasts"),
        ("a = Relu (x)\n y = Concat <axis = 1> (x, a)\n c = Conv (x, w)", "y", "its output is not quantised"),
    ],
)
def test_what_cannot_fuse_stays_float_and_says_why(body, name, reason):
    text = f"g (float[n, 2, 3, 3] x) => (float y) {{ {body} }}"
    net = model(text, w=f32(2, 2, 1, 1), **({"k": np.float32(1)} if " k)" in body else {}))
    net.graph.output[0].CopyFrom(helper.make_empty_tensor_value_info("y"))
    plan, _ = quantize(net, f32(1, 2, 3, 3))
    assert reason in reasons(plan)[name]


def test_all_inputs_of_a_quantised_concat_share_its_scale():
    net = model(
        """g (float[n, 2, 4, 4] x) => (float[n, 2, 4, 4] y) {
          a = Conv (x, w1)
          b = MaxPool <kernel_shape = [1, 1]> (x)
          big = Mul (b, k)
          c1 = Concat <axis = 1> (a, big)
          c2 = Concat <axis = 1> (c1, x)
          y = Conv (c2, w2)
        }""", w1=f32(2, 2, 1, 1), w2=f32(2, 6, 1, 1), k=np.float32(20),
    )  # fmt: skip
    x = f32(1, 2, 4, 4)
    plan, quantized = quantize(net, x)
    group = {"a", "big", "c1", "x", "c2"}
    assert {v.name for v in plan.values if v.shared} == group
    assert len({plan.value(n).scales for n in group}) == 1
    assert all(set(plan.value(n).shared) == group - {n} for n in group)
    assert plan.value("c2").amax == pytest.approx(np.abs(20 * x).max())
    close(quantized, net, x)


ATTENTION = """g (float[n, 5, 8] x) => (float[n, 5, 8] y) {
  q = MatMul (x, wq)
  k = MatMul (x, wk)
  v = MatMul (x, wv)
  t = Transpose <perm = [0, 2, 1]> (k)
  s = MatMul (q, t)
  p = Softmax (s)
  o = MatMul (p, v)
  y = MatMul (o, wo)
}"""


@pytest.mark.parametrize("attention", [False, True])
def test_products_of_two_activations_are_quantised_on_both_sides_or_not_at_all(attention):
    net = model(ATTENTION, **{w: f32(8, 8, scale=0.4) for w in ("wq", "wk", "wv", "wo")})
    x = f32(2, 5, 8)
    plan, quantized = quantize(net, x, rules=Rules(attention=attention))
    assert wanted(plan)["x"] == ["q", "k", "v"]
    assert {"q", "t", "p", "v"} <= set(wanted(plan)) if attention else not {"q", "t", "p", "v"} & set(wanted(plan))
    assert set(reasons(plan)) == ({"p"} if attention else {"s", "p", "o"})
    assert reasons(plan)["p"] == "there is no int8 rule for Softmax"
    close(quantized, net, x, steps=0.06)


@pytest.mark.parametrize("pattern", ["c", "w2", "layer1.conv2", "layer1", "layer?.*", "Conv_2"])
def test_skip_takes_values_weights_nodes_and_module_paths(pattern):
    net = residual()
    net.graph.node[2].name = "Conv_2"
    net.graph.node[2].metadata_props.add(key="layerline.module", value="layer1.conv2")
    x = f32(1, 4, 8, 8)
    plan, quantized = quantize(net, x, rules=Rules(skip=(pattern,)))
    assert "w2" not in wanted(plan) and reasons(plan)["c"] == "skip"
    close(quantized, net, x)


def test_ops_and_skips_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="'Relu' has no int8 rule"):
        place(as_ir(residual()), Rules(ops=("Conv", "Relu")))
    with pytest.raises(ConfigError, match="'layer9' matches no value"):
        place(as_ir(residual()), Rules(skip=("layer9",)))
    plan, _ = quantize(residual(), f32(1, 4, 8, 8), rules=Rules(ops=("Conv",)))
    assert reasons(plan)["y"] == "ops leaves Gemm out"


def test_operators_without_a_rule_and_computed_weights_are_listed():
    text = """g (float[n, 4] x, float[4, 4] d) => (float[n, 4] y, float[k, 40] e) {
      y = MatMul (x, d)
      e = Gather (w, i)
    }"""
    found = {k.name: k.reason for k in place(as_ir(model(text, w=f32(30, 40), i=np.array([1, 2])))).kept}
    assert found["y"].startswith("both inputs are activations")
    rule = "there is no int8 rule for Gather, which reads the weight w"
    assert found["e"] == f"{rule}: it looks numbers up and multiplies none"


def test_integer_products_are_left_alone():
    net = model("g (int32[2, 3] x) => (int32[2, 2] y) { y = MatMul (x, w) }", w=np.ones((3, 2), np.int32))
    assert place(as_ir(net)).wanted == ()


@pytest.mark.parametrize("text", ["Conv (x, w, b)", "Conv (x, w)"])
def test_half_precision_models_get_half_precision_scales(text):
    weights = {"w": f32(2, 3, 1, 1).astype(np.float16), "b": f32(2).astype(np.float16)}
    read = {k: v for k, v in weights.items() if f" {k}" in text}
    net = model(f"g (float16[n, 3, 4, 4] x) => (float16[n, 2, 4, 4] y) {{ y = {text} }}", opset=13, **read)
    x = f32(1, 3, 4, 4).astype(np.float16)
    _, quantized = quantize(net, x)
    assert {t.dtype for n, t in stored(quantized).items() if n.endswith("/scale")} == {np.dtype(np.float16)}
    assert quantized.opset_import[0].version >= 19
    close(quantized, net, x)


def test_names_that_are_taken_are_not_taken_twice():
    net = model(
        "g (float[n, 4] x) => (float[n, 4] y) { s = Mul (x, w_scale)\n y = MatMul (s, w) }", w=f32(4, 4), w_scale=f32(4)
    )
    for tensor in net.graph.initializer:
        tensor.name = tensor.name.replace("w_scale", "w/scale")
    net.graph.node[0].input[1] = "w/scale"
    x = f32(2, 4)
    _, quantized = quantize(net, x)
    assert {"w/scale", "w/scale_2"} <= set(stored(quantized))
    close(quantized, net, x)


def test_a_model_with_qdq_and_a_plan_of_another_model_are_refused():
    plan, quantized = quantize(residual(), f32(1, 4, 8, 8))
    with pytest.raises(StageError, match="quantisation nodes"):
        place(as_ir(quantized))
    other = model("g (float[n, 2] x) => (float[n, 2] y) { y = MatMul (x, w) }", w=f32(2, 2))
    with pytest.raises(StageError, match=r"does not have|not in the model"):
        qdq.apply(as_ir(other), plan)


def test_weight_sqnr_is_the_loss_of_each_weight():
    net = residual()
    plan, quantized = quantize(net, f32(1, 4, 8, 8))
    found, tensors = qdq.weight_sqnr(as_ir(net), plan, {}), stored(quantized)
    w = stored(net)["w1"]
    back = tensors["w1/quantized"] * tensors["w1/scale"].reshape(-1, 1, 1, 1)
    assert found["w1", "int8"].sqnr_db == pytest.approx(10 * np.log10((w**2).sum() / ((w - back) ** 2).sum()), rel=1e-3)
    assert {name for name, _ in found} == {"w1", "w2", "wf"}


@pytest.mark.parametrize(("size", "counts"), [(1e-3, True), (1e-8, False)])
def test_a_dead_channel_is_not_the_worst_one(size, counts):
    net = residual()
    plan, _ = quantize(net, f32(1, 4, 8, 8))
    weight = next(tensor for tensor in net.graph.initializer if tensor.name == "w1")
    w = onnx.numpy_helper.to_array(weight).copy()
    w[1] *= size / np.abs(w[1]).max()
    weight.CopyFrom(onnx.numpy_helper.from_array(w, "w1"))
    # One scale for all: the small channel becomes 0, which is an error of 0 dB.
    scale = float(np.abs(w).max()) / 127
    values = tuple(dataclasses.replace(v, axis=None, scales=(scale,)) if v.name == "w1" else v for v in plan.values)
    loss = qdq.weight_sqnr(as_ir(net), dataclasses.replace(plan, values=values), {})["w1", "int8"]
    assert (loss.worst_channel_db == pytest.approx(0)) is counts and loss.sqnr_db > 20


def test_under_one_scale_the_worst_channel_still_counts():
    net = residual()
    plan, _ = quantize(net, f32(1, 4, 8, 8))
    w = stored(net)["w1"]
    scale = float(np.abs(w).max()) * 40 / 127
    values = tuple(dataclasses.replace(v, axis=None, scales=(scale,)) if v.name == "w1" else v for v in plan.values)
    loss = qdq.weight_sqnr(as_ir(net), dataclasses.replace(plan, values=values), {})["w1", "int8"]
    by_channel = []
    for channel in w.astype(np.float64):
        noise = channel - np.rint(channel / np.float32(scale)) * scale
        by_channel.append(10 * np.log10((channel**2).sum() / (noise**2).sum()))
    assert loss.worst_channel_db == pytest.approx(min(by_channel), rel=1e-3)
    assert loss.worst_channel_db < loss.sqnr_db


# TensorRT itself, built without a device


def builds(model):
    """Whether TensorRT-RTX parses and builds it; the message if not."""
    trt = pytest.importorskip("tensorrt_rtx")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser_ = trt.OnnxParser(network, log)
    assert parser_.parse(model.SerializeToString()), [str(parser_.get_error(i)) for i in range(parser_.num_errors)]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        profile.set_shape(tensor.name, *(tuple(n if d == -1 else d for d in tensor.shape) for n in (1, 2, 4)))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None


@pytest.mark.parametrize(
    ("node", "x", "w"),
    [("Conv (x, w)", (1, 2, 4, 4), (0, 2, 1, 1)), ("MatMul (x, w)", (2, 3, 4), (2, 4, 0)),
     ("ConvTranspose (x, w)", (1, 2, 4, 4), (2, 0, 1, 1)), ("Gemm (x, w)", (3, 4), (4, 0))],
)  # fmt: skip
def test_a_layer_without_outputs_is_no_error(node, x, w):
    net = model(f"g (float[{', '.join(map(str, x))}] x) => (float[] y) {{ y = {node} }}", w=f32(*w))
    plan, quantized = quantize(net, f32(*x))
    assert [value.name for value in plan.values if value.role == "weight"] == ["w"]
    assert run(quantized, f32(*x))[0].size == 0


@pytest.mark.parametrize("kind", ["residual", "attention", "concat", "transposed", "half", "opset 11"])
def test_tensorrt_builds_what_the_rules_make(kind):
    if kind == "residual":
        net, x, rules = residual(), f32(1, 4, 8, 8), None
    elif kind == "attention":
        net = model(ATTENTION, **{w: f32(8, 8) for w in ("wq", "wk", "wv", "wo")})
        x, rules = f32(2, 5, 8), Rules(attention=True)
    elif kind == "concat":
        text = """g (float[n, 2, 4, 4] x) => (float[n, 2, 4, 4] y) {
          a = Conv (x, w1) b = Relu (x) c = Concat <axis = 1> (a, b) y = Conv (c, w2) }"""
        net, x, rules = model(text, w1=f32(2, 2, 1, 1), w2=f32(2, 4, 1, 1)), f32(1, 2, 4, 4), None
    elif kind == "transposed":
        text = "g (float[n, 4, 5, 5] x) => (float[n, 6, 7, 7] y) { y = ConvTranspose <group = 2> (x, w) }"
        net, x, rules = model(text, w=f32(4, 3, 3, 3)), f32(1, 4, 5, 5), None
    elif kind == "half":
        text = "g (float16[n, 4, 5, 5] x) => (float16[n, 6, 3, 3] y) { y = Conv (x, w) }"
        net, x = model(text, w=f32(6, 4, 3, 3).astype(np.float16)), f32(1, 4, 5, 5).astype(np.float16)
        rules = None
    else:
        net = model("g (float[n, 4, 5, 5] x) => (float[n, 6, 3, 3] y) { y = Conv (x, w) }", opset=11, w=f32(6, 4, 3, 3))
        x, rules = f32(1, 4, 5, 5), None
    _, quantized = quantize(net, x, rules=rules)
    assert builds(quantized)
