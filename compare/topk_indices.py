"""Index outputs (ArgMax, ArgMin, TopK): the values that they point at, by which near ties are judged.

Two runtimes may rank 0.00500001 and 0.00499999 either way. The positions then differ by any amount, and both are right.
What counts is how far the values apart are that the indices point at. Where the data of the two sides differ by at most
d, correct indices point at values of the reference that are at most 2d apart; a larger difference is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import name_of

Array = npt.NDArray[Any]

# They change neither the order nor the number of the elements, so an index stays the same index.
CARRIERS = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Positions along `axis` of the value `data`; in a fixed order unless `ordered` is false (TopK with sorted=0)."""

    data: str
    axis: int
    ordered: bool = True


def pointers(graph: ir.Graph) -> dict[str, Pointer]:
    """Every value of the graph that holds indices into another one, by name."""
    by_value: dict[str | None, Pointer] = {}
    for node in graph:
        if not node.inputs:
            continue
        data = name_of(node.inputs[0])
        if node.op_type in {"ArgMax", "ArgMin"}:
            by_value[node.outputs[0].name] = Pointer(data=data or "", axis=node.attributes.get_int("axis", 0))
        elif node.op_type == "TopK" and len(node.outputs) > 1:
            axis = node.attributes.get_int("axis", -1)
            ordered = node.attributes.get_int("sorted", 1) != 0
            by_value[node.outputs[1].name] = Pointer(data=data or "", axis=axis, ordered=ordered)
        elif node.op_type in CARRIERS and data in by_value:
            by_value[node.outputs[0].name] = by_value[data]
    # An optional output that is left out has no name.
    return {name: pointer for name, pointer in by_value.items() if name}


def resolved(pointer: Pointer | None, values: Mapping[str, Array], sides: Sequence[Array]) -> tuple[Array, ...]:
    """Replaces indices by the data that they point at, where the data are among `values` and the sides have one size.

    Two equal elements may be found in either order.
    """
    if pointer is None or pointer.data not in values or len({side.size for side in sides}) > 1:
        return tuple(sides)
    return tuple(pointed_at(pointer, values[pointer.data], side) for side in sides)


def pointed_at(pointer: Pointer, data: Array, index: Array) -> Array:
    """The elements of `data` that `index` points at; NaN for an index outside of it."""
    shape = [*data.shape]
    shape[pointer.axis] = -1
    if index.size == 0 or data.size == 0:
        return np.empty(0)
    index = index.astype(np.int64).reshape(shape)
    size = data.shape[pointer.axis]
    inside = (index >= -size) & (index < size)
    values = np.take_along_axis(data, np.where(inside, index, 0), pointer.axis)
    # NaN equals nothing, so an index outside of the data is an error whatever the other side has.
    if not inside.all():
        values = np.where(inside, values.astype(np.float64), np.nan)
    if not pointer.ordered:
        values = np.sort(values, axis=pointer.axis)
    return values
