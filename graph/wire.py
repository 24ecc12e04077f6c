"""ONNX files read and written in two parts, so that no message ever holds the weights.

Protobuf reads a file into memory and hands each tensor over as a copy; writing makes two more. Here only the graph goes
through protobuf. The wire format is a few rules (https://protobuf.dev/programming-guides/encoding): a message is a row
of fields, each with its number and kind, and a message inside another one is such a row again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto

from layerline.backends.base import Array
from layerline.backends.light import Light, Weight, weight_inside
from layerline.pipeline.errors import StageError

_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}
_Data: TypeAlias = bytes | mmap.mmap


class _Field(NamedTuple):
    """A field of a message: its number, where it begins, and where its content does and ends."""

    number: int
    start: int
    content: int
    end: int


def read(path: Path) -> Light:
    """The two parts of a file; weights that it holds itself are read when they are asked for.

    Raises:
        ValueError, IndexError, DecodeError: the file is cut short or is no such message.
    """
    weights: dict[str, Weight] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        graph = partial(_without_weights, path, weights, data)
        whole = _changed(data, 0, len(data), _GRAPH, graph)
    return Light(ModelProto.FromString(whole), weights)


def write(light: Light, path: Path) -> None:
    """Writes one file whose fields lie in the order of their numbers, as protobuf puts them."""
    model, graph = light.model.SerializeToString(), light.model.graph.SerializeToString()
    weights = list(light.weights.values())
    heads = [_tensor_head(name, w) for name, w in light.weights.items()]
    size = len(graph) + sum(len(head) + w.nbytes for head, w in zip(heads, weights, strict=True))
    with path.open("wb") as file:
        file.write(_only(model, range(_GRAPH)) + _tag_and_size(_GRAPH, size) + _only(graph, range(_INITIALIZER + 1)))
        for head, weight in zip(heads, weights, strict=True):
            file.write(head)
            file.write(weight.array.data)
        file.write(_only(graph, range(_INITIALIZER + 1, 2**29)) + _only(model, range(_GRAPH + 1, 2**29)))


def _tensor_head(name: str, weight: Weight) -> bytes:
    """What comes before the bytes of a stored tensor."""
    tensor: bytes = weight.tensor(name).SerializeToString()
    tensor += _tag_and_size(_RAW, weight.nbytes)
    return _tag_and_size(_INITIALIZER, len(tensor) + weight.nbytes) + tensor


def _without_weights(path: Path, weights: dict[str, Weight], data: mmap.mmap, field: _Field) -> bytes:
    stored = partial(_unless_weight, path, weights, data)
    graph: bytes = _changed(data, field.content, field.end, _INITIALIZER, stored)
    return _tag_and_size(_GRAPH, len(graph)) + graph


def _unless_weight(path: Path, weights: dict[str, Weight], data: mmap.mmap, field: _Field) -> bytes:
    """The tensor as it is, or nothing where it is a weight, which is noted."""
    raw = next((f for f in _fields(data, field.content, field.end) if f.number == _RAW), None)
    if raw is not None:
        tensor = TensorProto.FromString(data[field.content : raw.start] + data[raw.end : field.end])
        weight = weight_inside(tensor, raw.end - raw.content, partial(array, path, raw.content))
        if weight is not None:
            weights[tensor.name] = weight
            return b""
    return data[field.start : field.end]


def array(path: Path, offset: int, kind: str, count: int) -> Array:
    """Numbers as they lie in a file from a place on; `kind` is numpy's name.

    Raises:
        StageError: the file is gone, or ends before.
    """
    size = np.dtype(kind).itemsize * count
    try:
        if path.stat().st_size < offset + size:
            raise StageError(f"the file ends within {size} bytes from byte {offset} on", where=path.name)
        return np.fromfile(path, kind, count, offset=offset)
    except OSError as error:
        raise StageError(f"can't be read: {error}", where=path.name) from error


def _changed(data: _Data, start: int, end: int, number: int, change: Callable[[_Field], bytes]) -> bytes:
    """A message in which every field of this number is what `change` makes of it."""
    return b"".join(change(f) if f.number == number else data[f.start : f.end] for f in _fields(data, start, end))


def _only(data: bytes, numbers: range) -> bytes:
    """The fields of these numbers."""
    return b"".join(data[f.start : f.end] for f in _fields(data, 0, len(data)) if f.number in numbers)


def _fields(data: _Data, start: int, end: int) -> Iterator[_Field]:
    while start < end:
        tag, at = _varint(data, start)
        kind, size = tag & 7, 0
        if kind == _LENGTH:
            size, at = _varint(data, at)
        elif kind == _VARINT:
            size = _varint(data, at)[1] - at
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"a field of unknown kind {kind} at byte {start}")
        if at + size > end:
            raise ValueError(f"the field at byte {start} goes on to byte {at + size}, and its message ends at {end}")
        yield _Field(tag >> 3, start, at, at + size)
        start = at + size


def _varint(data: _Data, at: int) -> tuple[int, int]:
    """The number that is written at a place, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _tag_and_size(number: int, size: int) -> bytes:
    """What comes before `size` bytes of a field."""
    return _as_varint(number << 3 | _LENGTH) + _as_varint(size)


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
