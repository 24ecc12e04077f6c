"""Softmax written out with its maximum taken off, to the one operator; and the guard against NaN that can't be met."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.facts import constant, parent, rank, scalar
from layerline.graph.rewrite import Rewriting
from layerline.graph.rule import Declined, on, only_within

SINCE = 13
FLOAT_MAX = float(np.finfo(np.float32).max)


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """exp(x - max x) / sum exp(x - max x)."""
    exp, total = parent(node.inputs[0], "Exp"), parent(node.inputs[1], "ReduceSum")
    if exp is None or total is None or total.inputs[0] is not exp.outputs[0]:
        return None
    shifted = parent(exp.inputs[0], "Sub")
    top = parent(shifted.inputs[1], "ReduceMax") if shifted is not None else None
    if shifted is None or top is None or top.inputs[0] is not shifted.inputs[0]:
        raise Declined(
            f"{node.outputs[0].name} doesn't take off the maximum, so Softmax would differ where exp overflows"
        )
    axes = {_axis(total), _axis(top)}
    if len(axes) > 1 or None in axes or work.opset < SINCE:
        raise Declined(f"{node.outputs[0].name} is not over one axis that is kept, or below opset {SINCE}")
    only_within(node, shifted.inputs[0])
    return tape.op("Softmax", [shifted.inputs[0]], {"axis": axes.pop()})


def _axis(node: ir.Node) -> int | None:
    count = rank(node.inputs[0])
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else np.array(node.attributes.get_ints("axes") or ())
    if count is None or given is None or given.size != 1 or not node.attributes.get_int("keepdims", 1):
        return None
    return int(given.item()) % count


def guard(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Where(IsNaN(s), 0, s) after a Softmax whose scores are finite.

    torch writes it for rows that a mask of -inf covers whole. Where no mask can be -inf, a row is NaN only when a
    product has overflowed already, and TensorRT's fused attention is lost to the guard.
    """
    test = parent(node.inputs[0], "IsNaN")
    softmax = parent(node.inputs[2], "Softmax")
    if test is None or softmax is None or test.inputs[0] is not node.inputs[2] or scalar(node.inputs[1]) != 0.0:
        return None
    if _bound(softmax.inputs[0]) > FLOAT_MAX:
        raise Declined(
            f"scores {softmax.inputs[0].name if softmax.inputs[0] else ''} of {node.outputs[0].name} may be -inf"
        )
    return node.inputs[2]


def _bound(value: ir.Value | None, depth: int = 8) -> float:
    """How large the constants can make a value whose products of matrices are of ordinary size; inf where anything can.

    Two masks of the most negative number, each finite, add up to -inf: so it is sums that are bounded.
    """
    stored = constant(value)
    if stored is not None:
        return float(abs(stored).max(initial=0))
    node = value.producer() if value is not None else None
    if node is None or node.domain != "" or depth == 0:
        return math.inf
    if node.op_type in ("MatMul", "Gemm"):
        return 0.0
    if node.op_type in ("Reshape", "Transpose", "Expand", "Unsqueeze", "Squeeze", "Identity", "Slice"):
        return _bound(node.inputs[0], depth - 1)
    if node.op_type == "Div":
        by = scalar(node.inputs[1])
        return _bound(node.inputs[0], depth - 1) / abs(by) if by else math.inf
    if node.op_type not in ("Add", "Sub", "Mul", "Where"):
        return math.inf
    parts = [_bound(v, depth - 1) for v in node.inputs[1 if node.op_type == "Where" else 0 :]]
    if node.op_type == "Mul":
        return parts[0] * parts[1] if math.isfinite(max(parts)) else math.inf
    return max(parts) if node.op_type == "Where" else sum(parts)


RULE = on("softmax", "softmax written out to Softmax (opset 13)", ["Div"], rewrite)
GUARD = on("softmax-nan-guard", "replacing NaN after a Softmax whose scores are finite", ["Where"], guard)
