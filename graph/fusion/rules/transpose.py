"""Transposes between two Reshapes, and Expands."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, parent, rank
from layerline.graph.analysis.symbolic_sizes import IrDim, Size, broadcast, product, sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole
from layerline.graph.fusion.rules.noop import permutation


@on("reshape-transpose", "Reshape")
def between(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape, Transpose, Reshape: axes joined, moved and split again is a Transpose of the single axes."""
    middle = parent(node.inputs[0], "Transpose")
    if middle is None:
        return None
    first = parent(middle.inputs[0], "Reshape")
    perm = permutation(middle)
    if first is None or perm is None:
        return None
    data = first.inputs[0]
    before = sizes(data)
    joined = sizes(first.outputs[0])
    if data is None or data.shape is None or before is None or joined is None:
        return None
    groups = _groups(list(data.shape), joined)
    if groups is None:
        return None
    order: list[int] = []
    for group in perm:
        order += groups[group]
    # The second Reshape may split the axes in another way than they were joined.
    if tuple(before[axis] for axis in order) != sizes(node.outputs[0]):
        return None
    sole(node.inputs[0], node)
    sole(middle.inputs[0], middle)
    return tape.op("Transpose", [first.inputs[0]], {"perm": order})


def _groups(single: Sequence[IrDim], joined: Sequence[Size]) -> list[list[int]] | None:
    """For each joined axis the consecutive axes whose sizes multiply to it."""
    groups: list[list[int]] = []
    axis = 0
    for size in joined:
        group: list[int] = []
        while axis < len(single) and (not group or product(single[a] for a in group) != size):
            group.append(axis)
            axis += 1
        if product(single[a] for a in group) != size:
            return None
        groups.append(group)
    if axis < len(single):
        return None
    return groups


@on("expand-broadcast", *BROADCASTING)
def drop_expand(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """The others broadcast to the same shape without it."""
    result = node.outputs[0].shape
    for index, value in enumerate(node.inputs):
        expand = parent(value, "Expand")
        if expand is None or result is None:
            continue
        inputs = list(node.inputs)
        inputs[index] = expand.inputs[0]
        # Another operand has to have the full size on each axis that the Expand stretches.
        shapes = [list(each.shape) for each in inputs if each is not None and each.shape is not None]
        if len(shapes) == len(inputs) and broadcast(shapes) == list(result):
            return tape.op(node.op_type, inputs, node.attributes)
    return None


@on("expand-sink", *(BROADCASTING | {"Cast", "Not"}))
def sink_expand(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Expand behind an operator that only joins it with scalars: one step nearer to being dropped."""
    expand: ir.Node | None = None
    inputs: list[ir.Value | None] = []
    for value in node.inputs:
        producer = parent(value, "Expand")
        if producer is not None:
            if expand is not None:
                return None
            expand = producer
            inputs.append(expand.inputs[0])
        elif constant(value) is not None and rank(value) == 0:
            inputs.append(value)
        else:
            return None
    if expand is None:
        return None
    # Another reader would keep the large value, and the small one would be work on top.
    sole(expand.outputs[0], node)
    small = tape.op(node.op_type, inputs, node.attributes)
    return tape.op("Expand", [small, expand.inputs[1]])
