"""A graph without its weights, and the weights beside it: nothing is copied for looking at a graph or running it.

Weights are nearly all of a model's bytes. A message that holds them is written, read and copied at every step, and ends
at 2 GiB; the graph alone is small, and the runtime takes arrays as they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper

from layerline.backends.base import Array

LEAST = 1024
"""Tensors up to this many bytes stay: shapes, axes and scales are looked at, weights are only passed on."""
_STAYS = ("INT2", "UINT2", "INT4", "UINT4", "FLOAT4E2M1", "COMPLEX64", "COMPLEX128")
"""Types that share a byte or that the runtime takes no array of."""


def split(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, TensorProto]]:
    """A copy without the weights of its main graph, and those by name; the weights themselves are not copied."""
    light, heavy = onnx.ModelProto(), dict[str, TensorProto]()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(light, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _set(light.graph, field.name, value)
    stays = {TensorProto.DataType.Value(n) for n in _STAYS if n in TensorProto.DataType.keys()}  # noqa: SIM118
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > LEAST and tensor.data_type not in stays:
            heavy[tensor.name] = tensor
        else:
            light.graph.initializer.append(tensor)
    return light, heavy


def weightless(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, TensorProto]]:
    """As `split`, with an input in place of every weight: types and shapes follow as before."""
    light, heavy = split(model)
    light.ir_version = max(light.ir_version, 4)  # before 4 an initializer had to be an input as well
    given = {i.name for i in light.graph.input}
    light.graph.input.extend(
        helper.make_tensor_value_info(n, t.data_type, t.dims) for n, t in heavy.items() if n not in given
    )
    return light, heavy


def unread(model: onnx.ModelProto) -> set[str]:
    """Stored tensors of the main graph that nothing reads: the runtime drops them and won't be handed them."""
    return {t.name for t in model.graph.initializer} - set(_read(model.graph))


def absent(tensor: TensorProto) -> TensorProto:
    """A stand-in for a tensor whose bytes come from elsewhere."""
    out = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    out.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "memory"), ("offset", "0"), ("length", str(len(tensor.raw_data)))):
        out.external_data.add(key=key, value=value)
    return out


def stored(tensor: TensorProto) -> Array:
    """A weight's bytes as unsigned integers of its element size: numpy lacks names for some types."""
    raw = tensor.raw_data
    array: Array = np.frombuffer(raw, f"u{len(raw) // math.prod(tensor.dims)}").reshape(tensor.dims)
    return array


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (o.name for o in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _read(body)


def _set(message: onnx.ModelProto | onnx.GraphProto, field: str, value: object) -> None:
    if isinstance(value, str | int | bytes):
        setattr(message, field, value)
    elif hasattr(value, "extend") or hasattr(value, "__len__"):
        getattr(message, field).extend(value)
    else:
        getattr(message, field).CopyFrom(value)
