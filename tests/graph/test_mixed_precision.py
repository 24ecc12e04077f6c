"""Half precision where it is safe: the numbers agree with float32, and what half cannot hold is not put into half."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.io import onnx_files
from layerline.graph.quantization.mixed_precision import emulate, float_values, to_half
from layerline.pipeline.errors import ConfigError
from tests.forms import as_ir, proto

RNG = np.random.default_rng(0)
LOWEST = float(np.finfo(np.float32).min)
MODES = ("fp16", "bf16")
TYPE = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
STEP = {"fp16": 2.0**-10, "bf16": 2.0**-7}


@pytest.fixture(autouse=True)
def _each_test_draws_the_same_numbers(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def f32(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def model(text, opset=20, **weights):
    """A model from onnx's text form; those of the weights that it mentions become initializers."""
    out = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    read = {name for node in out.graph.node for name in node.input}
    out.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items() if k in read)
    return out


def run(model, *arrays):
    session = OnnxRuntime().open(model)
    found = session.run(dict(zip(session.inputs, arrays, strict=True)))
    return [found[o] for o in session.outputs]


def half(model, mode="fp16", *arrays, **options):
    """The converted model and its outputs, emulated and, in fp16, as onnxruntime runs it."""
    converted = to_half(as_ir(model), mode, **options)
    converted = replace(converted, model=proto(converted.model))
    onnx.checker.check_model(proto(converted.model), full_check=True)
    outputs = run(emulate(as_ir(converted.model)), *arrays)
    if mode == "fp16":
        for emulated, actual, expected in zip(outputs, run(converted.model, *arrays), run(model, *arrays), strict=True):
            room = 0.02 * np.abs(expected[np.isfinite(expected)]).max(initial=1e-3) if expected.size else 0
            np.testing.assert_allclose(actual, emulated, atol=room)
    return converted, outputs


