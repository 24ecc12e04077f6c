"""Index outputs (ArgMax, ArgMin, TopK): who points at what, so that a near tie is judged by its values.

Two runtimes may rank 0.00500001 and 0.00499999 either way; the positions then differ by any amount while the result is
as good. What counts is how far the values they point at lie apart. Where the data of the two sides differ by at most d,
a correct pair of indices points at values of the reference that lie at most 2d apart; any more is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]

# They change neither the order nor the number of the elements, so an index stays the same index.
CARRIERS = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Positions along `axis` of the value `data`; in a fixed order unless `ordered` is false (TopK with sorted=0)."""

    data: str
    axis: int
    ordered: bool = True


def pointers(graph: onnx.GraphProto) -> dict[str, Pointer]:
    """Every value of the graph that holds indices into another one, by name."""
    found: dict[str, Pointer] = {}
    for node in graph.node:
        attributes = {a.name: a for a in node.attribute}
        axis, ordered = (attributes[k].i if k in attributes else None for k in ("axis", "sorted"))
        if node.op_type in {"ArgMax", "ArgMin"}:
            found[node.output[0]] = Pointer(data=node.input[0], axis=axis or 0)
        elif node.op_type == "TopK" and len(node.output) > 1:
            axis = -1 if axis is None else axis
            found[node.output[1]] = Pointer(data=node.input[0], axis=axis, ordered=ordered != 0)
        elif node.op_type in CARRIERS and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    found.pop("", None)
    return found


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
    values = values if inside.all() else np.where(inside, values.astype(np.float64), np.nan)
    return values if pointer.ordered else np.sort(values, axis=pointer.axis)
