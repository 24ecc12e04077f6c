"""What the inputs of a body can be relied on to look like: one that a Loop carries may change shape from turn to turn.

A file declares shapes for them, which no runtime checks. What is known instead: a Loop counts in scalars, a Scan hands
out slices of its inputs, and what is carried keeps its first shape where every turn gives that shape back. The latter
is induction over turns, so it must hold for all carried values together: they are assumed to keep their shapes, and
whichever turns out not to is given up, until the rest agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import subgraphs
from layerline.graph.analysis.size_algebra import sizes

Shapes = dict[ir.Value, "ir.Shape | None"]


def infer_bodies(node: ir.Node, infer: Callable[[ir.Graph], None]) -> None:
    """Works out the shapes inside every body of a node, and leaves on the bodies' inputs only shapes that hold."""
    for body in subgraphs(node):
        given, carried = _given(node, body), _carried(node, body)
        assumed: Shapes = {inner: _copied(outer) for outer, inner, _ in carried}
        while True:
            for value in body.inputs:
                value.shape = assumed.get(value, given.get(value))
            infer(body)
            kept = {inner: _kept(assumed[inner], end) for _, inner, end in carried}
            if kept == assumed:
                break
            assumed = kept


def _kept(shape: ir.Shape | None, end: ir.Value) -> ir.Shape | None:
    """What of an assumed shape a turn gives back."""
    named = sizes(end)
    if shape is None or named is None or len(named) != len(shape):
        return None
    before = [d if isinstance(d, int) else d.value for d in shape]
    return ir.Shape([d if d == e else None for d, e in zip(before, named, strict=True)])


def _given(node: ir.Node, body: ir.Graph) -> Shapes:
    """Inputs whose shape the operator itself says."""
    if node.domain == "" and node.op_type == "Loop":
        return {value: ir.Shape(()) for value in body.inputs[:2]}
    if node.domain != "" or node.op_type != "Scan" or len(node.inputs) != len(body.inputs):
        return {}
    count: int = node.attributes.get_int("num_scan_inputs", 0)
    first = len(node.inputs) - count
    axes: Sequence[int] = node.attributes.get_ints("scan_input_axes") or [0] * count
    return {body.inputs[first + i]: _without(node.inputs[first + i], axis) for i, axis in enumerate(axes[:count])}


def _carried(node: ir.Node, body: ir.Graph) -> list[tuple[ir.Value | None, ir.Value, ir.Value]]:
    """What is carried from turn to turn: its first value, the input that holds it, the output that gives the next."""
    if node.domain == "" and node.op_type == "Loop":
        inner, ends, first = body.inputs[2:], body.outputs[1:], node.inputs[2:]
    elif node.domain == "" and node.op_type == "Scan" and len(node.inputs) == len(body.inputs):
        count = len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)
        inner, ends, first = body.inputs[:count], body.outputs[:count], node.inputs[:count]
    else:
        return []
    return list(zip(first, inner, ends, strict=False))


def _copied(value: ir.Value | None) -> ir.Shape | None:
    named = sizes(value)
    return None if named is None else ir.Shape(named)


def _without(value: ir.Value | None, axis: int) -> ir.Shape | None:
    named = sizes(value)
    if named is None or not -len(named) <= axis < len(named):
        return None
    return ir.Shape([size for i, size in enumerate(named) if i != axis % len(named)])
