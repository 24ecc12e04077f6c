"""Models past protobuf's 2 GiB: the graph travels without its weights, which are handed over beside it."""

from __future__ import annotations

import onnx
from onnx import TensorProto

MESSAGE = 1_500_000_000
"""Bytes of stored tensors from which a model no longer goes through a serialised message."""
LEAST = 1024
"""Tensors up to this many bytes stay: shapes, axes and scales are looked at, weights are only passed on."""


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a model's weights have to travel apart from it."""
    return sum(len(t.raw_data) for t in model.graph.initializer) > MESSAGE


def split(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, TensorProto]]:
    """A copy without the weights of its main graph, and those by name; the weights themselves are not copied."""
    light, heavy = onnx.ModelProto(), dict[str, TensorProto]()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(light, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _set(light.graph, field.name, value)
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > LEAST:
            heavy[tensor.name] = tensor
        else:
            light.graph.initializer.append(tensor)
    return light, heavy


def absent(tensor: TensorProto) -> TensorProto:
    """A stand-in for a tensor whose bytes come from elsewhere."""
    out = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    out.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "memory"), ("offset", "0"), ("length", str(len(tensor.raw_data)))):
        out.external_data.add(key=key, value=value)
    return out


def _set(message: onnx.ModelProto | onnx.GraphProto, field: str, value: object) -> None:
    if isinstance(value, str | int | bytes):
        setattr(message, field, value)
    elif hasattr(value, "extend") or hasattr(value, "__len__"):
        getattr(message, field).extend(value)
    else:
        getattr(message, field).CopyFrom(value)
