"""Transposes between two Reshapes, through elementwise operators until they cancel, and into Gemm; and Expands."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, parent, rank
from layerline.graph.analysis.symbolic_sizes import Dim, Size, broadcast, product, sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole
from layerline.graph.fusion.rules.noop import permutation

# One input, one output, element by element.
UNARY = frozenset(
    {"Abs", "Cast", "Ceil", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsNaN"}
    | {"LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus"}
    | {"Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu"}
)
# How many operators up a Transpose is followed, which bounds the time of graphs that branch at each.
DEPTH = 12


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


def _groups(single: Sequence[Dim], joined: Sequence[Size]) -> list[list[int]] | None:
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


@on("transpose-cancel", "Transpose")
def cancel(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """A Transpose pulled up through elementwise operators, where it meets its inverse and none is left over.

    Every path upwards must end in a Transpose that it cancels, or in a constant; so the graph loses Transposes and
    gains nothing.
    """
    perm = permutation(node)
    inner = node.inputs[0]
    if perm is None or inner is None or not _is_elementwise(inner.producer()):
        return None
    pulled = _pulled(inner, perm, node, tape, DEPTH)
    return None if pulled is None else pulled[0]


def _is_elementwise(node: ir.Node | None) -> bool:
    return node is not None and node.domain == "" and node.op_type in UNARY | BROADCASTING | {"Clip"}


def _pulled(
    value: ir.Value, perm: tuple[int, ...], reader: ir.Node, tape: Tape, depth: int
) -> tuple[ir.Value, int] | None:
    """`value` transposed by `perm`, and how many Transposes cancel for it; None where one would be left over."""
    array = constant(value)
    # One number that adds no axis stays as it is; a constant with every axis is turned along with the rest.
    if array is not None and array.size == 1 and array.ndim <= len(perm):
        return value, 0
    if array is not None and array.ndim == len(perm):
        return tape.initializer(ir.tensor(array.transpose(perm).copy()), f"{value.name}/transposed"), 0
    node = value.producer()
    # Another reader would need a Transpose of its own.
    if node is None or depth == 0 or any(c is not reader for c in value.consumers()) or value.is_graph_output():
        return None
    if rank(value) != len(perm):
        return None
    if node.op_type == "Transpose" and node.domain == "":
        first = permutation(node)
        if first is None or [first[axis] for axis in perm] != list(range(len(perm))):
            return None
        assert node.inputs[0] is not None
        return node.inputs[0], 1
    if not _is_elementwise(node):
        return None
    inputs = list(node.inputs)
    # The bounds of Clip are scalars, which have no axes to move.
    tensors = inputs[:1] if node.op_type == "Clip" else inputs
    total = 0
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        pulled = _pulled(tensor, perm, node, tape, depth - 1)
        if pulled is None:
            return None
        inputs[index], cancelled = pulled
        total += cancelled
    # Of constants alone nothing cancels.
    if total == 0:
        return None
    return tape.op(node.op_type, inputs, node.attributes), total


@on("transpose-gemm", "Gemm")
def into_gemm(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Gemm transposes its factors itself."""
    flags = {"transA": node.attributes.get_int("transA", 0), "transB": node.attributes.get_int("transB", 0)}
    inputs = list(node.inputs)
    changed = False
    for index, flag in enumerate(flags):
        transpose = parent(node.inputs[index], "Transpose")
        if transpose is not None and permutation(transpose) == (1, 0):
            inputs[index] = transpose.inputs[0]
            flags[flag] = 1 - flags[flag]
            changed = True
    if not changed:
        return None
    return tape.op("Gemm", inputs, {**node.attributes, **flags})


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
