"""Expand that the operator after it would do anyway, by broadcasting."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, parent, rank
from layerline.graph.analysis.symbolic_sizes import Size, Sizes, sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole


def drop(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """The others broadcast to the same shape without it."""
    result = sizes(node.outputs[0])
    for index, value in enumerate(node.inputs):
        expand = parent(value, "Expand")
        if expand is None or result is None:
            continue
        inputs = list(node.inputs)
        inputs[index] = expand.inputs[0]
        # Another operand has to have the full size on each axis that the Expand stretches.
        if _broadcast([sizes(each) for each in inputs]) == result:
            return tape.op(node.op_type, inputs, node.attributes)
    return None


def sink(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
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


def _broadcast(shapes: list[Sizes | None]) -> Sizes | None:
    """The common shape; None where one is not known or two sizes other than 1 meet."""
    result: Sizes = ()
    for shape in shapes:
        if shape is None:
            return None
        length = max(len(result), len(shape))
        aligned_result = (1,) * (length - len(result)) + result
        aligned_shape = (1,) * (length - len(shape)) + shape
        joined: list[Size] = []
        for a, b in zip(aligned_result, aligned_shape, strict=True):
            if a != b and 1 not in (a, b):
                return None
            if a == 1:
                joined.append(b)
            else:
                joined.append(a)
        result = tuple(joined)
    return result


DROP = on("expand-broadcast", "Expand that broadcasting makes needless", BROADCASTING, drop)
SINK = on("expand-sink", "Expand moved behind an operator with scalars", BROADCASTING | {"Cast", "Not"}, sink)
