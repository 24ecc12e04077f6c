"""The symbolic sizes of a foreign graph: every one gets a name, and what is found out about them is written back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import onnx

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.pipeline.errors import StageError

# What exporters write where they know no name; two of these are not one size.
_NAMELESS = frozenset({"", "?", "*", "-1", "None", "none", "unk", "unknown"})
# What onnx's shape inference calls a size that it can't tell.
_INFERRED = re.compile(r"unk__\d+")

Places = dict[str, list[tuple[str, int]]]
"""Name of a dimension to where it is: input and axis."""


def name(light: Light, ranks: Mapping[str, int]) -> Places:
    """Gives the sizes of the inputs that have none a name, `<input>_dim<axis>`, in place; all that vary, by name.

    Args:
        ranks: of inputs whose shape the file leaves out.

    Raises:
        StageError: an input without a shape that `ranks` doesn't tell; one that is text.
    """
    for given in light.fed:
        kind = given.type.tensor_type
        if kind.elem_type == onnx.TensorProto.STRING:
            raise StageError("the input is text", where=given.name, hint="cut the tokeniser off: feed numbers")
        if given.type.HasField("tensor_type") and not kind.HasField("shape"):
            if given.name not in ranks:
                raise StageError(
                    "the file does not say how many axes this input has",
                    where=given.name,
                    hint="give samples: `data: samples.npz`, with one array per input",
                )
            kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in range(ranks[given.name]))
        for axis, dim in enumerate(kind.shape.dim):
            if _is_open(dim):
                dim.dim_param = f"{given.name}_dim{axis}"
    for item in (*light.model.graph.output, *light.model.graph.value_info):
        for dim in item.type.tensor_type.shape.dim:
            if _is_open(dim):
                dim.Clear()
    return places(light)


def places(light: Light) -> Places:
    """The dimensions of the inputs that vary."""
    found = Places()
    for given in light.fed:
        for axis, dim in enumerate(given.type.tensor_type.shape.dim):
            if dim.dim_param:
                found.setdefault(dim.dim_param, []).append((given.name, axis))
    return found


def told(places: Iterable[tuple[str, int]]) -> str:
    """`x axis 0, mask axis 0`."""
    return ", ".join(f"{given} axis {axis}" for given, axis in places)


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
    known = {n: [f[given].shape[axis] for f, _ in runs] for n, ((given, axis), *_) in places.items()}
    known = {n: column for n, column in known.items() if len(set(column)) > 1}
    for output in model.graph.output:
        kind, seen = output.type.tensor_type, [found[output.name].shape for _, found in runs]
        if len({len(s) for s in seen}) > 1:  # out of two branches: whatever the file says of it stays
            continue
        if not kind.HasField("shape") or len(kind.shape.dim) != len(seen[0]):
            kind.ClearField("shape")
            kind.shape.SetInParent()
            kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in seen[0])
        for axis, dim in enumerate(kind.shape.dim):
            column = [s[axis] for s in seen]
            if _is_open(dim) or _INFERRED.fullmatch(dim.dim_param):
                dim.dim_param = next((n for n, c in known.items() if c == column), f"{output.name}_dim{axis}")


def _is_open(dim: onnx.TensorShapeProto.Dimension) -> bool:
    # Some exporters write 0 or -1 where others leave the size out.
    return dim.dim_value <= 0 if dim.HasField("dim_value") else dim.dim_param.strip() in _NAMELESS
