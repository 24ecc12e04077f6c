"""A default onnxruntime session: what fails or differs there is named; declared shapes are put right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.export import declared_shapes
from layerline.graph.io import onnx_files
from layerline.parity import default_session
from tests.forms import as_ir, proto


def _model(nodes: list[Any], takes: dict[str, list[Any]], gives: list[str], **weights: Any) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in takes.items()]
    outputs = [helper.make_empty_tensor_value_info(n) for n in gives]
    for output in outputs:
        output.type.tensor_type.elem_type = TensorProto.FLOAT
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _doubled() -> onnx.ModelProto:
    """Twice as long behind the Concat, which is declared to keep the length t."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Concat", ["a", "a"], ["b"], axis=0),
        helper.make_node("Abs", ["b"], ["c"]),
        helper.make_node("Neg", ["c"], ["y"]),
    ]
    model = _model(nodes, {"x": ["t", 3]}, ["y"])
    for name, size in (("a", "t"), ("b", "t"), ("c", "2*t")):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, 3]))
    return model


def test_declared_shapes_are_put_right_and_right_ones_stay() -> None:
    model = as_ir(_doubled())
    feeds = [{"x": np.ones((n, 3), np.float32)} for n in (2, 5)]
    assert declared_shapes.correct(model, declared_shapes.measured(model, feeds)) == ["b"]
    told = {node.outputs[0].name: str(node.outputs[0].shape[0]) for node in list(model.graph)[:3]}
    assert told == {"a": "t", "b": "b#0", "c": "2*t"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2*t + 1", 11),
        ("(t - 1)//2", 2),
        ("t % 3", 2),
        ("f(t)", None),
        ("__import__('os')", None),
        ("9**9**9**9", None),
    ],
)
def test_sizes_are_worked_out_and_never_run(text: str, size: int | None) -> None:
    assert declared_shapes._evaluate(text, {"t": 5}) == size


def test_a_right_model_is_told_as_such(tmp_path: Path) -> None:
    model = _model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 3]}, ["y"], w=np.eye(3, dtype="f4"))
    path = onnx_files.save(model, tmp_path)
    gates, notes = default_session.check(path, [{"x": np.ones((2, 3), np.float32)}], allowed={})
    assert gates == [] and notes == ["a default onnxruntime session gives the same on all 1 feeds, within 0.0e+00"]


def test_what_fails_in_a_default_session_alone_is_named(tmp_path: Path) -> None:
    """As written it runs: Q/DQ in float32. Fused, the product of a constant in three axes has no kernel."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 127, (2, 4, 5)).astype(np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=2),
        helper.make_node("MatMul", ["xd", "wd"], ["m"], name="product"),
        helper.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"]),
        helper.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"]),
    ]
    model = _model(
        nodes, {"x": ["n", 2, 3, 4]}, ["y"], w=weight, s=np.float32(0.05), z=np.int8(0),
        ws=np.full(5, 0.01, np.float32), wz=np.zeros(5, np.int8),
    )  # fmt: skip
    feed = {"x": rng.standard_normal((1, 2, 3, 4)).astype(np.float32)}
    path = onnx_files.save(model, tmp_path)
    OnnxRuntime().open(path).run(feed)
    (gate,), _ = default_session.check(path, [feed], allowed={})
    assert (
        not gate.passed
        and gate.name == default_session.GATE
        and "product" in gate.seen
        and "x (1, 2, 3, 4)" in gate.seen
    )


def _rewrite(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A runtime that takes one operator for another in a default session."""
    opened = OnnxRuntime.open

    def rewriting(self: OnnxRuntime, model: Any, taps: Any = ()) -> Any:
        whole = proto(onnx_files.read_model(model) if isinstance(model, Path) else model)
        for node in whole.graph.node if self.defaults else ():
            node.op_type = new if node.op_type == old else node.op_type
        return opened(self, whole, taps)

    monkeypatch.setattr(OnnxRuntime, "open", rewriting)


def test_another_result_is_placed_at_the_first_node_that_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No released runtime has a bug to rely on, so one is stood in for."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("Abs", ["a"], ["b"], name="second"),
        helper.make_node("Exp", ["b"], ["y"], name="third"),
    ]
    path = onnx_files.save(_model(nodes, {"x": ["n"]}, ["y"]), tmp_path)
    _rewrite(monkeypatch, "Abs", "Neg")
    (gate,), _ = default_session.check(path, [{"x": np.ones(3, np.float32)}], allowed={})
    assert "Abs second" in gate.seen and "output y is off by relative L2" in gate.seen


def test_index_outputs_are_judged_by_what_they_point_at(tmp_path: Path) -> None:
    model = _model([helper.make_node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)], {"x": ["n", 3]}, ["y"])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    path, feed = onnx_files.save(model, tmp_path), {"x": np.array([[1, 1 - 1e-7, 0]], np.float32)}
    near, far = ({"y": np.array([i])} for i in (1, 2))
    assert default_session.check(path, [feed], allowed={}, expected=[near])[0] == []
    assert len(default_session.check(path, [feed], allowed={}, expected=[far])[0]) == 1


@pytest.mark.parametrize(("elements", "fails"), [(1, False), (50, True)])
def test_few_elements_on_the_other_side_of_a_threshold_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int, fails: bool
) -> None:
    """Floor and Ceil differ where the input is no whole number."""
    path = onnx_files.save(_model([helper.make_node("Floor", ["x"], ["y"])], {"x": ["n"]}, ["y"]), tmp_path)
    _rewrite(monkeypatch, "Floor", "Ceil")
    x = np.ones(300, np.float32)
    x[:elements] = 0.5
    gates, notes = default_session.check(path, [{"x": x}], allowed={})
    assert bool(gates) is fails and any("next to a threshold" in note for note in notes) is not fails


def test_a_model_that_crashes_a_default_session_does_not_end_the_process(tmp_path: Path) -> None:
    """onnxruntime 1.31 ends the process on a float16 MatMul behind a Transpose of its first axis, as in an RNN."""
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["half"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["turned", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    model = _model(nodes, {"x": ["t", "b", 4]}, ["y"], w=np.eye(4, dtype=np.float16))
    onnx.save(model, tmp_path / "model.onnx")
    feed = {"x": np.arange(24, dtype=np.float32).reshape(3, 2, 4)}
    gates, [note] = default_session.check(tmp_path / "model.onnx", [feed], allowed={})
    assert gates == [] and "on all 1 feeds, within 0.0e+00" in note
    if "crashes" in note:
        assert "ORT_ENABLE_EXTENDED" in note


def test_weights_in_8_bits_may_round_the_activations_too(tmp_path: Path) -> None:
    """onnxruntime's kernel for them quantises what the layer reads, which is 0.3 % here: no fault of the model."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    weights = {"q": rng.integers(-127, 128, (32, 6)).astype(np.int8), "s": rng.uniform(0.1, 1, 6).astype(np.float32)}
    model = _model(nodes, {"x": ["n", 32]}, ["y"], **weights)
    onnx.save(model, tmp_path / "model.onnx")
    feeds = [{"x": rng.standard_normal((4, 32)).astype(np.float32)}]
    allowed = default_session.limits(as_ir(model), {}, ["y"])
    assert allowed == {"y": 0.01}
    gates, _ = default_session.check(tmp_path / "model.onnx", feeds, allowed=allowed)
    assert gates == []
    del model.graph.node[0]
    assert default_session.limits(as_ir(model), {}, ["y"]) == {"y": 1e-4}
