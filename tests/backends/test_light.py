"""onnxruntime is handed the weights beside the graph, and gives the same."""

from __future__ import annotations

import gc
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from layerline.backends import light, onnxruntime
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.io import onnx_files
from tests.forms import proto


def _model(dtype: str) -> onnx.ModelProto:
    weight = np.random.default_rng(0).integers(-5, 5, (64, 8)).astype(getattr(ml_dtypes, dtype, dtype))
    nodes = [helper.make_node("Cast", ["w"], ["wide"], to=1), helper.make_node("MatMul", ["x", "wide"], ["y"])]
    infos = [helper.make_tensor_value_info(n, 1, ["n", s]) for n, s in (("x", 64), ("y", 8))]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "bfloat16", "int4"])
def test_the_same_numbers(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(dtype), np.random.default_rng(1).random((3, 64), "f")
    whole = OnnxRuntime().open(model.SerializeToString(), ["wide"]).run({"x": x})
    monkeypatch.setattr(light, "LEAST", 1)
    session = OnnxRuntime().open(model, ["wide"])
    gc.collect()
    for _ in range(3):
        split = session.run({"x": x})
        assert all(np.array_equal(split[n], whole[n]) for n in whole), "the weights outlive the call that read them"


def test_only_weights_travel_apart() -> None:
    model = _model("float32")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, "f"), "small"))
    apart = light.split(model)
    assert list(apart.weights) == ["w"] and [t.name for t in proto(apart.model).graph.initializer] == ["small"]
    apart.model.graph.ClearField("initializer")
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    bare.graph.ClearField("initializer")
    assert apart.model == bare and len(model.graph.initializer) == 2


def test_equal_to_the_last_bit() -> None:
    (one,), (other,) = (light.split(_model("float32")).weights.values() for _ in range(2))
    assert light.equal(one, other)
    halves = light.split(_model("float64")).weights["w"]
    assert not light.equal(one, halves)
    negative = ir.tensor(np.where(one.numpy() == 0, np.float32(-0.0), one.numpy()))
    assert not light.equal(one, negative), "-0.0 is not 0.0"


def test_what_nothing_reads_is_left_out() -> None:
    model = _model("float32")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), "f"), "unread"))
    session = OnnxRuntime().open(model)
    assert len(session._weights) == 1, "w is read and `unread` is not"
    assert session.run({"x": np.ones((1, 64), "f")})["y"].shape == (1, 8)


@pytest.mark.parametrize("version", [3, 10])
def test_a_stored_input_that_nothing_reads_need_not_be_fed(version: int) -> None:
    model = _model("float32")
    model.ir_version, model.opset_import[0].version = version, 13
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), "f"), "unread"))
    model.graph.input.extend(helper.make_tensor_value_info(t.name, 1, t.dims) for t in model.graph.initializer)
    assert OnnxRuntime().open(model, ["wide"]).run({"x": np.ones((1, 64), "f")})["y"].shape == (1, 8)


def test_a_session_reads_weights_where_they_lie() -> None:
    apart = light.split(_model("float32"))
    numbers = apart.weights["w"].numpy().copy()
    apart.weights["w"] = ir.Tensor(numbers)
    session, x = OnnxRuntime().open(apart), np.ones((1, 64), "f")
    assert session.run({"x": x})["y"].any()
    numbers[:] = 0
    assert not session.run({"x": x})["y"].any(), "a copy of all weights for each session is what this saves"


def test_however_the_package_is_installed(tmp_path: Path) -> None:
    """The runtime opens no data behind a link, and an installer may put links in place of a package's files."""
    link = tmp_path / "linked.py"
    link.symlink_to(str(onnxruntime.__file__))
    spec = spec_from_file_location("linked", link)
    assert spec is not None and spec.loader is not None
    linked = module_from_spec(spec)
    spec.loader.exec_module(linked)
    assert linked.OnnxRuntime().open(_model("float32")).run({"x": np.ones((1, 64), "f")})["y"].any()


@pytest.mark.parametrize(("op", "dtype"), [("Split", "i8"), ("SplitToSequence", "i8"), ("SplitToSequence", "i4")])
def test_sizes_stay_where_shape_inference_reads_them(op: str, dtype: str, tmp_path: Path) -> None:
    sizes = np.ones(300, dtype)
    outputs = [f"part{i}" for i in range(300)] if op == "Split" else ["parts"]
    nodes = [helper.make_node(op, ["x", "sizes"], outputs, axis=0)]
    if op == "SplitToSequence":
        nodes.append(helper.make_node("ConcatFromSequence", ["parts"], ["part299"], axis=0))
    infos = [helper.make_tensor_value_info("x", 1, [300]), helper.make_tensor_value_info("part299", 1, None)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(sizes, "sizes")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    x = np.arange(300, dtype="f")
    for source in (model, onnx_files.save(model, tmp_path, external_over=0)):
        assert np.array_equal(OnnxRuntime().open(source).run({"x": x})["part299"], x[299:] if op == "Split" else x)
