"""Nodes whose output equals their input, whatever the input: same elements, same shape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, optional_input, rank
from layerline.graph.analysis.shape_inference import Symbols
from layerline.graph.analysis.symbolic_sizes import Size, sizes
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on

# Exporters write INT32_MAX or INT64_MAX as the end of a Slice that takes the rest.
_END = 2**31 - 1


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
    if work.opset < 10:
        return None
    shape = sizes(node.inputs[0])
    symbols = Symbols()
    starts, ends, axes, steps = (symbols.of(optional_input(node, index)) for index in range(1, 5))
    if shape is None or starts is None or ends is None or (len(node.inputs) > 4 and steps is None):
        return None
    if axes is None:
        if optional_input(node, 3) is not None:
            return None
        axes = tuple(range(len(starts)))
    for start, end, axis, step in zip(starts, ends, axes, steps or (1,) * len(axes), strict=True):
        if start != 0 or step != 1 or not isinstance(axis, int) or not _takes_rest(end, shape[axis]):
            return None
    return node.inputs[0]


def _takes_rest(end: Size, size: Size) -> bool:
    """Whether a Slice that starts with the first element and ends at `end` takes all of an axis."""
    if end == size:
        return True
    if not isinstance(end, int):
        return False
    if isinstance(size, int):
        return end >= size
    return end >= _END


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
