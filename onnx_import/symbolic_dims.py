"""Checks inputs and outputs of an imported graph, names its symbolic sizes, and writes back what is learned of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.graph.analysis.ir_queries import dim, fed, graph_values
from layerline.pipeline.errors import StageError

# Exporters write these where they have no name. Two dimensions called `?` need not have one size.
_NAMELESS = frozenset({"", "?", "*", "-1", "None", "none", "unk", "unknown"})
# The name that onnx's shape inference gives to a size that it can't tell.
_INFERRED = re.compile(r"unk__\d+")

# Types that numpy lacks. onnxruntime's Python interface passes no such arrays either.
_NOT_OUTPUTS = ("BFLOAT16", "INT4", "UINT4", "FLOAT4", "INT2", "UINT2")
_NOT_INPUTS = (*_NOT_OUTPUTS, "FLOAT8")

Size: TypeAlias = int | str | None
"""The size of one axis: a number, the name of one, or None where it is open."""

Places = dict[str, list[tuple[str, int]]]
"""Where each dimension is, by name: (input, axis)."""


def name(model: ir.Model, arrays: Mapping[str, Array]) -> Places:
    """Names the unnamed sizes of the inputs `<input>_dim<axis>`, in place. Returns all dimensions that vary.

    `arrays` give the rank of inputs whose shape the file leaves out. Raises StageError: an input or output can't be
    fed or read, or an input has no shape and no array.
    """
    for value in fed(model):
        _refuse_type("input", value, _NOT_INPUTS)
    for value in model.graph.outputs:
        _refuse_type("output", value, _NOT_OUTPUTS)
    for value in fed(model):
        input_name = value.name or ""
        if value.dtype == ir.DataType.STRING:
            raise StageError("the input is text", where=input_name, hint="cut the tokeniser off: feed numbers")
        if isinstance(value.type, ir.TensorType) and value.shape is None:
            if input_name not in arrays:
                what = "the file does not say how many axes this input has"
                hint = "give samples: `data: samples.npz`, with one array per input"
                raise StageError(what, where=input_name, hint=hint)
            value.shape = ir.Shape([None] * arrays[input_name].ndim)
        _name_open(value, input_name)
    for value in {*model.graph.outputs, *graph_values(model.graph)} - set(fed(model)):
        _name_open(value, "")
    return places(model)


def _name_open(value: ir.Value, stem: str) -> None:
    """Names the open sizes of a value `<stem>_dim<axis>`; without a stem, takes away whatever name they have."""
    sizes = _sizes(value)
    for axis, size in enumerate(sizes):
        if not _is_open(size):
            continue
        sizes[axis] = None
        if stem:
            sizes[axis] = f"{stem}_dim{axis}"
    _set_sizes(value, sizes)


def places(model: ir.Model) -> Places:
    """The dimensions of the inputs that vary."""
    places = Places()
    for value in fed(model):
        for axis, size in enumerate(_sizes(value)):
            if isinstance(size, str) and size:
                places.setdefault(size, []).append((value.name or "", axis))
    return places


def as_text(places: Iterable[tuple[str, int]]) -> str:
    """`x axis 0, mask axis 0`."""
    return ", ".join(f"{name} axis {axis}" for name, axis in places)


def write(model: ir.Model, names: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Renames dimensions and puts numbers in the place of others, everywhere, in place."""
    for value in {*model.graph.outputs, *graph_values(model.graph)}:
        written: list[Size] = []
        for size in _sizes(value):
            if isinstance(size, str):
                size = sizes.get(size, names.get(size, size))
            written.append(size)
        _set_sizes(value, written)


def settle(model: ir.Model, places: Places, runs: Sequence[tuple[Feed, Mapping[str, Array]]]) -> None:
    """Names the open sizes of the outputs, in place: after the dimension that they follow, else `<output>_dim<axis>`.

    A size that was the same on every feed is not taken for fixed: a detector finds any number of things.
    """
    varied: dict[str, list[int]] = {}
    for dim_name, ((input_name, axis), *_) in places.items():
        sizes = [feed[input_name].shape[axis] for feed, _ in runs]
        if len(set(sizes)) > 1:
            varied[dim_name] = sizes
    for output in model.graph.outputs:
        # A size that changes with a dimension on every feed is that dimension's.
        output_name = output.name or ""
        shapes = [outputs[output_name].shape for _, outputs in runs]
        if len({len(shape) for shape in shapes}) > 1:
            # Out of two branches of an If: what the file declares stays.
            continue
        if output.shape is None or len(output.shape) != len(shapes[0]):
            output.shape = ir.Shape([None] * len(shapes[0]))
        settled = _sizes(output)
        for axis, size in enumerate(settled):
            if _is_open(size) or (isinstance(size, str) and _INFERRED.fullmatch(size)):
                sizes = [shape[axis] for shape in shapes]
                same = [name for name, sizes_of_name in varied.items() if sizes_of_name == sizes]
                settled[axis] = f"{output_name}_dim{axis}"
                if same:
                    settled[axis] = same[0]
        _set_sizes(output, settled)


def _sizes(value: ir.Value) -> list[Size]:
    """The sizes of a tensor; none where its shape is not declared."""
    if value.shape is None or not isinstance(value.type, ir.TensorType):
        return []
    return [dim(value, axis) for axis in range(len(value.shape))]


def _set_sizes(value: ir.Value, sizes: Sequence[Size]) -> None:
    if value.shape is not None and sizes != _sizes(value):
        denotations = [value.shape.get_denotation(axis) for axis in range(len(sizes))]
        value.shape = ir.Shape(sizes, denotations=denotations)


def _refuse_type(place: str, value: ir.Value, refused: tuple[str, ...]) -> None:
    element_type = "UNDEFINED"
    if value.dtype is not None:
        element_type = value.dtype.name
    if element_type.startswith(refused):
        what = f"the {place} is {element_type.lower()}, which numpy has not, so it can't be fed or read"
        hint = "put a Cast to float32 behind that input, or before that output"
        raise StageError(what, where=value.name or "", hint=hint)


def _is_open(size: Size) -> bool:
    # Some exporters write 0 or -1 where others leave the size out.
    if isinstance(size, int):
        return size <= 0
    return size is None or size.strip() in _NAMELESS
