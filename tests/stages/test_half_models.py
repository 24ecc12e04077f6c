"""Half precision beside If and Loop, and beside fp8 Q/DQ that a model brings."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.export.signature import Value
from layerline.graph.quantization import convert
from layerline.stages.quantize import Quantize
from tests.forms import as_ir
from tests.stages.test_quantize import model, work  # noqa: F401 - a fixture

X = np.float32([[1.0, 300.0, 2.0, 3.0]])


def branching(dtype):
    """A product of halves in the main graph that overflows, beside an If whose branches add 1 in the given type."""
    tensor = helper.make_tensor("one", dtype, [1], [1.0])
    nodes = [helper.make_node("Constant", [], ["c"], value=tensor)]
    source = "x"
    if dtype == TensorProto.FLOAT16:
        nodes.append(helper.make_node("Cast", ["x"], ["xh"], to=dtype))
        source = "xh"
    nodes += [
        helper.make_node("Add", [source, "c"], ["s"]),
        helper.make_node("Cast", ["s"], ["branch"], to=TensorProto.FLOAT),
    ]
    body = helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info("branch", TensorProto.FLOAT, None)])
    main = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["half", "half"], ["square"]),
        helper.make_node("Sub", ["square", "square"], ["zero"]),
        helper.make_node("Cast", ["zero"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("If", ["which"], ["z"], name="choose", then_branch=body, else_branch=body),
    ]
    inputs = [
        helper.make_tensor_value_info("x", 1, ["n", 4]),
        helper.make_tensor_value_info("which", TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info(name, 1, ["n", 4]) for name in ("y", "z")]
    graph = helper.make_graph(main, "g", inputs, outputs)
    return as_ir(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def test_half_values_beside_float_branches_are_emulated():
    light = branching(TensorProto.FLOAT)
    assert convert.not_emulated(light) == ""
    assert "square/narrow" in {value.name for node in convert.runnable(light).graph for value in node.outputs}
    y, z = OnnxRuntime().open(convert.runnable(light)).run({"x": X, "which": np.array(True)}).values()
    # 300² is beyond half's range: Inf - Inf. Float kernels would give 0.
    assert np.isnan(y[0, 1]) and y[0, 0] == 0
    np.testing.assert_array_equal(z, X + 1)


def test_half_values_in_branches_are_left_to_the_runtime_and_named():
    light = branching(TensorProto.FLOAT16)
    values = {value.name for node in convert.runnable(light).graph for value in node.outputs}
    assert "square/narrow" not in values
    assert "the body of choose computes in half" in convert.not_emulated(light)


def test_a_model_with_fp8_of_its_own_passes_through_mode_fp16(work):  # noqa: F811
    text = """g (float[n, 4] x) => (float[n, 4] y) {
      q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) h = MatMul (d, w) y = Relu (h)
    }"""
    net = model(text, s=np.float32(0.05), w=np.eye(4, dtype=np.float32))
    net.graph.initializer.append(helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0]))
    onnx.checker.check_model(net)
    source = "X = rng.standard_normal((40, 4)).astype(np.float32)\ndef calib_data():\n    return X\n"
    feeds = [{"x": np.float32([[0.5, 1, -2, 3]])}]
    made = work(source, net, (Value(name="x", dtype="float32", shape=("n", 4)),), feeds)
    report = Quantize(mode="fp16").run(made)
    assert report.passed, report.gates
    assert report.metrics["fp16_nodes"] > 0
    assert any("a default onnxruntime session is not tried" in note for note in report.notes)
