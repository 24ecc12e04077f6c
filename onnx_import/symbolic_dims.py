"""Checks inputs and outputs of an imported graph, names its symbolic sizes, and writes back what is learned of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import onnx

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.pipeline.errors import StageError

# Exporters write these where they have no name. Two dimensions called `?` need not have one size.
_NAMELESS = frozenset({"", "?", "*", "-1", "None", "none", "unk", "unknown"})
# The name that onnx's shape inference gives to a size that it can't tell.
_INFERRED = re.compile(r"unk__\d+")

# Types that numpy lacks. onnxruntime's Python interface passes no such arrays either.
_NOT_OUTPUTS = ("BFLOAT16", "INT4", "UINT4", "FLOAT4", "INT2", "UINT2")
_NOT_INPUTS = (*_NOT_OUTPUTS, "FLOAT8")

Places = dict[str, list[tuple[str, int]]]
"""Where each dimension is, by name: (input, axis)."""


def name(light: Light, ranks: Mapping[str, int]) -> Places:
    """Names the unnamed sizes of the inputs `<input>_dim<axis>`, in place. Returns all dimensions that vary.

    Args:
        ranks: ranks of inputs whose shape the file leaves out.

    Raises:
        StageError: an input or output is of a type that can't be fed or read, or an input holds text, or has no shape
            and is not in `ranks`; names the first.
    """
    for value in light.fed:
        _refuse_type("input", value, _NOT_INPUTS)
    for value in light.model.graph.output:
        _refuse_type("output", value, _NOT_OUTPUTS)
    for value in light.fed:
        tensor_type = value.type.tensor_type
        if tensor_type.elem_type == onnx.TensorProto.STRING:
            raise StageError("the input is text", where=value.name, hint="cut the tokeniser off: feed numbers")
        if value.type.HasField("tensor_type") and not tensor_type.HasField("shape"):
            if value.name not in ranks:
                raise StageError(
                    "the file does not say how many axes this input has",
                    where=value.name,
                    hint="give samples: `data: samples.npz`, with one array per input",
                )
            tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in range(ranks[value.name]))
        for axis, dim in enumerate(tensor_type.shape.dim):
            if _is_open(dim):
                dim.dim_param = f"{value.name}_dim{axis}"
    for item in (*light.model.graph.output, *light.model.graph.value_info):
        for dim in item.type.tensor_type.shape.dim:
            if _is_open(dim):
                dim.Clear()
    return places(light)


def places(light: Light) -> Places:
    """The dimensions of the inputs that vary."""
    places = Places()
    for value in light.fed:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                places.setdefault(dim.dim_param, []).append((value.name, axis))
    return places


def as_text(places: Iterable[tuple[str, int]]) -> str:
    """`x axis 0, mask axis 0`."""
    return ", ".join(f"{name} axis {axis}" for name, axis in places)


def write(model: onnx.ModelProto, names: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Renames dimensions and puts numbers in the place of others, everywhere, in place."""
    for item in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in item.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def settle(model: onnx.ModelProto, places: Places, runs: Sequence[tuple[Feed, Mapping[str, Array]]]) -> None:
    """Names the open sizes of the outputs, in place: after the dimension that they follow, else `<output>_dim<axis>`.

    A size that was the same on every feed is not taken for fixed: a detector finds any number of things.

    Args:
        runs: feeds of different sizes, each with the outputs it gave.
    """
    varied: dict[str, list[int]] = {}
    for dim_name, ((input_name, axis), *_) in places.items():
        sizes = [feed[input_name].shape[axis] for feed, _ in runs]
        if len(set(sizes)) > 1:
            varied[dim_name] = sizes
    for output in model.graph.output:
        tensor_type = output.type.tensor_type
        shapes = [outputs[output.name].shape for _, outputs in runs]
        if len({len(shape) for shape in shapes}) > 1:
            # Out of two branches of an If: what the file declares stays.
            continue
        if not tensor_type.HasField("shape") or len(tensor_type.shape.dim) != len(shapes[0]):
            tensor_type.ClearField("shape")
            tensor_type.shape.SetInParent()
            tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shapes[0])
        for axis, dim in enumerate(tensor_type.shape.dim):
            if _is_open(dim) or _INFERRED.fullmatch(dim.dim_param):
                sizes = [shape[axis] for shape in shapes]
                same = [name for name, sizes_of_name in varied.items() if sizes_of_name == sizes]
                dim.dim_param = [*same, f"{output.name}_dim{axis}"][0]


def _refuse_type(what: str, value: onnx.ValueInfoProto, refused: tuple[str, ...]) -> None:
    code = value.type.tensor_type.elem_type
    if code not in onnx.TensorProto.DataType.values():
        raise StageError(f"the {what} is of element type {code}, which ONNX has not", where=value.name)
    element_type = onnx.TensorProto.DataType.Name(code)
    if element_type.startswith(refused):
        raise StageError(
            f"the {what} is {element_type.lower()}, which numpy has not, so it can't be fed or read",
            where=value.name,
            hint="put a Cast to float32 behind that input, or before that output",
        )


def _is_open(dim: onnx.TensorShapeProto.Dimension) -> bool:
    if dim.HasField("dim_value"):
        # Some exporters write 0 or -1 where others leave the size out.
        return bool(dim.dim_value <= 0)
    return dim.dim_param.strip() in _NAMELESS
