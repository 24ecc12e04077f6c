"""A model as files and runtimes take it: a message of the graph, and its weights beside it, which are not copied.

Everything between reading and running works on onnx_ir's form.

Weights are nearly all of a model's bytes. A message that holds them is written, read and copied at every step, and
can't exceed 2 GiB. The graph alone is small, and the runtime takes arrays from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from layerline.backends.base import Array

LEAST = 1024
"""Tensors up to this many bytes stay in the graph: passes read shapes, axes and scales, but only pass weights on."""
LEAST_SIZES = 1 << 20
"""The same for integers that may be sizes: shape inference reads them, and only inside of the graph; a Split can have
hundreds."""
_SIZES = (TensorProto.INT64, TensorProto.INT32)
_STAYS = ("UNDEFINED", "STRING", "COMPLEX64", "COMPLEX128", "INT2", "UINT2", "INT4", "UINT4", "FLOAT4", "FLOAT6")
WIDTHS = {
    code: helper.tensor_dtype_to_np_dtype(code).itemsize
    for name, code in TensorProto.DataType.items()
    if not name.startswith(_STAYS)
}
"""Bytes of an element, by type; not of those that share a byte or that the runtime takes no array of: they stay."""


@dataclass(frozen=True)
class Light:
    """A model in two parts.

    Attributes:
        model: without the weights of its main graph.
        weights: those, by name, in onnx_ir's form: in memory, or read when they are first needed (LazyTensor).
    """

    model: onnx.ModelProto
    weights: dict[str, ir.TensorProtocol]

    def copy(self) -> Light:
        """Another graph beside the same weights."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return Light(model, dict(self.weights))

    def whole(self) -> onnx.ModelProto:
        """One message that holds both, which may be larger than one can be written."""
        model = self.copy().model
        for name, weight in self.weights.items():
            dims = weight.shape.numpy()
            model.graph.initializer.add(name=name, data_type=weight.dtype, dims=dims, raw_data=weight.tobytes())
        return model

    def stand_ins(self, names: Iterable[str], location: str = "memory") -> onnx.ModelProto:
        """The graph with a tensor whose data lies elsewhere in place of each of these weights."""
        model = self.copy().model
        model.graph.initializer.extend(outside(self.weights[name], name, location) for name in names)
        return model


Model: TypeAlias = onnx.ModelProto | ir.Model
"""onnx_ir's form, which everything here works on, or a message that comes from outside."""


def from_ir(model: ir.Model) -> Light:
    """The two parts of a model, which stays as it is; they share their memory with it."""
    stored = model.graph.initializers
    values = dict(stored)
    weights: dict[str, ir.TensorProtocol] = {}
    for name, value in values.items():
        # Only the main graph: tensors in the bodies of control flow stay where they are.
        tensor = value.const_value
        if tensor is not None and travels(tensor.dtype.value, tensor.nbytes):
            weights[name] = tensor
    # Serialised without them: a message with its weights is as large as the file.
    for name in weights:
        del stored[name]
    try:
        return Light(ir.serde.serialize_model(model), weights)
    finally:
        stored.clear()
        stored.update(values)


def split(model: Model | Light) -> Light:
    """The two parts of a model; the weights are not copied until they are asked for."""
    if isinstance(model, Light):
        return model
    if isinstance(model, ir.Model):
        return from_ir(model)
    # Copying the message as a whole would copy the weights as well.
    graph_fields = {field.name: value for field, value in model.graph.ListFields() if field.name != "initializer"}
    model_fields = {field.name: value for field, value in model.ListFields() if field.name != "graph"}
    light = Light(onnx.ModelProto(**model_fields, graph=onnx.GraphProto(**graph_fields)), {})
    for tensor in model.graph.initializer:
        # Where the bytes don't fit the shape, the tensor stays for others to judge.
        fits = tensor.data_location != TensorProto.EXTERNAL and declared_bytes(tensor) == len(tensor.raw_data)
        if fits and travels(tensor.data_type, declared_bytes(tensor)):
            light.weights[tensor.name] = lazy(tensor, partial(_numbers, tensor))
        else:
            light.model.graph.initializer.append(tensor)
    return light


def weightless(model: Model) -> onnx.ModelProto:
    """The graph with an input in place of every weight: types and shapes follow as before."""
    light = split(model).copy()
    light.model.ir_version = max(light.model.ir_version, 4)  # before 4 an initializer had to be an input as well
    # Old files list what they store among the inputs.
    declared = {i.name for i in light.model.graph.input}
    for name, weight in light.weights.items():
        if name not in declared:
            light.model.graph.input.append(helper.make_tensor_value_info(name, weight.dtype, weight.shape.numpy()))
    return light.model


def large(kind: int, size: int) -> bool:
    """Whether a tensor of this element type and so many bytes need not lie in the graph."""
    return size > LEAST_SIZES if kind in _SIZES else size > LEAST


def travels(kind: int, size: int) -> bool:
    """Whether it goes beside the graph."""
    return large(kind, size) and kind in WIDTHS


def declared_bytes(tensor: TensorProto) -> int:
    """How many bytes a tensor takes, by its type and shape; 0 for a type that doesn't travel."""
    size: int = math.prod(tensor.dims) * WIDTHS.get(tensor.data_type, 0)
    return size


def set_place(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Says where a tensor's numbers lie."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def lazy(tensor: TensorProto, read: Callable[[], Array]) -> ir.LazyTensor:
    """A tensor whose numbers are read once, when they are first needed; `read` gives them flat."""
    dtype = ir.DataType(tensor.data_type)
    shape = ir.Shape(tensor.dims)

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(read().reshape(shape.numpy()), dtype, shape=shape)

    return ir.LazyTensor(evaluate, dtype, shape, cache=True, name=tensor.name)


def outside(tensor: ir.TensorProtocol, name: str, location: str, offset: int = 0) -> TensorProto:
    """What ONNX says of a tensor whose numbers lie elsewhere."""
    proto = TensorProto(name=name, data_type=tensor.dtype, dims=tensor.shape.numpy())
    set_place(proto, location, offset, tensor.nbytes)
    return proto


def as_integers(tensor: ir.TensorProtocol) -> Array:
    """A tensor's numbers as unsigned integers of the same width: numpy itself has no bfloat16 and no 8-bit floats."""
    array = np.ascontiguousarray(tensor.numpy())
    return array.view(f"u{array.itemsize}")


def equal(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    """Whether two tensors are equal to the last bit: -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first = np.ascontiguousarray(a.numpy())
    second = np.ascontiguousarray(b.numpy())
    if a.dtype == ir.DataType.STRING:
        return bool(np.array_equal(first, second))
    # Two models that came from one file share their arrays; nothing has to be read then.
    return first.ctypes.data == second.ctypes.data or np.array_equal(first.view(np.uint8), second.view(np.uint8))


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that a control-flow node holds."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        graphs += attribute.graphs
    return graphs


def _numbers(tensor: TensorProto) -> Array:
    array: Array = np.frombuffer(tensor.raw_data, ir.DataType(tensor.data_type).numpy())
    return array


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes in order, each followed by those in its bodies."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Every value that a graph reads, in the bodies of its nodes as well."""
    yield from (o.name for o in graph.output)
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from reads(body)
