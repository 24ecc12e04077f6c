"""Small ONNX models that the tests of backends, checks and the engine stage share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from layerline.export import probe_files
from layerline.export.signature import Signature, Value
from layerline.pipeline.config.field_types import Dim

Io = tuple[str, int, Sequence[int | str] | None]
F, I64, U8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL
ZERO = np.int8(0)
_RNG = np.random.default_rng(0)
WEIGHT = _RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: Any) -> onnx.NodeProto:
    made = helper.make_node(op, inputs, outputs, name=name or f"{op}_{outputs[0]}", **attributes)
    made.metadata_props.add(key="layerline.module", value=f"net.{made.name}")
    return made


def graph(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.GraphProto:
    """A branch of an If."""
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(o, F, None) for o in outputs])


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Io],
    outputs: Sequence[Io],
    stored: Mapping[str, Any] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    infos = [[helper.make_tensor_value_info(*io) for io in each] for each in (inputs, outputs)]
    tensors = [numpy_helper.from_array(np.asarray(a), name) for name, a in (stored or {}).items()]
    made = helper.make_graph(nodes, "g", *infos, tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def conv(batch: int | str = "batch", weight: Any = WEIGHT) -> onnx.ModelProto:
    """x (batch, 3, 8, 8) -> Conv -> Relu -> y."""
    return model(
        [node("Conv", ["x", "w"], ["c"], "conv"), node("Relu", ["c"], ["y"], "relu")],
        [("x", F, [batch, 3, 8, 8])],
        [("y", F, [batch, 4, 6, 6])],
        {"w": weight},
    )


def two_inputs(first: str = "n", second: str = "m") -> onnx.ModelProto:
    """a (n, 3) and b (m, 3), joined."""
    return model(
        [node("Concat", ["a", "b"], ["y"], "concat", axis=0)],
        [("a", F, [first, 3]), ("b", F, [second, 3])],
        [("y", F, ["rows", 3])],
    )


def quantised(
    point: Any = ZERO, scale: float = 0.1, *, weights: bool = True, batch: int | str = "batch"
) -> onnx.ModelProto:
    """Conv and Gemm between Q and DQ; their weights quantised per channel, or left in float."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["x_q"], "x_Q"),
        node("DequantizeLinear", ["x_q", "s", "z"], ["x_dq"], "x_DQ"),
        node("Conv", ["x_dq", "w", "b"], ["c"], "conv"),
        node("Relu", ["c"], ["r"], "relu"),
        node("ReduceMean", ["r", "axes"], ["p"], "pool", keepdims=0),
        node("QuantizeLinear", ["p", "s", "z"], ["p_q"], "p_Q"),
        node("DequantizeLinear", ["p_q", "s", "z"], ["p_dq"], "p_DQ"),
        node("Gemm", ["p_dq", "v"], ["y"], "fc", transB=1),
    ]
    stored: dict[str, Any] = {
        "s": np.float32(scale),
        "z": point,
        "b": np.zeros(4, np.float32),
        "axes": np.array([2, 3]),
    }
    for name, size in (("w", (4, 3, 3, 3)), ("v", (5, 4))):
        if weights:
            nodes.insert(0, node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [name], axis=0))
            stored[f"{name}_q"] = _RNG.integers(-127, 128, size).astype(np.int8)
            stored[f"{name}_s"] = np.full(size[0], 0.01, np.float32)
            stored[f"{name}_z"] = np.zeros(size[0], np.int8)
        else:
            stored[name] = _RNG.standard_normal(size).astype(np.float32)
    return model(nodes, [("x", F, [batch, 3, 8, 8])], [("y", F, [batch, 5])], stored)


def half() -> onnx.ModelProto:
    """A float16 product between casts."""
    return model(
        [
            node("Cast", ["x"], ["h"], "down", to=TensorProto.FLOAT16),
            node("MatMul", ["h", "w"], ["m"], "fc"),
            node("Cast", ["m"], ["y"], "up", to=F),
        ],
        [("x", F, ["batch", 4])],
        [("y", F, ["batch", 3])],
        {"w": np.ones((4, 3), np.float16)},
    )


def artifact(folder: Path, proto: onnx.ModelProto, dims: Mapping[str, Dim] | None = None) -> Path:
    """A folder as the quantize stage leaves it; named dimensions have the bounds 1 to 8 unless `dims` says others."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, str(folder / "model.onnx"))
    inputs, outputs = (tuple(_value(i) for i in each) for each in (proto.graph.input, proto.graph.output))
    named = {d for v in inputs for d in v.shape if isinstance(d, str)}
    bounds = {name: Dim(min=1, max=8) for name in named} if dims is None else dict(dims)
    Signature(inputs=inputs, outputs=outputs, dims=bounds).save(folder)
    feeds = [{v.name: _feed(v, size) for v in inputs} for size in (2, 1)]
    probe_files.save(folder, feeds)
    return folder


def _value(info: onnx.ValueInfoProto) -> Value:
    dims = info.type.tensor_type.shape.dim
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
    dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    return Value(name=info.name, dtype=dtype.name, shape=shape)


def _feed(value: Value, size: int) -> Any:
    shape = [d if isinstance(d, int) else size for d in value.shape]
    return np.random.default_rng(size).standard_normal(shape).astype(value.dtype)
