"""Nodes whose output equals their input, whatever the input: same elements, same shape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, optional_input, rank
from layerline.graph.analysis.shape_functions import slice_bounds, takes_whole
from layerline.graph.analysis.shape_inference import Symbols
from layerline.graph.analysis.symbolic_sizes import sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on


def reshape(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape, Flatten, Squeeze, Unsqueeze and Expand to the shape a value has."""
    before = sizes(node.inputs[0])
    if before is not None and before == sizes(node.outputs[0]):
        return node.inputs[0]
    return None


def transpose(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    perm = permutation(node)
    if perm is not None and perm == tuple(range(len(perm))):
        return node.inputs[0]
    return None


def slice_all(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    value = node.inputs[0]
    bounds = slice_bounds(Symbols(), node)
    # Up to opset 9 the bounds are attributes, which no exporter of today writes.
    if work.opset < 10 or value is None or value.shape is None or bounds is None:
        return None
    for start, end, axis, step in zip(*bounds, strict=True):
        if not isinstance(axis, int) or not takes_whole(start, end, step, value.shape[axis]):
            return None
    return value


def pad(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    # Up to opset 10 the amounts are an attribute.
    if "pads" in node.attributes:
        amounts: Array | None = np.array(node.attributes.get_ints("pads"))
    else:
        amounts = constant(optional_input(node, 1))
    if amounts is None or amounts.any():
        return None
    return node.inputs[0]


def single(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Concat, Sum, Max, Min and Mean of one value."""
    if len(node.inputs) == 1:
        return node.inputs[0]
    return None


def arithmetic(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """x * 1, x / 1, x + 0, x - 0 and x ** 1, where the constant doesn't broadcast x to another shape."""
    sides: tuple[int, ...] = (0,)
    if node.op_type in ("Add", "Mul"):
        sides = (0, 1)
    neutral = 1
    if node.op_type in ("Add", "Sub"):
        neutral = 0
    for side in sides:
        value = node.inputs[side]
        amount = constant(node.inputs[1 - side])
        # An operator that changes the type does something.
        if value is None or amount is None or not (amount == neutral).all() or value.dtype != node.outputs[0].dtype:
            continue
        count = rank(value)
        # One number leaves the shape as it is, unless it comes with more axes.
        scalar = amount.size == 1 and count is not None and amount.ndim <= count
        if scalar or (sizes(value) is not None and sizes(value) == sizes(node.outputs[0])):
            return value
    return None


def permutation(node: ir.Node) -> tuple[int, ...] | None:
    """What a Transpose does; its default turns the axes round, which takes the rank."""
    perm = node.attributes.get("perm")
    if perm is not None:
        return tuple(perm.as_ints())
    count = rank(node.inputs[0])
    if count is None:
        return None
    return tuple(reversed(range(count)))


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
