"""The rules of each target: where its Q/DQ stand, and that its runtime computes in integers there."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.calib.scales import steps_of
from layerline.graph.quantization import integer_bias
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.graph.quantization.targets import TARGETS
from tests.forms import as_ir, proto
from tests.graph.test_qdq import close, f32, model, quantize, residual, stored, wanted

ASYMMETRIC = [name for name, target in TARGETS.items() if target.asymmetric]


@given(
    st.floats(0, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1e6)
)  # fmt: skip
def test_a_zero_point_makes_zero_exact_and_the_range_lies_inside(amax, low, width):
    scale, zero = steps_of(amax, "uint8", low, low + width)
    assert np.isfinite(scale) and scale > 0 and 0 <= zero <= 255
    assert (0 - zero + zero) * scale == 0
    least, most = max(min(low, 0), -amax), min(max(low + width, 0), amax)
    assert -zero * scale <= least + 0.51 * scale and (255 - zero) * scale >= most - 0.51 * scale


def test_tensorrt_and_openvino_quantise_the_skip_input_and_onnxruntime_both_and_the_outputs():
    x = f32(2, 4, 8, 8)
    places = {target: wanted(quantize(residual(), x, rules=Rules(target=target))[0]) for target in TARGETS}
    assert places["openvino"] == places["tensorrt"] == {
        "x": ["a"], "w1": ["a"], "r1": ["c", "s"], "w2": ["c"], "r2": ["p"], "f": ["y"], "wf": ["y"],
    }  # fmt: skip
    assert places["onnxruntime"] == {
        "x": ["a"], "w1": ["a"], "r1": ["c", "s"], "w2": ["c"], "c": ["s"], "r2": ["p"], "p": ["f"], "f": ["y"],
        "wf": ["y"],
    }  # fmt: skip


@pytest.mark.parametrize("target", ASYMMETRIC)
def test_activations_are_uint8_with_a_zero_point_and_weights_int8(target):
    x = f32(2, 4, 8, 8)
    plan, quantized = quantize(residual(), x, rules=Rules(target=target))
    assert {v.dtype for v in plan.values if v.role == "activation"} == {"uint8"}
    assert {(v.dtype, v.zero_point) for v in plan.values if v.role == "weight"} == {("int8", 0)}
    assert plan.value("r1").zero_point == 0
    low, high = float(x.min()), float(x.max())
    scale = (high - low) / 255
    assert plan.value("x").scales == (pytest.approx(scale),)
    assert plan.value("x").zero_point == round(-low / scale)
    close(quantized, residual(), x)


CONCAT = """g (float[n, 2, 4, 4] x) => (float[n, 2, 4, 4] y) {
  a = Conv (x, w1) b = Relu (x) c = Concat <axis = 1> (a, b) y = Conv (c, w2) }"""


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_of_a_concat_share_a_scale_where_the_target_wants_that(target):
    net = model(CONCAT, w1=f32(2, 2, 1, 1), w2=f32(2, 4, 1, 1))
    shared = {w.name: w.shared for w in place(as_ir(net), Rules(target=target)).wanted if w.name in ("a", "b", "c")}
    if target == "onnxruntime":
        assert shared == {"a": (), "b": (), "c": ()}
    else:
        assert shared == {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b")}


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_lacks_stays_float_with_the_reason(target):
    text = """g (float[n, 4, 5, 5] x, float[s, n, 8] t) => (float[n, 3, 7, 7] y, float[s, d, n, 16] h) {
      y = ConvTranspose (x, w) h = LSTM <hidden_size = 16> (t, wl, r) }"""
    net = model(text, w=f32(4, 3, 3, 3), wl=f32(1, 64, 8), r=f32(1, 64, 16))
    placed = place(as_ir(net), Rules(target=target))
    reasons = {k.name: k.reason for k in placed.kept}
    assert reasons["h"].endswith("it sums over time in float, with no Q/DQ inside")
    assert reasons.get("y") == (
        "onnxruntime takes ConvTranspose in float, not in int8" if target == "onnxruntime" else None
    )
    kept = {k.name: k.reason for k in place(as_ir(residual()), Rules(target=target, format="fp8")).kept}
    assert ("a" in kept) == (target != "tensorrt")


def test_onnxruntime_runs_every_layer_in_integers(tmp_path):
    x = f32(2, 4, 8, 8)
    plan, quantized = quantize(residual(), x, rules=Rules(target="onnxruntime"))
    whole = proto(integer_bias.store(as_ir(quantized)))
    steps = np.float32(plan.value("x").scales[0]) * np.float32(plan.value("w1").scales)
    tensors = stored(whole)
    np.testing.assert_array_equal(tensors["a/bias/quantized"], np.rint(stored(residual())["b1"] / steps))
    assert "b1" not in tensors and tensors["a/bias/quantized"].dtype == np.int32
    close(whole, residual(), x)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    session = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": x})[0].shape == (2, 3)
    kernels = [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert kernels.count("QLinearConv") == 2
    assert {"QLinearAdd", "QLinearGlobalAveragePool", "QGemm"} <= set(kernels)
