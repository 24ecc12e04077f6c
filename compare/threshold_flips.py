"""Steps: values that jump where a float crosses a threshold (Floor, Round, Greater, …), and where a jump is no error.

Two runtimes may get 0.49999997 and 0.50000003 for one value; rounded they differ by all of one, and both are right. An
element may fall on either side where its operand lies within that operand's own noise of the threshold. Anywhere else
a difference is an error. What follows from a jump is not excused: it is real, and the report says what it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from layerline.compare.topk_indices import CARRIERS, pointers
from layerline.graph.analysis.toposort import reads
from layerline.pipeline.report import LayerDiff

Array = npt.NDArray[Any]

# Never falling, so that an element may jump exactly where a little less and a little more give different steps.
_RISING: dict[str, Callable[[Array], Array]] = {
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sign": np.sign,
    "Cast": np.trunc,
}
_COMPARED = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"})
# They jump with any of their inputs. The first keep number and order of the elements.
_CARRIERS = CARRIERS | {"Not"}
_LOGIC = frozenset({"And", "Or", "Xor"})
_WHOLE = frozenset(
    getattr(onnx.TensorProto, name)
    for name in "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64".split()  # noqa: SIM905  # a table
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A value with jumps: the operator that makes it, what it reads, and the element type that a Cast makes."""

    op: str
    inputs: tuple[str, ...]
    to: int = 0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """All of a graph's.

    Attributes:
        known: by value name.
        constants: stored tensors that they compare with.
    """

    known: Mapping[str, Step]
    constants: Mapping[str, Array]

    def operands(self, value: str) -> frozenset[str]:
        """Every value that says whether an element of this one may jump; none of one that is no step."""
        inputs = self.known[value].inputs if value in self.known else ()
        return frozenset(inputs).union(*(self.operands(i) for i in inputs))

    def loose(self, value: str, values: Mapping[str, Array], noise: Callable[[str], float]) -> Array | None:
        """Which elements may lie on either side; None where none may, or where that can't be told.

        Args:
            values: operands by name.
            noise: by how much an element of an operand may be off.
        """
        step = self.known.get(value)
        if step is None:
            return None
        inputs = [values.get(i, self.constants.get(i)) for i in step.inputs]
        if step.op in _CARRIERS | _LOGIC and any(i in self.known for i in step.inputs):
            masks = [self.loose(i, values, noise) for i in step.inputs]
            return self._carried(step.op, masks, values.get(value))
        if any(a is None or a.dtype.kind != "f" for a in inputs):
            return None
        operands = [np.asarray(a, np.float64) for a in inputs]
        off = sum(noise(i) for i in step.inputs if i not in self.constants)
        if step.op in _COMPARED:
            return np.asarray(np.abs(np.subtract(*operands)) <= off)
        if step.to == onnx.TensorProto.BOOL:
            return np.asarray(np.abs(operands[0]) <= off)
        rising = _RISING[step.op]
        return np.asarray(rising(operands[0] - off) != rising(operands[0] + off))

    @staticmethod
    def _carried(op: str, masks: list[Array | None], result: Array | None) -> Array | None:
        known = [m for m in masks if m is not None]
        if not known or result is None:
            return None
        if op in _CARRIERS:
            return known[0].reshape(result.shape)
        return np.broadcast_to(np.logical_or.reduce(np.broadcast_arrays(*known)), result.shape)


def steps(graph: onnx.GraphProto) -> Steps:
    """The values of the main graph that jump."""
    stored = {t.name: t for t in graph.initializer}
    stored |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    known: dict[str, Step] = {}
    for node in graph.node:
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        jumps = node.op_type in _RISING.keys() - {"Cast"} | _COMPARED or (node.op_type == "Cast" and to in _WHOLE)
        carries = node.op_type in _LOGIC | _CARRIERS and any(i in known for i in node.input)
        if jumps or carries:
            # The second input of a Reshape is a shape.
            inputs = node.input[:1] if node.op_type in _CARRIERS else node.input
            known[node.output[0]] = Step(op=node.op_type, inputs=tuple(inputs), to=to)
    read = {i for s in known.values() for i in s.inputs if i in stored}
    return Steps(known=known, constants={n: numpy_helper.to_array(stored[n]) for n in read})


def blamed(rows: Sequence[LayerDiff], graph: onnx.GraphProto) -> tuple[LayerDiff, ...]:
    """The rows; the first that failed says in its column `cause` which jump, or moved index, before it explains it."""
    first = next((r for r in rows if not r.passed), None)
    indices = pointers(graph)
    moved = [r.name for r in rows if r.passed and (r.extra.get("flips") or (r.name in indices and r.max_abs))]
    if first is None or not (causes := behind(graph, first.name, moved)):
        return tuple(rows)
    nearest = next(r for r in rows if r.name == causes[-1])
    if nearest.name in indices:
        told = f"{nearest.name} ({nearest.op}) points elsewhere, at values of {indices[nearest.name].data} that differ"
        told += f" by up to {nearest.max_abs:.2g}"
    else:
        told = (
            f"{nearest.extra['flips']} elements of {nearest.name} ({nearest.op}) lie on the other side of a threshold"
        )
    cause = replace(first, extra={**first.extra, "cause": f"it follows from a jump: {told}"})
    return tuple(cause if r is first else r for r in rows)


def behind(graph: onnx.GraphProto, value: str, wanted: Iterable[str]) -> list[str]:
    """Which of the wanted values the value is computed from, in topological order."""
    made = {o: n for n in graph.node for o in n.output}
    pending, seen = [value], set[str]()
    while pending:
        node = made.get(pending.pop())
        fresh = set(reads(node) if node is not None else ()) - seen
        seen |= fresh
        pending += fresh
    return [w for w in wanted if w in seen]