def made(model):
    """Element type of every value."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    return {v.name: v.type.tensor_type.elem_type for v in values}


def reasons(converted):
    return {k.name: k.reason for k in converted.kept}


@pytest.mark.parametrize("mode", MODES)
def test_inputs_outputs_and_names_stay_and_the_inside_is_half(mode):
    net = model(
        """g (float[n, 3, 6, 6] x) => (float[n, 4, 6, 6] y, float[n, 4, 6, 6] r) {
          a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
          r = Relu (a)
          m = Mul (r, r)
          y = Add (m, a)
        }""", w=f32(4, 3, 3, 3), b=f32(4),
    )  # fmt: skip
    x = f32(2, 3, 6, 6)
    converted, outputs = half(net, mode, x)
    types = made(converted.model)
    assert types["x"] == types["y"] == types["r"] == TensorProto.FLOAT
    assert types["a"] == types["m"] == TYPE[mode]
    assert {t.data_type for t in proto(converted.model).graph.initializer} == {TYPE[mode]}
    assert [o.name for o in proto(converted.model).graph.output] == ["y", "r"]
    for got, want in zip(outputs, run(net, x), strict=True):
        np.testing.assert_allclose(got, want, atol=20 * STEP[mode] * np.abs(want).max())
    assert converted.nodes == 4 and converted.kept == ()


# T23: masks


def attention(mask):
    """softmax(s + m) v, with the mask written as `mask`."""
    return f"""g (float[b, 4, 4] s, float[b, 4, 4] k) => (float[b, 4, 4] p, float[b, 4, 2] y) {{
      {mask}
      masked = Add (s, m)
      flat = Reshape (masked, rows)
      p = Softmax <axis = -1> (flat)
      y = MatMul (p, v)
    }}"""


MASKS = {
    "given": "m = Identity (k)",
    "computed": "o = Sub (one, k)\n m = Mul (o, low)",
    "chosen": "c = Cast <to = 9> (k)\n m = Where (c, zero, low)",
    "reshaped": "o = Sub (one, k)\n f = Mul (o, low)\n u = Unsqueeze (f, axis)\n m = Squeeze (u, axis)",
}


@pytest.mark.parametrize("low", [LOWEST, -1e9, -1e5, -65504.0, -1e4])
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_t23_a_masked_row_stays_finite_and_equal(low, form, mode):
    keep = np.ones((1, 4, 4), np.float32)
    keep[0, 0] = 0
    keep[0, 1, 1:] = 0
    weights = {
        "v": f32(4, 2),
        "one": np.float32(1),
        "zero": np.float32(0),
        "low": np.float32(low),
        "axis": np.int64([0]),
    }
    net = model(attention(MASKS[form]), rows=np.int64([-1, 4, 4]), **weights)
    s = f32(1, 4, 4, scale=5)
    s[0, 0, 0] = -100
    k = (1 - keep) * np.float32(low) if form == "given" else keep
    _, (p, y) = half(net, mode, s, k)
    want_p, want_y = run(net, s, k)
    assert np.isfinite(p).all() and np.isfinite(y).all()
    np.testing.assert_allclose(p, want_p, atol=30 * STEP[mode])
    np.testing.assert_allclose(y, want_y, atol=60 * STEP[mode])
    if low == LOWEST:
        assert p[0, 0] == pytest.approx([0.25] * 4)


def test_t23_infinite_masks_are_what_they_were():
    text = attention("c = Cast <to = 9> (k)\n m = Where (c, zero, low)")
    net = model(text, v=f32(4, 2), zero=np.float32(0), low=np.float32(-np.inf), rows=np.int64([-1, 4, 4]))
    s, k = f32(1, 4, 4), np.tril(np.ones((1, 4, 4), np.float32))
    _, (p, _) = half(net, "fp16", s, k)
    np.testing.assert_allclose(p, run(net, s, k)[0], atol=4e-3)


# T24: epsilons that vanish


NORMS = {
    "layer norm": """m = ReduceMean <keepdims = 1> (h, axes)
        d = Sub (h, m)
        q = Mul (d, d)
        v = ReduceMean <keepdims = 1> (q, axes)
        e = Add (v, eps)
        r = Sqrt (e)
        n = Div (d, r)""",
    "eps outside": """m = ReduceMean <keepdims = 1> (h, axes)
        d = Sub (h, m)
        q = Pow (d, two)
        v = ReduceMean <keepdims = 1> (q, axes)
        r = Sqrt (v)
        e = Add (r, eps)
        n = Div (d, e)""",
    "rms": """q = Pow (h, two)
        v = ReduceMean <keepdims = 1> (q, axes)
        e = Add (v, eps)
        r = Sqrt (e)
        i = Reciprocal (r)
        n = Mul (h, i)""",
    "unit length": """l = ReduceL2 <keepdims = 1> (h, axes)
        c = Max (l, eps)
        s = Shape (h)
        x2 = Expand (c, s)
        n = Div (h, x2)""",
    "fused": "n = LayerNormalization <epsilon = 1e-12> (h, gain)",
    "instance": "n = InstanceNormalization <epsilon = 1e-12> (h, ones, zeros)",
}


@pytest.mark.parametrize("eps", [1e-12, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("mode", MODES)
def test_t24_a_constant_row_is_normalised_to_what_float32_says(eps, form, mode):
    text = f"g (float[1, 2, 4] x) => (float[1, 2, 4] y) {{ h = Relu (x) {NORMS[form]} y = MatMul (n, w) }}"
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    weights = {"axes": np.int64([-1]), "eps": np.float32(eps), "two": np.float32(2), "ones": ones, "zeros": zeros,
               "gain": np.ones(4, np.float32), "w": np.eye(4, dtype=np.float32)}  # fmt: skip
    net = model(text, **weights)
    x = np.float32([[[3, 3, 3, 3], [1, 2, 3, 4]]])
    if form in ("rms", "unit length"):
        x[:, 0] = 0
    _, [y] = half(net, mode, x)
    np.testing.assert_allclose(y, run(net, x)[0], atol=8 * STEP[mode])


def test_t24_the_kept_norm_is_told_with_its_reason():
    net = model(f"g (float[n, 4] x) => (float[n, 4] n) {{ h = Relu (x) {NORMS['eps outside']} }}",
                axes=np.int64([-1]), eps=np.float32(1e-12), two=np.float32(2))  # fmt: skip
    told = reasons(to_half(as_ir(net), "fp16"))
    assert told["e"] == "constant eps is 1e-12, which float16 does not resolve"
    assert told["v"] == "ReduceMean needs float32's range or precision"
    assert told["n"].startswith("it works on") and "h" not in told
    assert "e" in reasons(to_half(as_ir(net), "bf16"))


# T25: inputs that must stay float32 or int64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opset", [11, 13, 20])
@pytest.mark.parametrize("form", ["scales", "sizes", "roi"])
def test_t25_resize_keeps_its_scales_roi_and_sizes(mode, opset, form):
    call = {"scales": "Resize (c, , s)", "sizes": "Resize (c, , , z)",
            "roi": 'Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (c, roi, s)'}[form]  # fmt: skip
    if opset < 13:
        # The optional inputs of opset 11 are empty tensors.
        call = call.replace("(c, , s)", "(c, none, s)").replace("(c, , , z)", "(c, none, none, z)")
    text = f"g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y) {{ c = Conv (x, w)\n r = {call}\n y = Conv (r, w) }}"
    weights = {"s": np.float32([1, 1, 2, 2]), "z": np.int64([1, 2, 8, 8]), "none": np.zeros(0, np.float32),
               "roi": np.float32([0, 0, 0, 0, 1, 1, 1, 1]), "w": f32(2, 2, 1, 1)}  # fmt: skip
    net = model(text, opset, **weights)
    x = f32(1, 2, 4, 4)
    converted, [y] = half(net, mode, x)
    stored = {t.name: t for t in proto(converted.model).graph.initializer}
    for name, wanted in (
        ("s", TensorProto.FLOAT),
        ("roi", TensorProto.FLOAT),
        ("z", TensorProto.INT64),
        ("w", TYPE[mode]),
    ):
        assert name not in stored or stored[name].data_type == wanted
    resize = next(n for n in proto(converted.model).graph.node if n.op_type == "Resize")
    assert [bool(i) for i in resize.input] == [bool(i) for i in net.graph.node[1].input]
    np.testing.assert_allclose(y, run(net, x)[0], atol=0.02 if mode == "fp16" else 0.1)


@pytest.mark.parametrize("mode", MODES)
def test_t25_integers_ranges_and_choices_are_untouched(mode):
    net = model(
        """g (float[2, 6] x, int64 stop) =>
              (float[2, 3] top, int64[2, 3] at, float[m] r, float[2, 6] w, int64[2] best) {
          h = Mul (x, k)
          top, at = TopK (h, three)
          i = Range (start, stop, one)
          f = Cast <to = 1> (i)
          r = Mul (f, tenth)
          c = Greater (h, zero)
          w = Where (c, h, zero)
          best = ArgMax <axis = 1, keepdims = 0> (h)
        }""",
        k=np.float32(2), zero=np.float32(0), tenth=np.float32(0.125), three=np.int64([3]), start=np.int64(0),
        one=np.int64(1),
    )  # fmt: skip
    x = (RNG.permutation(12).reshape(2, 6) / 8 - 0.7).astype(np.float32)
    converted, got = half(net, mode, x, np.array(4000))
    want = run(net, x, np.array(4000))
    assert [g.dtype for g in got] == [w.dtype for w in want]
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(g, w, rtol=4 * STEP[mode], atol=1e-6, err_msg=str(index))
    integers = {t.name for t in proto(converted.model).graph.initializer if t.data_type == TensorProto.INT64}
    assert integers == {"three", "start", "one"}


# T26: optional bounds


@pytest.mark.parametrize(("call", "expected"), [
    ("Clip (h, low)", [0, 0.5, 1]), ("Clip (h, , high)", [-1, 0.25, 0.25]), ("Clip (h)", [-1, 0.5, 1]),
    ("Clip (h, low, high)", [0, 0.25, 0.25]),
])  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_t26_a_missing_bound_stays_missing(call, expected, mode):
    text = f"g (float[n] x) => (float[n] y) {{ h = Mul (x, one)\n y = {call} }}"
    weights = {"one": np.float32(1), "low": np.float32(0), "high": np.float32(0.25)}
    net = model(text, **weights)
    converted, [y] = half(net, mode, np.float32([-1, 0.5, 1]))
    assert y.tolist() == expected
    clip = next(n for n in proto(converted.model).graph.node if n.op_type == "Clip")
    assert [bool(i) for i in clip.input] == [bool(i) for i in net.graph.node[1].input]


# Ranges


def test_values_that_left_the_range_of_half_in_calibration_stay_float32_with_all_that_touch_them():
    text = (
        "g (float[n, 2] x) => (float[n, 2] y) { a = MatMul (x, w)\n b = Mul (a, a)\n c = MatMul (b, v)\n y = Relu (c) }"
    )
    eye = np.eye(2, dtype=np.float32)
    net = model(text, w=eye * 400, v=eye / 1000)
    x = np.float32([[1, 2], [-1, 0.5]])
    amax = {"x": 2.0, "a": 800.0, "b": 640_000.0, "c": 640.0, "y": 640.0}
    converted, [y] = half(net, "fp16", x, amax=amax)
    types = made(converted.model)
    assert (types["a"], types["b"]) == (TensorProto.FLOAT16, TensorProto.FLOAT)
    assert set(reasons(converted)) == {"b", "c"}
    assert reasons(converted)["b"] == "b reached 6.4e+05; float16 ends at 6.55e+04"
    np.testing.assert_allclose(y, run(net, x)[0], rtol=2e-3)
    assert reasons(to_half(as_ir(net), "bf16", amax=amax)) == {}


def test_values_too_small_for_half_stay_float32_too():
    net = model(
        "g (float[n, 2] x) => (float[n, 2] y) { a = Mul (x, tiny)\n y = Mul (a, large) }",
        tiny=np.float32(1e-3),
        large=np.float32(1e3),
    )
    x = np.float32([[1e-3, -2e-3]])
    converted, [y] = half(net, "fp16", x, amax={"x": 2e-3, "a": 2e-6, "y": 2e-3})
    assert made(converted.model)["a"] == TensorProto.FLOAT
    np.testing.assert_allclose(y, x, rtol=2e-3)


@pytest.mark.parametrize("size", [1e5, 3e38, 1e-6, 1e-12])
def test_constants_that_half_cannot_hold_are_read_in_float32(size):
    net = model(
        "g (float[n, 2] x) => (float[n, 2] y) { a = Relu (x)\n y = MatMul (a, w) }",
        w=np.float32([[size, -size], [0, size / 2]]),
    )
    x = np.float32([[1, 2]])
    converted, [y] = half(net, "fp16", x)
    assert {t.data_type for t in proto(converted.model).graph.initializer} == {TensorProto.FLOAT}
    np.testing.assert_allclose(y, run(net, x)[0], rtol=2e-3)
    assert "constant w" in reasons(converted)["y"]


def test_the_angle_of_a_sine_is_computed_in_float32():
    net = model(
        """g (float[n, 1] x, int64[k] i) => (float[n, 4] y) {
          p = Cast <to = 1> (i)
          u = Unsqueeze (p, axes)
          a = Mul (u, f)
          c = Cos (a)
          h = Relu (x)
          y = Mul (h, c)
        }""", axes=np.int64([1]), f=np.float32([[1, 0.1, 0.01, 0.001]]),
    )  # fmt: skip
    x, i = np.ones((3, 1), np.float32), np.array([17, 2049, 99_991])
    converted, [y] = half(net, "fp16", x, i)
    np.testing.assert_allclose(y, run(net, x, i)[0], atol=2e-3)
    assert reasons(converted)["a"] == "its result is the angle of c"


@pytest.mark.parametrize("mode", MODES)
def test_positions_that_become_an_index_are_computed_in_float32(mode):
    """The buckets of T5: log(d / 8) / log(16) * 8 is 2 at a distance of 16, and 1.99 in half."""
    bucket = """
        d = Cast <to = 1> (n)  q = Div(d, eight)  l = Log(q)  r = Div(l, base)  b = Mul(r, eight)
        i = Cast <to = 7> (b)  row = Gather(table, i)"""
    given = model(
        f"agraph (int64[n] n, float[n] x) => (float[n] y) {{ {bucket} y = Mul(row, x) }}",
        eight=np.float32(8),
        base=np.float32(np.log(16)),
        table=np.arange(9, dtype=np.float32),
    )
    distances = np.array([16, 32, 64, 127], np.int64)
    converted, [output] = half(given, mode, distances, np.ones(4, np.float32))
    np.testing.assert_array_equal(output, [2, 4, 6, 7])
    told = reasons(converted)
    assert "integers" in told["r"] and "integers" in told["b"] and "y" not in told


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_by_length_is_exact_at_any_length(mode):
    """2047.5 and 2050.5 would be equal to 2048 and 2050 in half."""
    given = model(
        """agraph (int64[n] i, int64 length, float[n] x) => (float[n] y) {
        p = Cast <to = 1> (i)  middle = Add(p, shift)  end = Cast <to = 1> (length)
        inside = Less(middle, end)  r = Round(middle)  y = Where(inside, x, shift) }""",
        shift=np.float32(0.5),
    )
    positions = np.array([0, 2047, 2049, 2050], np.int64)
    _, [output] = half(given, mode, positions, np.array(2050, np.int64), np.ones(4, np.float32))
    np.testing.assert_array_equal(output, [1, 1, 1, 0.5])


SEQUENCE = """agraph (float[n,2] x) => (float[n,2] y) {
    none = SequenceEmpty ()
    all, again = Loop (three, yes, none, x) <body: graph = b (int64 i, bool go, s, v) => (bool stay, t, w) {
        stay = Identity(go) t = SequenceInsert(s, v) w = Mul(v, two) }>
    joined = ConcatFromSequence <axis = 1> (all)  y = MatMul(joined, ones) }"""


def test_a_sequence_that_a_loop_fills_is_no_tensor():
    """Its declared type in the body would be that of its tensors, and the runtime refuses that."""
    given = model(SEQUENCE, three=np.int64(3), two=np.float32(2), ones=np.ones((6, 2), np.float32), yes=np.bool_(True))
    given.graph.initializer.append(numpy_helper.from_array(np.float32(2), "two"))
    assert "all" not in float_values(as_ir(given)) and "joined" in float_values(as_ir(given))
    # x, 2x and 4x in a row, whose columns are summed.
    _, [output] = half(given, "fp16", np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(output, [[14, 14]])


def test_half_inputs_are_emulated_too():
    given = model(
        "agraph (float16[n] x, float[n] z) => (float16[n] y, float[n] w) { y = Mul(x, two)  w = Add(z, z) }",
        two=np.float16(2),
    )
    _, [y, w] = half(given, "fp16", np.array([1.5, 40000], np.float16), np.ones(2, np.float32))
    np.testing.assert_array_equal(y, [3, np.inf])
    np.testing.assert_array_equal(w, [2, 2])


def test_positions_of_a_sampler_are_computed_in_float32():
    given = model(
        "agraph (float[1,1,1,1024] x, float[1,1,1,2] p) => (float[1,1,1,1] y) "
        '{ a = Mul(p, third)  g = Sub(a, third)  y = GridSample <mode = "nearest", align_corners = 1> (x, g) }',
        third=np.float32(1 / 3),
    )
    image = np.arange(1024, dtype=np.float32).reshape(1, 1, 1, 1024)
    # (3.7 - 1) / 3 = 0.9: the pixel 0.95 * 1023 = 971.85; half has steps of 0.25 pixels there.
    converted, [output] = half(given, "fp16", image, np.array([3.7, 1], np.float32).reshape(1, 1, 1, 2))
    assert output.item() == 972
    assert {"a", "g", "y"} <= set(reasons(converted))


@pytest.mark.parametrize(
    ("scale", "zero_point", "want"), [(1000, 0, 100_000), (500, -100, 100_000), (-1000, 0, -100_000)]
)
def test_weights_behind_q_dq_that_half_cannot_hold_are_read_in_float32(scale, zero_point, want):
    given = model(
        "agraph (float[n,1] x) => (float[n,2] y) { w = DequantizeLinear <axis = 1> (q, s, z)  y = MatMul(x, w) }",
        q=np.array([[100, 100]], np.int8),
        s=np.array([1.0, scale], np.float32),
        z=np.array([0, zero_point], np.int8),
    )
    converted, [output] = half(given, "fp16", np.ones((1, 1), np.float32), amax={"x": 1.0})
    np.testing.assert_array_equal(output, [[100, want]])
    assert "1e+05" in reasons(converted)["y"]


def test_no_cast_stands_between_q_dq_and_a_layer_that_stays_float32():
    """TensorRT computes with integers only where the layer reads DequantizeLinear itself."""
    given = model(
        "agraph (float[n,1] x) => (float[n,2] y) { h = QuantizeLinear (x, t)  d = DequantizeLinear (h, t) "
        "w = DequantizeLinear <axis = 1> (q, s)  y = MatMul(d, w) }",
        q=np.array([[100, 100]], np.int8),
        s=np.array([1.0, 1000.0], np.float32),
        t=np.float32(0.1),
    )
    converted, [output] = half(given, "fp16", np.full((1, 1), 0.2, np.float32), amax={"x": 1.0})
    assert [node.op_type for node in converted.model.graph.node].count("Cast") == 0
    np.testing.assert_allclose(output, [[20, 20_000]], rtol=1e-6)


def test_a_scatter_that_adds_sums_in_float32():
    given = model(
        "agraph (float[n] x, int64[n] i) => (float[1] y, float[4] z) "
        '{ y = ScatterElements <reduction = "add"> (zero, i, x)  z = ScatterElements (zeros, i, x) }',
        zero=np.zeros(1, np.float32),
        zeros=np.zeros(4, np.float32),
    )
    # In half 2048 + 1 is 2048.
    x = np.array([2048, 1, 1, 1], np.float32)
    converted, [y, _] = half(given, "fp16", x, np.zeros(4, np.int64))
    np.testing.assert_array_equal(y, [2051])
    assert "y" in reasons(converted) and "z" not in reasons(converted)


@pytest.mark.parametrize("pattern", ["m", "layer1.fc", "layer1", "w"])
def test_skip_keeps_values_weights_and_modules_in_float32(pattern):
    net = model("g (float[n, 2] x) => (float[n, 2] y) { h = Relu (x)\n m = MatMul (h, w)\n y = Relu (m) }", w=f32(2, 2))
    net.graph.node[1].metadata_props.add(key="layerline.module", value="layer1.fc")
    assert reasons(to_half(as_ir(net), "fp16", skip=[pattern]))["m"] == "skip"


def test_a_skip_that_means_nothing_is_refused():
    net = model("g (float[n, 2] x) => (float[n, 2] y) { y = MatMul (x, w) }", w=f32(2, 2))
    net.graph.node[0].metadata_props.add(key="layerline.module", value="layer8")
    with pytest.raises(ConfigError, match=r"quantize\.skip: 'layer9' matches no value, node or module") as caught:
        to_half(as_ir(net), "fp16", skip=["layer9"])
    assert "'layer8'" in caught.value.hint


@pytest.mark.parametrize("condition", [True, False])
def test_control_flow_is_kept_and_its_bodies_read_float32(condition):
    net = model(
        """g (bool c, float[n, 2] x) => (float[n, 2] y) {
          h = MatMul (x, w)
          z = If (c) <
            then_branch = t () => (float[n, 2] a) { a = Add (h, w) },
            else_branch = f () => (float[n, 2] b) { b = Mul (h, h) }
          >
          y = MatMul (z, w)
        }""", w=f32(2, 2),
    )  # fmt: skip
    for graph in (a.g for a in net.graph.node[1].attribute):
        assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    x = f32(2, 2)
    _, [y] = half(net, "fp16", np.array(condition), x)
    np.testing.assert_allclose(y, run(net, np.array(condition), x)[0], atol=2e-2)


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_names_that_a_body_has_are_taken(mode, condition):
    """What the conversion adds is called x/float32, w/float16, h/exact and so on: here branches have these already."""
    net = model(
        """g (bool c, float[n, 2] x) => (float[n, 2] y) {
          h = MatMul (x, w)
          z = If (c) <
            then_branch = t () => (float[n, 2] a) {
              "h/float32" = Add (h, w)
              "x/float16" = Abs ("h/float32")
              "x/bfloat16" = Abs ("x/float16")
              "h/exact" = Neg ("x/bfloat16")
              "y/narrow" = Abs ("h/exact")
              a = Identity ("y/narrow")
            },
            else_branch = f () => (float[n, 2] b) {
              "y/exact" = Mul (h, h)
              "y/float16" = Abs ("y/exact")
              b = Identity ("y/float16")
            }
          >
          y = MatMul (z, w)
        }""", w=f32(2, 2),
    )  # fmt: skip
    x = f32(2, 2)
    converted, [y] = half(net, mode, np.array(condition), x)
    np.testing.assert_allclose(y, run(net, np.array(condition), x)[0], atol=20 * STEP[mode])
    names = [o for graph in onnx_files.graphs(converted.model) for node in graph.node for o in node.output]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mode", MODES)
def test_constant_nodes_and_shared_constants_are_converted_for_those_who_want_half(mode):
    net = model(
        """g (float[n, 2] x) => (float[n, 2] y, float[n, 2] z) {
          h = Relu (x)
          a = Mul (h, k)
          y = Add (a, w)
          q = Add (h, w)
          z = Softmax (q)
        }""", w=f32(2),
    )  # fmt: skip
    net.graph.node.insert(0, helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float32(3))))
    x = f32(2, 2)
    converted, got = half(net, mode, x)
    assert not [n for n in proto(converted.model).graph.node if n.op_type == "Constant"]
    for g, w in zip(got, run(net, x), strict=True):
        np.testing.assert_allclose(g, w, atol=10 * STEP[mode])


def test_t18_qdq_models_get_half_scales_that_are_not_zero():
    from tests.graph.test_qdq import quantize

    w = f32(3, 2, 1, 1)
    w[1] = 1e-12
    net = model("g (float[n, 2, 4, 4] x) => (float[n, 3, 4, 4] y) { c = Conv (x, w)\n y = Relu (c) }", w=w)
    x = f32(1, 2, 4, 4)
    _, quantized = quantize(net, x)
    converted, [y] = half(quantized, "fp16", x)
    scales = {
        t.name: numpy_helper.to_array(t) for t in proto(converted.model).graph.initializer if t.name.endswith("/scale")
    }
    assert {s.dtype for s in scales.values()} == {np.dtype(np.float16)} and all((s > 0).all() for s in scales.values())
    np.testing.assert_allclose(y, run(net, x)[0], atol=0.05)
    assert converted.model.opset_import[0].version >= 19


def test_emulation_rounds_every_half_value():
    net = model("g (float[n] x) => (float[n] y) { a = Mul (x, k)\n y = Add (a, k) }", k=np.float32(1 / 3))
    x = np.float32([1.0001, 1000.3])
    third, single = np.float16(1 / 3), np.float32
    a = (np.float16(x).astype(single) * single(third)).astype(np.float16)
    want = (a.astype(single) + single(third)).astype(np.float16).astype(single)
    assert run(emulate(to_half(as_ir(net), "fp16").model), x)[0].tolist() == want.tolist()


def test_float_values_are_those_computed_or_fed():
    net = model(
        "g (float[n, 2] x, int64[k] i) => (float[n, 2] y) { a = MatMul (x, w)\n s = Shape (a)\n y = Relu (a) }",
        w=f32(2, 2),
    )
    assert float_values(as_ir(net)) == ["x", "a", "y"]


@pytest.mark.parametrize("mode", MODES)
def test_tensorrt_builds_int8_with_the_rest_in_half(mode):
    from tests.graph.test_qdq import builds, quantize, residual

    _, quantized = quantize(residual(), f32(1, 4, 8, 8))
    assert builds(proto(to_half(as_ir(quantized), mode).model))


@pytest.mark.parametrize("mode", MODES)
def test_tensorrt_builds_half_models_with_a_norm_and_a_softmax(mode):
    from tests.graph.test_qdq import builds

    body = f"h = MatMul (x, w) {NORMS['layer norm']} p = Softmax (n)\n y = MatMul (p, w)"
    text = f"g (float[n, 4] x) => (float[n, 4] y) {{ {body} }}"
    net = model(text, w=f32(4, 4), axes=np.int64([-1]), eps=np.float32(1e-12))
    assert builds(proto(to_half(as_ir(net), mode).model))
