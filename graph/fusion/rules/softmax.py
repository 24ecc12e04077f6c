"""Softmax written out with its maximum taken off, to the one operator; and the guard against NaN that can't be met."""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import name_of, parent, rank, reduced_axes, scalar
from layerline.graph.analysis.value_ranges import Ranges
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule, on, only_within

SINCE = 13


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """exp(x - max x) / sum exp(x - max x)."""
    exp = parent(node.inputs[0], "Exp")
    total = parent(node.inputs[1], "ReduceSum")
    if exp is None or total is None or total.inputs[0] is not exp.outputs[0]:
        return None
    shifted = parent(exp.inputs[0], "Sub")
    top: ir.Node | None = None
    if shifted is not None:
        top = parent(shifted.inputs[1], "ReduceMax")
    if shifted is None or top is None or top.inputs[0] is not shifted.inputs[0]:
        raise Declined(
            f"{node.outputs[0].name} doesn't take off the maximum, so Softmax would differ where exp overflows"
        )
    # Before opset 13 Softmax flattens everything behind its axis.
    axes = {_axis(total), _axis(top)}
    if len(axes) > 1 or None in axes or work.opset < SINCE:
        raise Declined(f"{node.outputs[0].name} is not over one axis that is kept, or below opset {SINCE}")
    only_within(node, shifted.inputs[0])
    return tape.op("Softmax", [shifted.inputs[0]], {"axis": axes.pop()})


def _axis(node: ir.Node) -> int | None:
    """The one axis that a reduction is over, from the front; None where it isn't one, or isn't kept."""
    count = rank(node.inputs[0])
    axes = reduced_axes(node)
    if count is None or axes is None or axes.size != 1 or not node.attributes.get_int("keepdims", 1):
        return None
    return int(axes.item()) % count


def guard(work: Rewriting) -> None:
    """Where(IsNaN(s), 0, s) after a Softmax whose scores are finite in every run.

    torch writes it for rows that a mask of -inf covers whole, and TensorRT's fused attention is lost to it. A row is
    NaN too when a score is NaN or a product has overflowed, so it goes only where neither can be (value_ranges.py).
    """
    for graph in work.graphs():
        ranges: Ranges | None = None
        for node in graph:
            if node.op_type != "Where" or node.domain != "":
                continue
            softmax = _guarded(node)
            if softmax is None:
                continue
            # Worked out at the first guard only: most graphs have none.
            if ranges is None:
                ranges = Ranges(graph, finite=True)
            work.attempt(GUARD.name, node, partial(_unguarded, scores=softmax.inputs[0], ranges=ranges))


def _guarded(node: ir.Node) -> ir.Node | None:
    """The Softmax, where the node replaces its NaN by 0."""
    test = parent(node.inputs[0], "IsNaN")
    softmax = parent(node.inputs[2], "Softmax")
    if test is None or softmax is None or test.inputs[0] is not node.inputs[2] or scalar(node.inputs[1]) != 0.0:
        return None
    return softmax


def _unguarded(
    node: ir.Node,
    tape: Tape,  # noqa: ARG001
    work: Rewriting,  # noqa: ARG001
    *,
    scores: ir.Value | None,
    ranges: Ranges,
) -> ir.Value | None:
    if not math.isfinite(ranges.magnitude(scores)):
        name = name_of(scores) or ""
        raise Declined(f"scores {name} of {node.outputs[0].name} may be NaN or infinite: {_cause(scores, ranges)}")
    return node.inputs[2]


def _cause(value: ir.Value | None, ranges: Ranges) -> str:
    """The first value upwards that nothing bounds while all it is computed from is bounded; or an input."""
    while value is not None:
        producer = value.producer()
        if producer is None:
            break
        unbounded = [v for v in producer.inputs if v is not None and not math.isfinite(ranges.magnitude(v))]
        # All that it is computed from is bounded, so the operator itself loses the bound.
        if not unbounded:
            return f"{producer.op_type} {value.name} is not bounded"
        value = unbounded[0]
    return f"{name_of(value) or 'a value'} can hold anything"


RULE = on("softmax", "softmax written out to Softmax (opset 13)", ["Div"], rewrite)
GUARD = Rule("softmax-nan-guard", "replacing NaN after a Softmax whose scores are finite in every run", guard)
