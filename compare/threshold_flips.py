"""Values that jump where a float crosses a threshold (Floor, Round, Greater, …), and where such a jump is no error.

Two runtimes may compute 0.49999997 and 0.50000003 for one value. Rounded they differ by 1, and both are right. An
element may therefore fall on either side where its operand is closer to the threshold than the operand's own noise.
Anywhere else a difference is an error. The values computed from a jump are not excused; the report names the jump that
their difference comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.compare.topk_indices import CARRIERS, pointers
from layerline.compare.value_types import CODES
from layerline.graph.analysis.ir_queries import first_output, names, reads, stored_tensor
from layerline.pipeline.report import LayerDiff

Array = npt.NDArray[Any]

# Monotonic functions: an element may jump exactly where a slightly smaller and a slightly larger operand give different
# results.
_MONOTONIC: dict[str, Callable[[Array], Array]] = {
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sign": np.sign,
    "Cast": np.trunc,
}
_COMPARED = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"})
# They jump with any of their inputs. Carriers keep the number and the order of the elements, logic broadcasts them.
_CARRIERS = CARRIERS | {"Not"}
_LOGIC = frozenset({"And", "Or", "Xor"})
_WHOLE = frozenset(code for name, code in CODES.items() if name.startswith(("bool", "int", "uint")))


@dataclass(frozen=True, kw_only=True)
class JumpingValue:
    """A value that jumps: the operator that computes it, its operands, and the target type of a Cast."""

    op: str
    inputs: tuple[str, ...]
    to: int = 0


@dataclass(frozen=True, kw_only=True)
class JumpingValues:
    """All values of a graph that jump."""

    by_value: Mapping[str, JumpingValue]  # the steps by value name
    constants: Mapping[str, Array]  # stored tensors that they compare with

    def operands(self, value: str) -> frozenset[str]:
        """All values that decide whether an element of this one may jump; none for a value that is no step."""
        step = self.by_value.get(value)
        if step is None:
            return frozenset()
        names = set(step.inputs)
        for name in step.inputs:
            names |= self.operands(name)
        return frozenset(names)

    def loose(self, value: str, values: Mapping[str, Array], noise: Callable[[str], float]) -> Array | None:
        """Which elements may lie on either side; None where none may, or where an operand is missing.

        Args:
            noise: by how much an element of an operand may be off.
        """
        step = self.by_value.get(value)
        if step is None:
            return None
        if step.op in _CARRIERS | _LOGIC and any(i in self.by_value for i in step.inputs):
            # The elements of a carrier or of a logic operator may jump where those of its inputs may.
            masks = [self.loose(i, values, noise) for i in step.inputs]
            return self._carried(step.op, masks, values.get(value))
        operands: list[Array] = []
        for name in step.inputs:
            operand = values.get(name, self.constants.get(name))
            # Integers have no noise: they jump nowhere.
            if operand is None or operand.dtype.kind != "f":
                return None
            operands.append(np.asarray(operand, np.float64))
        # A comparison sees the noise of both of its sides; stored constants have none.
        total_noise = sum(noise(i) for i in step.inputs if i not in self.constants)
        if step.op in _COMPARED:
            return np.asarray(np.abs(np.subtract(*operands)) <= total_noise)
        # A cast to bool jumps at 0 alone.
        if step.to == ir.DataType.BOOL:
            return np.asarray(np.abs(operands[0]) <= total_noise)
        function = _MONOTONIC[step.op]
        return np.asarray(function(operands[0] - total_noise) != function(operands[0] + total_noise))

    @staticmethod
    def _carried(op: str, masks: list[Array | None], result: Array | None) -> Array | None:
        present = [mask for mask in masks if mask is not None]
        if not present or result is None:
            return None
        if op in _CARRIERS:
            return present[0].reshape(result.shape)
        return np.broadcast_to(np.logical_or.reduce(np.broadcast_arrays(*present)), result.shape)


def steps(graph: ir.Graph) -> JumpingValues:
    """The values of the main graph that jump."""
    by_value: dict[str, JumpingValue] = {}
    constants: dict[str, Array] = {}
    for node in graph:
        to = node.attributes.get_int("to", 0)
        if node.op_type == "Cast":
            jumps = to in _WHOLE
        else:
            jumps = node.op_type in _MONOTONIC or node.op_type in _COMPARED
        carries = node.op_type in _LOGIC | _CARRIERS and any(name in by_value for name in names(node.inputs))
        if not (jumps or carries):
            continue
        # The second input of a Reshape is a shape.
        inputs = node.inputs
        if node.op_type in _CARRIERS:
            inputs = inputs[:1]
        by_value[first_output(node)] = JumpingValue(op=node.op_type, inputs=tuple(names(inputs)), to=to)
        for value in inputs:
            tensor = stored_tensor(value)
            if tensor is not None and value is not None:
                constants.setdefault(value.name or "", tensor.numpy())
    return JumpingValues(by_value=by_value, constants=constants)


def blamed(rows: Sequence[LayerDiff], graph: ir.Graph) -> tuple[LayerDiff, ...]:
    """Adds to the first row that failed, as `cause`, the last jump or moved index that it is computed from."""
    # Rows are in topological order: whatever is behind the first failure may follow from it.
    failed = [row for row in rows if not row.passed]
    if not failed:
        return tuple(rows)
    first = failed[0]
    indices = pointers(graph)
    moved: dict[str, LayerDiff] = {}
    for row in rows:
        if row.passed and (row.extra.get("flips") or (row.name in indices and row.max_abs)):
            moved[row.name] = row
    causes = behind(graph, first.name, moved)
    if not causes:
        return tuple(rows)
    nearest = moved[causes[-1]]
    if nearest.name in indices:
        jump = (
            f"{nearest.name} ({nearest.op}) points elsewhere, at values of {indices[nearest.name].data} that differ "
            f"by up to {nearest.max_abs:.2g}"
        )
    else:
        jump = (
            f"{nearest.extra['flips']} elements of {nearest.name} ({nearest.op}) lie on the other side of a threshold"
        )
    explained = list(rows)
    extra = {**first.extra, "cause": f"it follows from a jump: {jump}"}
    explained[explained.index(first)] = replace(first, extra=extra)
    return tuple(explained)


def behind(graph: ir.Graph, value: str, wanted: Iterable[str]) -> list[str]:
    """The wanted values that the value is computed from, in the order of `wanted`."""
    needed = {value}
    for node in reversed(graph):  # nodes stand behind what they read
        if not needed.isdisjoint(names(node.outputs)):
            needed.update(names(reads(node)))
    return [name for name in wanted if name in needed and name != value]
