"""Q/DQ of every format: the runtime computes what a slow reference says, and TensorRT builds it."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, numpy_helper

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.scales import channel_amax, in_blocks, quantize, scale_of
from layerline.graph.quantization import convert, own_qdq, qdq, targets
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.pipeline.config import quantize_fields
from tests.forms import as_ir, proto
from tests.graph import slow_numpy
from tests.graph.test_qdq import builds, close, f32, model, reasons, residual, run, stored, wanted
from tests.graph.test_qdq import quantize as quantized_model

TYPES = {"int8": "int8", "fp8": "float8e4m3fn", "int4": "int4", "nvfp4": "float4e2m1"}
NUMBERS = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-12, -1e-40])
WEIGHTS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=NUMBERS)


def test_the_modes_of_the_stage_are_the_formats():
    assert tuple(targets.FORMATS) == quantize_fields.FORMATS
    for name, target in targets.TARGETS.items():
        taken = set[str]().union(*target.formats.values())
        assert set(quantize_fields.TARGETS[name]) == taken


def test_the_numbers_of_e2m1_are_those_of_ml_dtypes():
    codes = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert codes.astype(float).tolist() == slow_numpy.E2M1 == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_the_numbers_of_e4m3_are_those_of_ml_dtypes():
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert codes.astype(float).tolist() == slow_numpy.E4M3 and slow_numpy.E4M3[-1] == 448


@pytest.mark.parametrize("name", TYPES)
@given(weight=WEIGHTS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stored_weight_is_the_nearest_number_of_its_type(name, weight, data):
    axis = data.draw(st.none() | st.integers(0, weight.ndim - 1))
    scales = scale_of(channel_amax(weight, axis), TYPES[name])
    assert np.isfinite(scales).all() and (scales > 0).all()
    back = quantize(weight, scales, axis, TYPES[name]).dequantized()
    wide = scales if axis is None else scales.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    np.testing.assert_array_equal(back, slow_numpy.each(weight, wide, slow_numpy.GRIDS[name]))
    assert (back[weight == 0] == 0).all()
    if axis is None:
        assert (np.diff(back.ravel()[np.argsort(weight, axis=None)]) >= 0).all()


def test_fp8_has_int8s_places_and_the_runtime_gives_the_references_numbers():
    x = f32(2, 4, 8, 8, scale=3.0)
    x.ravel()[:4] = 0.0, 1e-9, -1e-3, 700.0
    plan, quantized = quantized_model(residual(), x, rules=Rules(format="fp8"))
    places = wanted(quantized_model(residual(), x)[0])
    # The pool reads int8 only, so its input is not quantised.
    assert wanted(plan) == {k: v for k, v in places.items() if k != "r2"}
    assert reasons(plan)["p"] == "tensorrt takes GlobalAveragePool in int8, not in fp8"
    assert {v.dtype for v in plan.values} == {"float8e4m3fn"} and plan.value("x").calibrator == "minmax"
    types = {t.name: t.data_type for t in quantized.graph.initializer}
    assert types["w1/quantized"] == types["x/zero_point"] == TensorProto.FLOAT8E4M3FN
    names = ["x/dequantized", "r1", "r1/dequantized", "w1/dequantized"]
    session = OnnxRuntime().open(quantized.SerializeToString(), names)
    values = {"x": x, **session.run({"x": x})}
    for name in ("x", "r1"):
        [scale] = plan.value(name).scales
        expected = slow_numpy.each(values[name], scale, slow_numpy.E4M3)
        np.testing.assert_array_equal(values[f"{name}/dequantized"], expected)
    w = stored(residual())["w1"]
    scales = np.float32(plan.value("w1").scales).reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(values["w1/dequantized"], slow_numpy.each(w, scales, slow_numpy.E4M3))
    close(quantized, residual(), x, steps=0.08)


def test_a_layer_may_have_a_format_of_its_own_and_a_value_may_be_read_in_two():
    text = """g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = MatMul (x, w) z = MatMul (x, v) }"""
    net, x = model(text, w=f32(4, 4), v=f32(4, 4)), f32(3, 4)
    plan, quantized = quantized_model(net, x, rules=Rules(formats={"z": "fp8"}))
    entries = [(v.name, v.dtype, [r for r, _ in v.readers]) for v in plan.values]
    assert entries == [
        ("x", "int8", ["y"]), ("x", "float8e4m3fn", ["z"]), ("w", "int8", ["y"]), ("v", "float8e4m3fn", ["z"]),
    ]  # fmt: skip
    read = {n.output[0]: list(n.input) for n in quantized.graph.node}
    types = {n.output[0]: n.input[2] for n in quantized.graph.node if n.op_type == "QuantizeLinear"}
    assert read["y"][0] != read["z"][0] and len(types) == 2
    close(quantized, net, x, steps=0.1)


def test_channels_that_differ_share_an_fp8_scale_and_not_an_int8_one():
    weight = f32(2, 5, 6) * np.float32([1, 1, 1, 1, 1, 1e-2])
    net = model("g (float[n, 5] x) => (float[2, n, 6] y) { y = MatMul (x, w) }", w=weight)
    assert "differ" in {k.name: k.reason for k in place(as_ir(net)).kept}["y"]
    assert [w.name for w in place(as_ir(net), Rules(format="fp8")).wanted] == ["x", "w"]


@pytest.mark.parametrize("half", [False, True])
def test_tensorrt_builds_fp8(half):
    net = residual()
    x = f32(1, 4, 8, 8)
    if half:
        text = "g (float16[n, 4, 5, 5] x) => (float16[n, 6, 3, 3] y) { y = Conv (x, w) }"
        net, x = model(text, w=f32(6, 4, 3, 3).astype(np.float16)), f32(1, 4, 5, 5).astype(np.float16)
    _, quantized = quantized_model(net, x, rules=Rules(format="fp8"))
    assert builds(quantized)


BLOCKS = {"int4": 32, "nvfp4": 16}
BLOCKED = hnp.arrays(np.float32, st.tuples(st.just(2), st.sampled_from([32, 64])), elements=NUMBERS)


def slow_scales(weight, block, name):
    """The scales of the greatest number of each block of a weight (outputs, inputs), and the step between scales."""
    blocks = np.abs(weight.reshape(weight.shape[0], -1, block).astype(np.float64)).max(axis=2)
    if name == "int4":
        return np.where(blocks, np.maximum(blocks / 7, 2.0**-24), 1 / 127), None
    whole = np.float32(max(blocks.max() / 6 / 448, 2.0**-24) if blocks.max() else 1 / 127)
    # Neither the smallest float8 nor the smallest half number may be undercut.
    least = np.float32(max(2.0**-9, 2.0**-24 / whole))
    multiples = [slow_numpy.nearest(max(np.float32(m), least), slow_numpy.E4M3) for m in (blocks / 6 / whole).ravel()]
    return np.float32(multiples).reshape(blocks.shape) * whole, whole


@pytest.mark.parametrize("name", BLOCKS)
@given(weight=BLOCKED)
@settings(max_examples=25, deadline=None)
def test_a_weight_in_blocks_is_the_nearest_number_of_its_block(name, weight):
    block = BLOCKS[name]
    plain, whole = slow_scales(weight, block, name)
    for axis in (0, 1):
        stored = in_blocks(weight.T if axis == 0 else weight, axis, block, TYPES[name])
        scales = stored.scales.T if axis == 0 else stored.scales
        assert np.isfinite(scales).all() and (scales > 0).all()
        if whole is not None:
            multiples = stored.parts[0].T if axis == 0 else stored.parts[0]
            np.testing.assert_array_equal(multiples.astype(np.float32) * whole, scales)
        # The range is between 0.7 and 1.5 times the greatest number, and no worse than that number itself.
        step = 2.0**-9 * (whole or 0)  # between the smallest float8 scales
        assert (scales <= 1.75 * plain + step).all() and (scales >= 0.6 * plain - step).all()
        back = stored.dequantized()
        back = back.T if axis == 0 else back
        wide = np.repeat(scales, block, axis=1)
        np.testing.assert_array_equal(back, slow_numpy.each(weight, wide, slow_numpy.GRIDS[name]))
        before = slow_numpy.each(weight, np.repeat(plain.astype(np.float32), block, axis=1), slow_numpy.GRIDS[name])
        errors = [np.square((a - weight).astype(np.float64)).reshape(len(weight), -1, block) for a in (back, before)]
        chosen, greatest = (each.sum(axis=2) for each in errors)
        assert (chosen <= greatest * (1 + 1e-4) + 1e-30).all()
        assert (stored.values.astype(np.float32)[(weight.T if axis == 0 else weight) == 0] == 0).all()


def test_the_greatest_negative_number_of_a_block_may_be_stored_as_8_steps():
    # In sevenths of 8 every number but 0 would be off; in eighths all are exact.
    block = np.float32([-8, *range(-7, 8), *[0.0] * 16])
    stored = in_blocks(block[None], 1, 32, "int4")
    assert stored.scales.tolist() == [[1.0]] and stored.values.astype(int)[0, :16].tolist() == list(range(-8, 8))
    np.testing.assert_array_equal(stored.transposed().dequantized(), block[:, None])
    net = model("g (float[n, 32] x) => (float[n, 1] y) { y = MatMul (x, w) }", w=block[:, None].copy())
    _, quantized = quantized_model(net, np.eye(32, dtype=np.float32), rules=Rules(format="int4"))
    [codes] = [t for t in quantized.graph.initializer if t.name == "w/quantized"]
    assert codes.raw_data[0] == 0x98  # -8 in the low half, -7 in the high one
    np.testing.assert_array_equal(run(quantized, np.eye(32, dtype=np.float32))[0][:, 0], block)


def test_float4_takes_a_range_beyond_the_greatest_number_where_its_numbers_fit_better():
    # 4 and 3 of 6 are exact with a scale of 1; with the greatest number as 6 the others fall between its steps.
    block = np.float32([4.0, 3.0, 2.0, 1.5, 1.0, 0.5] + [3.0] * 10)
    weight = np.stack([block, np.full(16, 4.0 * 448 / 6 * 6, np.float32)])
    stored = in_blocks(weight, 1, 16, "float4e2m1")
    np.testing.assert_array_equal(stored.dequantized()[0], block)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_blocks_of_int4_have_the_size_that_is_asked_for(size):
    net = model("g (float[n, 128] x) => (float[n, 4] y) { y = Gemm <transB = 1> (x, w) }", w=f32(4, 128))
    x = f32(3, 128)
    plan, quantized = quantized_model(net, x, rules=Rules(format="int4", int4_block=size))
    [scales] = [numpy_helper.to_array(t) for t in quantized.graph.initializer if t.name == "w/scale"]
    assert plan.value("w").block == size and scales.shape == (4, 128 // size)
    [weight] = [numpy_helper.to_array(t) for t in net.graph.initializer]
    stored = in_blocks(weight, 1, size, "int4").dequantized()
    np.testing.assert_allclose(run(quantized, x)[0], x @ stored.T, rtol=1e-4, atol=1e-4)
    assert builds(quantized)


@pytest.mark.parametrize("name", BLOCKS)
def test_nibbles_round_trip(name):
    kind = {"int4": ml_dtypes.int4, "nvfp4": ml_dtypes.float4_e2m1fn}[name]
    values = np.array(slow_numpy.E2M1 if name == "nvfp4" else range(-8, 8), np.float32).astype(kind)
    proto = ir.serde.serialize_tensor(ir.tensor(values, name="t"))
    assert len(proto.raw_data) == values.size // 2
    np.testing.assert_array_equal(numpy_helper.to_array(proto).astype(np.float32), values.astype(np.float32))
    assert proto.raw_data[0] & 0xF == (8 if name == "int4" else 0)


PRODUCTS = model(
    """g (float[n, 64] x) => (float[n, 3] y) {
  h = MatMul (x, w1)
  r = Relu (h)
  y = Gemm <transB = 1> (r, w2, b)
}""",
    w1=f32(64, 32), w2=f32(3, 32), b=f32(3),
)  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_in_blocks_and_float_activations(name):
    x = f32(5, 64)
    plan, quantized = quantized_model(PRODUCTS, x, rules=Rules(format=name))
    assert [(v.name, v.role, v.axis, v.block) for v in plan.values] == [
        ("w1", "weight", 0, BLOCKS[name]), ("w2", "weight", 1, BLOCKS[name]),
    ]  # fmt: skip
    assert not any(n.op_type == "QuantizeLinear" for n in quantized.graph.node)
    artifact = as_ir(quantized)
    light = own_qdq.emulate(as_ir(artifact))
    assert (light is artifact) == (name == "int4")
    names = ["w1/dequantized", "w2/dequantized"]
    weights = {t.name: numpy_helper.to_array(t) for t in proto(light).graph.initializer}
    if name == "int4":
        weights = OnnxRuntime().open(quantized.SerializeToString(), names).run({"x": x})
    w1, w2 = stored(PRODUCTS)["w1"], stored(PRODUCTS)["w2"]
    np.testing.assert_array_equal(weights[names[0]].T, in_blocks(w1, 0, BLOCKS[name], TYPES[name]).dequantized().T)
    np.testing.assert_array_equal(weights[names[1]], in_blocks(w2, 1, BLOCKS[name], TYPES[name]).dequantized())
    [got], [exact] = run(proto(light), x), run(PRODUCTS, x)
    # Two products with 4 bits each; how much they lose depends on the numbers drawn.
    assert np.linalg.norm(got - exact) < 0.4 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_that_brings_weights_in_blocks_keeps_them(name):
    x = f32(5, 64)
    _, quantized = quantized_model(PRODUCTS, x, rules=Rules(format=name))
    converted = convert.with_own_qdq(as_ir(quantized), Rules())
    plan = converted.plan
    assert [(v.name, v.axis, v.block, v.readers, targets.OF_TYPE[v.dtype]) for v in plan.values] == [
        ("w1/dequantized", 0, BLOCKS[name], (("h", 1),), name), ("w2/dequantized", 1, BLOCKS[name], (("y", 1),), name),
    ]  # fmt: skip
    assert not plan.kept and not own_qdq.present(converted.reference)
    assert qdq.weight_sqnr(as_ir(converted.reference), plan, {}) == {}
    [got], [exact] = run(proto(converted.measured), x), run(proto(converted.reference), x)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_what_has_no_blocks_stays_float(name):
    net = model(
        """g (float[n, 24] x, float[n, 2, 4, 4] i) => (float[n, 8] y, float[n, 2, 4, 4] c) {
          y = MatMul (x, w) c = Conv (i, v) }""",
        w=f32(24, 8), v=f32(2, 2, 1, 1),
    )  # fmt: skip
    placed = place(as_ir(net), Rules(format=name))
    assert placed.wanted == ()
    assert {k.name: k.reason for k in placed.kept} == {
        "y": f"it sums 24 products, no multiple of the {BLOCKS[name]} of a block",
        "c": f"tensorrt takes Conv in int8 and fp8, not in {name}",
    }


def test_with_weights_in_blocks_only_layers_with_a_weight_are_listed():
    text = "g (float[n, 64] x) => (float[n, 32] y) { a = Sigmoid (x) h = MatMul (a, w) r = Relu (h) y = Add (r, r) }"
    net = as_ir(model(text, w=f32(64, 32)))
    # All computation is float there anyway; in int8 the operators without a rule are named.
    assert place(net, Rules(format="int4")).kept == ()
    assert [k.name for k in place(net, Rules(format="int8")).kept] == ["a", "y"]


def test_a_table_that_is_looked_up_too_keeps_its_float_numbers():
    text = (
        """g (int64[n] i, float[n, 64] x) => (float[n, 32] e, float[n, 32] y) { e = Gather (w, i) y = MatMul (x, w) }"""
    )
    placed = place(as_ir(model(text, w=f32(64, 32))), Rules(format="int4"))
    assert [w.readers for w in placed.wanted] == [(("y", 1),)]
    assert [k.name for k in placed.kept] == ["e"]


@pytest.mark.parametrize("name", BLOCKS)
def test_tensorrt_builds_blocks(name):
    _, quantized = quantized_model(PRODUCTS, f32(5, 64), rules=Rules(format=name))
    assert builds(quantized)


def slow_dynamic(x, whole, block=16):
    """What TensorRT's dynamic quantisation makes of an array in blocks along its last axis, one number at a time."""
    out = np.zeros(x.shape, np.float32)
    flat, result = x.reshape(-1, block), out.reshape(-1, block)
    for row, target in zip(flat, result, strict=True):
        multiple = slow_numpy.nearest(np.float32(np.abs(row).max()) / np.float32(6) / whole, slow_numpy.E4M3)
        scale = np.float32(multiple) * whole
        for i, number in enumerate(row):
            target[i] = 0.0 if scale == 0 else slow_numpy.round_trip(number, scale, slow_numpy.E2M1)
    return out


