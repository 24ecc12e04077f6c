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
from layerline.graph.analysis.symbolic_sizes import sizes

Shapes = dict[ir.Value, "ir.Shape | None"]


def infer_bodies(node: ir.Node, infer: Callable[[ir.Graph], None]) -> None:
    """Works out the shapes inside every body of a node, and leaves on the bodies' inputs only shapes that hold."""
    for body in subgraphs(node):
        fixed = _fixed_shapes(node, body)
        carried = _carried(node, body)
        assumed: Shapes = {}
        for outer, inner, _ in carried:
            named = sizes(outer)
            assumed[inner] = None if named is None else ir.Shape(named)
        # Each round gives up at least one size, so the loop ends.
        while True:
            for value in body.inputs:
                value.shape = assumed.get(value, fixed.get(value))
            infer(body)
            # Only what a turn gives back as it was may be relied on in the next turn.
            confirmed = {inner: _confirmed(assumed[inner], end) for _, inner, end in carried}
            if confirmed == assumed:
                break
            assumed = confirmed


def _confirmed(shape: ir.Shape | None, end: ir.Value) -> ir.Shape | None:
    """What of an assumed shape a turn gives back."""
    named = sizes(end)
    if shape is None or named is None or len(named) != len(shape):
        return None
    return ir.Shape([size if dim == size else None for dim, size in zip(shape, named, strict=True)])


def _fixed_shapes(node: ir.Node, body: ir.Graph) -> Shapes:
    """Inputs whose shape the operator itself says."""
    if node.domain == "" and node.op_type == "Loop":
        return {value: ir.Shape(()) for value in body.inputs[:2]}
    if node.domain != "" or node.op_type != "Scan" or len(node.inputs) != len(body.inputs):
        return {}
    count: int = node.attributes.get_int("num_scan_inputs", 0)
    first = len(node.inputs) - count
    axes: Sequence[int] = node.attributes.get_ints("scan_input_axes") or [0] * count
    shapes: Shapes = {}
    for index, axis in enumerate(axes[:count], start=first):
        named = sizes(node.inputs[index])
        if named is not None and -len(named) <= axis < len(named):
            axis %= len(named)
            shapes[body.inputs[index]] = ir.Shape(named[:axis] + named[axis + 1 :])
    return shapes


def _carried(node: ir.Node, body: ir.Graph) -> list[tuple[ir.Value | None, ir.Value, ir.Value]]:
    """What is carried from turn to turn: its first value, the input that holds it, the output that gives the next."""
    if node.domain == "" and node.op_type == "Loop":
        # A Loop's body takes the turn and the condition first, and gives the condition first.
        return list(zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], strict=False))
    if node.domain == "" and node.op_type == "Scan" and len(node.inputs) == len(body.inputs):
        count = len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)
        return list(zip(node.inputs[:count], body.inputs[:count], body.outputs[:count], strict=False))
    return []
