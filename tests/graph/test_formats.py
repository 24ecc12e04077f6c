"""fp8 Q/DQ: the runtime computes what a slow reference says, and TensorRT builds it."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.scales import channel_amax, quantize, scale_of
from layerline.graph.quantization import targets
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.stages import quantize as stage
from tests.graph import slow_numpy
from tests.graph.test_qdq import builds, close, f32, model, reasons, residual, stored, wanted
from tests.graph.test_qdq import quantize as quantized_model

TYPES = {"int8": "int8", "fp8": "float8e4m3fn"}
NUMBERS = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-12, -1e-40])
WEIGHTS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=NUMBERS)


def test_the_modes_of_the_stage_are_the_formats():
    assert tuple(targets.FORMATS) == stage.FORMATS


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
    assert "differ" in {k.name: k.reason for k in place(net).kept}["y"]
    assert [w.name for w in place(net, Rules(format="fp8")).wanted] == ["x", "w"]


@pytest.mark.parametrize("half", [False, True])
def test_tensorrt_builds_fp8(half):
    net = residual()
    x = f32(1, 4, 8, 8)
    if half:
        text = "g (float16[n, 4, 5, 5] x) => (float16[n, 6, 3, 3] y) { y = Conv (x, w) }"
        net, x = model(text, w=f32(6, 4, 3, 3).astype(np.float16)), f32(1, 4, 5, 5).astype(np.float16)
    _, quantized = quantized_model(net, x, rules=Rules(format="fp8"))
    assert builds(quantized)
