"""Expand that the operator after it would do anyway, by broadcasting."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, parent, rank
from layerline.graph.analysis.symbolic_sizes import broadcast
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole


def drop(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
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


DROP = on("expand-broadcast", "Expand that broadcasting makes needless", BROADCASTING, drop)
SINK = on("expand-sink", "Expand moved behind an operator with scalars", BROADCASTING | {"Cast", "Not"}, sink)
