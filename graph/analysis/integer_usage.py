"""What a graph itself says about the integers it is fed: rows of a table they pick, numbers they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import numpy_helper

from layerline.backends.light import Light
from layerline.graph.analysis.proto_queries import stored

# The numbers stay the same through these.
_PASSING = frozenset(
    {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Slice", "Gather"}
)
_COMPARING = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


def rows(light: Light, name: str) -> int | None:
    """Rows of the smallest stored table that an integer input picks from; None where it picks from none."""
    graph = light.model.graph
    shapes: dict[str, Sequence[int]] = {tensor_name: tensor.dims for tensor_name, tensor in stored(graph)}
    shapes.update((weight_name, weight.shape.numpy()) for weight_name, weight in light.weights.items())
    row_counts: list[int] = []
    for node, place in _readers(graph, name):
        if node.op_type == "Gather" and place == 1 and node.input[0] in shapes:
            row_counts.append(shapes[node.input[0]][_axis(node)])
    # An index has to fit into every table that it picks from.
    return min(row_counts, default=None)


def _axis(node: onnx.NodeProto) -> int:
    for attribute in node.attribute:
        if attribute.name == "axis":
            return int(attribute.i)
    return 0


def compared(light: Light, name: str) -> tuple[int, ...]:
    """Stored single numbers that an integer input is compared with: each may lead into another branch."""
    graph = light.model.graph
    tensors = dict(stored(graph))
    numbers: dict[int, None] = {}
    for node, place in _readers(graph, name):
        if node.op_type not in _COMPARING or node.input[1 - place] not in tensors:
            continue
        array = numpy_helper.to_array(tensors[node.input[1 - place]])
        # Longer tensors are masks and tables, whose elements pick no branch.
        if array.size == 1 and array.dtype.kind in "iu":
            numbers[int(array.reshape(-1)[0])] = None
    return tuple(numbers)


def _readers(graph: onnx.GraphProto, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Nodes of the main graph that read an input's numbers, however reshaped, and at which place."""
    same = {name}
    for node in graph.node:
        for place, read in enumerate(node.input):
            if read in same:
                yield node, place
                if place == 0 and node.op_type in _PASSING:
                    same.add(node.output[0])
