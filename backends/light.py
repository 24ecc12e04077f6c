"""A model in two parts, the graph and its weights, so that reading or running a graph copies no weights.

Weights are nearly all of a model's bytes. A message that holds them is written, read and copied at every step, and
can't exceed 2 GiB. The graph alone is small, and the runtime takes arrays from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx
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


class Weight:
    """A tensor that travels beside its graph.

    Args:
        kind: element type, as in TensorProto.
        shape: as stored.
        read: gives its bytes as unsigned integers of the element's size (numpy lacks names for some types), flat; it is
            called once, when they are first needed.
    """

    def __init__(self, kind: int, shape: Sequence[int], read: Callable[[], Array]) -> None:
        self.kind, self.shape, self._read = kind, tuple(shape), read
        self._array: Array | None = None

    @property
    def array(self) -> Array:
        if self._array is None:
            self._array = self._read().reshape(self.shape)
            del self._read  # it may hold a whole model
        return self._array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def tensor(self, name: str) -> TensorProto:
        """What ONNX says of it, without its numbers."""
        return TensorProto(name=name, data_type=self.kind, dims=self.shape)

    def outside(self, name: str, location: str, offset: int = 0) -> TensorProto:
        """The same, with the place where its numbers are."""
        out = self.tensor(name)
        set_place(out, location, offset, self.nbytes)
        return out

    def apart(self) -> Weight:
        """The numbers as they are now, in memory of their own."""
        numbers = self.array.flatten()
        return Weight(self.kind, self.shape, lambda: numbers)

    def same(self, other: Weight) -> bool:
        """Whether the two are equal to the last bit."""
        if (self.kind, self.shape) != (other.kind, other.shape):
            return False
        a, b = self.array, other.array
        return a.ctypes.data == b.ctypes.data or np.array_equal(a, b)


@dataclass(frozen=True)
class Light:
    """A model in two parts.

    Attributes:
        model: without the weights of its main graph.
        weights: those, by name; external initializers in ONNX's words.
    """

    model: onnx.ModelProto
    weights: dict[str, Weight]

    @property
    def stored(self) -> set[str]:
        """Names of all tensors that the main graph stores."""
        return {t.name for t in self.model.graph.initializer} | self.weights.keys()

    @property
    def fed(self) -> list[onnx.ValueInfoProto]:
        """Inputs that have to be fed: an old file lists what it stores among them."""
        stored = self.stored
        return [i for i in self.model.graph.input if i.name not in stored]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(w.nbytes for w in self.weights.values())

    def copy(self) -> Light:
        """Another graph beside the same weights."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return Light(model, dict(self.weights))

    def whole(self) -> onnx.ModelProto:
        """One message that holds both, which may be larger than one can be written."""
        model = self.copy().model
        for name, weight in self.weights.items():
            stored = model.graph.initializer.add()
            stored.CopyFrom(weight.tensor(name))
            stored.raw_data = weight.array.tobytes()
        return model

    def stand_ins(self, names: Iterable[str], location: str = "memory") -> onnx.ModelProto:
        """The graph with a tensor whose data lies elsewhere in place of each of these weights."""
        model = self.copy().model
        model.graph.initializer.extend(self.weights[n].outside(n, location) for n in names)
        return model


Model: TypeAlias = onnx.ModelProto | Light


def split(model: Model) -> Light:
    """The two parts of a model; the weights are not copied until they are asked for."""
    if isinstance(model, Light):
        return model
    light = Light(onnx.ModelProto(), {})
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(light.model, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _set(light.model.graph, field.name, value)
    for tensor in model.graph.initializer:
        weight = weight_inside(tensor, len(tensor.raw_data), partial(_numbers, tensor))
        if weight is None:
            light.model.graph.initializer.append(tensor)
        else:
            light.weights[tensor.name] = weight
    return light


def weightless(model: Model) -> onnx.ModelProto:
    """The graph with an input in place of every weight: types and shapes follow as before."""
    light = split(model).copy()
    light.model.ir_version = max(light.model.ir_version, 4)  # before 4 an initializer had to be an input as well
    declared = {i.name for i in light.model.graph.input}
    for name, weight in light.weights.items():
        if name not in declared:
            light.model.graph.input.append(helper.make_tensor_value_info(name, weight.kind, weight.shape))
    return light.model


def large(kind: int, size: int) -> bool:
    """Whether a tensor of this element type and so many bytes need not lie in the graph."""
    return size > (LEAST_SIZES if kind in _SIZES else LEAST)


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


def weight_outside(tensor: TensorProto, read: Callable[[str, int], Array]) -> Weight | None:
    """A tensor whose numbers lie elsewhere, as a weight; None where it has to stay.

    Args:
        read: gives so many numbers of a type (numpy's name), when they are needed.
    """
    if not travels(tensor.data_type, declared_bytes(tensor)):
        return None
    kind = f"u{WIDTHS[tensor.data_type]}"
    return Weight(tensor.data_type, tensor.dims, partial(read, kind, math.prod(tensor.dims)))


def weight_inside(tensor: TensorProto, size: int, read: Callable[[str, int], Array]) -> Weight | None:
    """A tensor that holds so many bytes itself, as a weight; where they don't fit its shape it stays, for others to
    judge."""
    fits = tensor.data_location != TensorProto.EXTERNAL and declared_bytes(tensor) == size
    if not fits:
        return None
    return weight_outside(tensor, read)


def message(light: Light, location: str) -> tuple[bytes, dict[str, Weight]]:
    """A message with a stand-in for each weight that is read, and those weights: the runtime takes no others.

    An input that the model stores as well counts as read: without its weight it would have to be fed.
    """
    read = {*_read(light.model.graph), *(i.name for i in light.model.graph.input)}
    weights = {n: w for n, w in light.weights.items() if n in read}
    return light.stand_ins(weights, location).SerializeToString(), weights


def _numbers(tensor: TensorProto, kind: str, count: int) -> Array:
    array: Array = np.frombuffer(tensor.raw_data, kind, count)
    return array


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that a control-flow node holds."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        graphs += attribute.graphs
    return graphs


def rename(graph: onnx.GraphProto, names: Mapping[str, str], *, nested: bool = True) -> None:
    """Renames values, in place; what bodies define and read as well, unless `nested` is off."""
    for node in graph.node:
        node.input[:] = [names.get(v, v) for v in node.input]
        node.output[:] = [names.get(v, v) for v in node.output]
        for body in bodies(node) if nested else ():
            rename(body, names)
    for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        item.name = names.get(item.name, item.name)


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (o.name for o in graph.output)
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from _read(body)


def _set(message: onnx.ModelProto | onnx.GraphProto, field: str, value: object) -> None:
    if isinstance(value, str | int | bytes):
        setattr(message, field, value)
    elif hasattr(value, "extend") or hasattr(value, "__len__"):
        getattr(message, field).extend(value)
    else:
        getattr(message, field).CopyFrom(value)
