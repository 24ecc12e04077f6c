"""Q/DQ that a model brings: the float model without them, and the plan that they carry out."""

import numpy as np
from onnx import numpy_helper, parser

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.quantization import own_qdq


def _model(text, **constants):
    out = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    out.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in constants.items())
    return as_ir(out)


def _product(light):
    session = OnnxRuntime().open(light)
    return session.run({"x": np.eye(4, dtype=np.float32)})["y"]


def test_a_weight_that_is_stored_in_float_has_its_value_back() -> None:
    weight = np.array([[0.14], [0.26], [-0.31], [1.0]], np.float32)
    model = _model("""m (float[n,4] x) => (float[n,1] y) {
        q = QuantizeLinear(w, s, z)
        d = DequantizeLinear(q, s, z)
        y = MatMul(x, d)
    }""", w=weight, s=np.float32(0.1), z=np.int8(0))  # fmt: skip
    np.testing.assert_allclose(_product(model), [[0.1], [0.3], [-0.3], [1.0]], rtol=1e-6)
    plain = own_qdq.without(model)
    assert not own_qdq.present(plain)
    np.testing.assert_array_equal(_product(plain), weight)


def test_a_weight_that_is_stored_in_integers_stands_for_its_values() -> None:
    model = _model("""m (float[n,4] x) => (float[n,2] y) {
        d = DequantizeLinear<axis=1>(w, s, z)
        y = MatMul(x, d)
    }""", w=np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int8), s=np.array([0.5, 2.0], np.float32),
                   z=np.array([0, 1], np.int8))  # fmt: skip
    plain = own_qdq.without(model)
    assert not own_qdq.present(plain)
    np.testing.assert_array_equal(_product(plain), [[0.5, 2.0], [1.5, 6.0], [2.5, 10.0], [3.5, 14.0]])


def test_a_weight_with_scales_of_blocks_is_read_and_taken_out() -> None:
    model = _model("""m (float[n,4] x) => (float[n,2] y) {
        d = DequantizeLinear<axis=0, block_size=2>(w, s)
        y = MatMul(x, d)
    }""", w=np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int8),
                   s=np.array([[1.0, 0.5], [2.0, 0.25]], np.float32))  # fmt: skip
    expected = [[1.0, 1.0], [3.0, 2.0], [10.0, 1.5], [14.0, 2.0]]
    np.testing.assert_array_equal(_product(model), expected)
    plain = own_qdq.without(model)
    assert not own_qdq.present(plain)
    np.testing.assert_array_equal(_product(plain), expected)
    plan = own_qdq.read(model)
    assert [(value.name, value.role) for value in plan.values] == [("d", "weight")] and not plan.kept
