"""What a graph itself says about the integers it is fed: rows of a table they pick, numbers they are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import numpy_helper

from layerline.backends.light import Light

# The numbers stay the same through these.
_PASSING = frozenset(
    {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Slice", "Gather"}
)
_COMPARING = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


def rows(light: Light, name: str) -> int | None:
    """Rows of the smallest stored table that an integer input picks from; None where it picks from none."""
    graph, found = light.model.graph, list[int]()
    shapes = {n: t.dims for n, t in _stored(graph).items()} | {n: w.shape for n, w in light.weights.items()}
    for node, place in _readers(graph, name):
        if node.op_type == "Gather" and place == 1 and (table := shapes.get(node.input[0])) is not None:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found.append(table[axis])
    return min(found, default=None)


def compared(light: Light, name: str) -> tuple[int, ...]:
    """Stored single numbers that an integer input is compared with: each may lead into another branch."""
    graph, found = light.model.graph, dict[int, None]()
    stored = _stored(graph)
    for node, place in _readers(graph, name):
        if node.op_type in _COMPARING and (other := stored.get(node.input[1 - place])) is not None:
            array = numpy_helper.to_array(other)
            if array.size == 1 and array.dtype.kind in "iu":
                found[int(array.reshape(-1)[0])] = None
    return tuple(found)


def _readers(graph: onnx.GraphProto, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Nodes of the main graph that read an input's numbers, however reshaped, and at which place."""
    same = {name}
    for node in graph.node:
        for place, read in enumerate(node.input):
            if read in same:
                yield node, place
                if place == 0 and node.op_type in _PASSING:
                    same.add(node.output[0])


def _stored(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    found = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return found
