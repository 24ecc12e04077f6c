"""Nodes whose output equals their input, whatever the input: same elements, same shape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, rank
from layerline.graph.analysis.size_algebra import sizes
from layerline.graph.analysis.symbolic_shapes import Symbols
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on

_END = 2**31 - 1


def reshape(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape, Flatten, Squeeze, Unsqueeze and Expand to the shape a value has."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    return node.inputs[0] if before is not None and before == after else None


def transpose(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    perm = permutation(node)
    return node.inputs[0] if perm is not None and perm == tuple(range(len(perm))) else None


def slice_all(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    if work.opset < 10:
        return None
    symbols, of = Symbols(), sizes(node.inputs[0])
    starts, ends, axes, steps = (symbols.of(v) for v in (*node.inputs[1:], None, None)[:4])
    if of is None or starts is None or ends is None or (len(node.inputs) > 4 and steps is None):
        return None
    if len(node.inputs) > 3 and node.inputs[3] is not None and axes is None:
        return None
    axes = axes if axes is not None else tuple(range(len(starts)))
    whole = all(
        start == 0 and step == 1 and isinstance(axis, int) and (end == of[axis] or _beyond(end, of[axis]))
        for start, end, axis, step in zip(starts, ends, axes, steps or (1,) * len(axes), strict=True)
    )
    return node.inputs[0] if whole else None


def _beyond(end: int | str, size: int | str) -> bool:
    return isinstance(end, int) and end >= (size if isinstance(size, int) else _END)


def pad(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    given = node.attributes.get_ints("pads")
    amounts = np.array(given) if given is not None else constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return node.inputs[0] if amounts is not None and not amounts.any() else None


def single(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Concat, Sum, Max, Min and Mean of one value."""
    return node.inputs[0] if len(node.inputs) == 1 else None


def arithmetic(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """x * 1, x / 1, x + 0, x - 0 and x ** 1, where the constant doesn't broadcast x to another shape."""
    sides = (0, 1) if node.op_type in ("Add", "Mul") else (0,)
    for side in sides:
        value, amount = node.inputs[side], constant(node.inputs[1 - side])
        neutral = 0 if node.op_type in ("Add", "Sub") else 1
        if value is None or amount is None or not (amount == neutral).all() or value.dtype != node.outputs[0].dtype:
            continue
        count = rank(value)
        scalar = amount.size == 1 and count is not None and amount.ndim <= count
        if scalar or (sizes(value) is not None and sizes(value) == sizes(node.outputs[0])):
            return value
    return None


def permutation(node: ir.Node) -> tuple[int, ...] | None:
    """What a Transpose does; its default turns the axes round, which takes the rank."""
    if (perm := node.attributes.get("perm")) is not None:
        return tuple(perm.as_ints())
    count = rank(node.inputs[0])
    return tuple(reversed(range(count))) if count is not None else None


RESHAPE = on(
    "noop-reshape",
    "Reshape, Flatten, Squeeze, Unsqueeze and Expand to the shape a value has",
    ["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand"],
    reshape,
)
TRANSPOSE = on("noop-transpose", "Transpose that keeps the order", ["Transpose"], transpose)
SLICE = on("noop-slice", "Slice that takes everything", ["Slice"], slice_all)
PAD = on("noop-pad", "Pad by nothing", ["Pad"], pad)
SINGLE = on(
    "noop-single", "Concat, Sum, Max, Min and Mean of one value", ["Concat", "Sum", "Max", "Min", "Mean"], single
)
ARITHMETIC = on(
    "noop-arithmetic", "x * 1, x / 1, x + 0, x - 0, x ** 1", ["Add", "Sub", "Mul", "Div", "Pow"], arithmetic
)
