"""Expand that the operator after it would do anyway, by broadcasting."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, parent, rank
from layerline.graph.analysis.size_algebra import Sizes, sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole


def drop(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """The others broadcast to the same shape without it."""
    wanted = sizes(node.outputs[0])
    for index, value in enumerate(node.inputs):
        expand = parent(value, "Expand")
        if expand is None or wanted is None:
            continue
        given = [*node.inputs[:index], expand.inputs[0], *node.inputs[index + 1 :]]
        if _broadcast([sizes(v) for v in given]) == wanted:
            return tape.op(node.op_type, given, node.attributes)
    return None


def sink(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Expand behind an operator that only joins it with scalars: one step nearer to being dropped."""
    expands = [v for v in node.inputs if parent(v, "Expand") is not None]
    others = [v for v in node.inputs if v not in expands]
    if len(expands) != 1 or any(v is None or constant(v) is None or rank(v) != 0 for v in others):
        return None
    expand = parent(expands[0], "Expand")
    assert expand is not None
    sole(expand.outputs[0], node)
    small = tape.op(node.op_type, [expand.inputs[0] if v in expands else v for v in node.inputs], node.attributes)
    return tape.op("Expand", [small, expand.inputs[1]])


def _broadcast(shapes: list[Sizes | None]) -> Sizes | None:
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes):
        return None
    length = max(map(len, known))
    out = []
    for axis in zip(*((1,) * (length - len(s)) + s for s in known), strict=True):
        wide = {size for size in axis if size != 1}
        if len(wide) > 1:
            return None
        out.append(wide.pop() if wide else 1)
    return tuple(out)


DROP = on("expand-broadcast", "Expand that broadcasting makes needless", BROADCASTING, drop)
SINK = on("expand-sink", "Expand moved behind an operator with scalars", BROADCASTING | {"Cast", "Not"}, sink)