@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_activations_in_float4_are_quantised_while_running(leading):
    dims = ", ".join(["n", "m"][: len(leading)])
    text = f"""g (float[{dims}, 64] x) => (float[{dims}, 8] y, float[{dims}, 64] z) {{
      r = Relu (x) y = MatMul (r, w) z = Neg (r) }}"""
    x = f32(*leading, 64, scale=5.0)
    x[..., 16:32] *= 1e-5
    x[0, ..., 32:48] = 0
    net = model(text, w=f32(64, 8))
    plan, quantized = quantized_model(net, x, rules=Rules(format="nvfp4", dynamic=True))
    item = plan.value("r")
    assert (item.dtype, item.block, item.axis) == ("float4e2m1", 16, len(leading)) and item.readers == (("y", 0),)
    r = np.maximum(x, 0)
    np.testing.assert_allclose(item.scales, r.max() / 6 / 448, rtol=1e-6)
    [node] = [n for n in quantized.graph.node if n.op_type == "TRT_FP4DynamicQuantize"]
    assert node.domain == "trt" and {e.domain for e in quantized.opset_import} == {"", "trt"}
    light = own_qdq.emulate(as_ir(quantized))
    assert light.opset_imports.keys() == {""}
    values = OnnxRuntime().open(light, ["r", "r/dequantized"]).run({"x": x})
    expected = slow_dynamic(r, np.float32(item.scales[0]))
    np.testing.assert_array_equal(values["r/dequantized"], expected)
    weight = in_blocks(stored(net)["w"], 0, 16, "float4e2m1").dequantized()
    np.testing.assert_allclose(values["y"], expected @ weight, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(values["z"], -r)
    assert not own_qdq.present(own_qdq.without(as_ir(quantized)))
    np.testing.assert_allclose(run(proto(own_qdq.without(as_ir(quantized))), x)[0], r @ weight, rtol=1e-4, atol=1e-4)
    assert builds(quantized)


def test_a_value_of_more_axes_stays_float_in_front_of_a_weight_in_float4():
    net = model("g (float[n, 2, 3, 32] x) => (float[n, 2, 3, 8] y) { y = MatMul (x, w) }", w=f32(32, 8))
    placed = place(as_ir(net), Rules(format="nvfp4", dynamic=True))
    assert [(w.name, w.role) for w in placed.wanted] == [("w", "weight")]


def test_a_concat_before_blocks_that_are_quantised_while_running_stays_float():
    net = model(
        "g (float[2, 64] x, float[2, 64] z) => (float[2, 8] y) { c = Concat <axis = 1> (x, z) y = MatMul (c, w) }",
        w=f32(128, 8),
    )
    placed = place(as_ir(net), Rules(format="nvfp4", dynamic=True))
    assert [(item.name, item.block) for item in placed.wanted] == [("c", 16), ("w", 16)]
    assert reasons(placed)["c"] == "its output is not quantised"
