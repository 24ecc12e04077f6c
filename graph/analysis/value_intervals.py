"""The least and greatest number that operators allow, of values that are bounded by construction.

Such are outputs of a Sigmoid, a Softmax or a Clip, and what only moves or averages them. Calibration sees samples;
these bounds hold for every input, so that the range of a Softmax reaches 1 also at lengths that no sample had.
Other than in graph/analysis/value_bounds.py NaN is no matter here: it has no place in any range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant, optional_input

Interval = tuple[float, float]
_OPEN: Interval = (-math.inf, math.inf)


def intervals(graph: ir.Graph) -> dict[ir.Value, Interval]:
    """The interval of every value that the main graph computes; infinite ends where nothing bounds it."""
    computed: Intervals = {}
    for node in graph:
        interval = _OPEN
        if node.domain == "" and node.op_type in _STEPS:
            interval = _STEPS[node.op_type](node, computed)
        outputs = node.outputs
        if node.op_type != "Split":
            # Further outputs are indices, masks and the like, which the interval does not hold for.
            outputs = outputs[:1]
        computed.update((output, interval) for output in outputs)
    return computed


def magnitude(interval: Interval) -> float | None:
    """The greatest |x| in an interval; None where it has no end."""
    greatest = max(-interval[0], interval[1], 0.0)
    if math.isfinite(greatest):
        return greatest
    return None


Intervals = dict[ir.Value, Interval]
Step = Callable[[ir.Node, Intervals], Interval]


def _of(value: ir.Value | None, computed: Intervals) -> Interval:
    if value is None:
        return _OPEN
    stored = constant(value)
    if stored is None:
        return computed.get(value, _OPEN)
    # ml_dtypes gives bfloat16 and the 8-bit floats the kind "V".
    if stored.dtype.kind not in "fiuV" or stored.size == 0:
        return _OPEN
    wide = stored.astype(np.float64)
    if not np.isfinite(wide).all():
        return _OPEN
    return float(wide.min()), float(wide.max())


def _ends(values: Iterable[ir.Value | None], computed: Intervals) -> tuple[list[float], list[float]]:
    """The lower ends and the upper ends of several values."""
    read = [_of(value, computed) for value in values]
    return [low for low, _ in read], [high for _, high in read]


def _share(_node: ir.Node, _computed: Intervals) -> Interval:
    return 0.0, 1.0


def _unit(_node: ir.Node, _computed: Intervals) -> Interval:
    return -1.0, 1.0


def _first(node: ir.Node, computed: Intervals) -> Interval:
    """Picks among the numbers of the first input, or averages them."""
    return _of(node.inputs[0], computed)


def _with_zero(node: ir.Node, computed: Intervals) -> Interval:
    """An average that may count padding."""
    low, high = _of(node.inputs[0], computed)
    return min(low, 0.0), max(high, 0.0)


def _any(node: ir.Node, computed: Intervals) -> Interval:
    lows, highs = _ends(node.inputs, computed)
    return min(lows), max(highs)


def _where(node: ir.Node, computed: Intervals) -> Interval:
    lows, highs = _ends(node.inputs[1:], computed)
    return min(lows), max(highs)


def _relu(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _of(node.inputs[0], computed)
    return max(low, 0.0), max(high, 0.0)


def _clip(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _of(node.inputs[0], computed)
    least, _ = _of(optional_input(node, 1), computed)
    _, greatest = _of(optional_input(node, 2), computed)
    return min(max(low, least), greatest), min(max(high, least), greatest)


def _least(node: ir.Node, computed: Intervals) -> Interval:
    lows, highs = _ends(node.inputs, computed)
    return min(lows), min(highs)


def _greatest(node: ir.Node, computed: Intervals) -> Interval:
    lows, highs = _ends(node.inputs, computed)
    return max(lows), max(highs)


def _abs(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _of(node.inputs[0], computed)
    least = 0.0
    if low > 0 or high < 0:
        least = min(abs(low), abs(high))
    return least, max(-low, high)


def _neg(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _of(node.inputs[0], computed)
    return -high, -low


def _sum(node: ir.Node, computed: Intervals) -> Interval:
    lows, highs = _ends(node.inputs, computed)
    return sum(lows), sum(highs)


def _difference(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _of(node.inputs[0], computed)
    other_low, other_high = _of(node.inputs[1], computed)
    return low - other_high, high - other_low


def _product(node: ir.Node, computed: Intervals) -> Interval:
    a = _of(node.inputs[0], computed)
    b = _of(node.inputs[1], computed)
    # 0 times an infinite end would be NaN.
    if not all(map(math.isfinite, (*a, *b))):
        return _OPEN
    corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return min(corners), max(corners)


def _cast(node: ir.Node, computed: Intervals) -> Interval:
    value = node.inputs[0]
    if value is None or value.dtype is None or not value.dtype.is_floating_point():
        return _OPEN
    return _first(node, computed)


def _resize(node: ir.Node, computed: Intervals) -> Interval:
    """Cubic interpolation overshoots; the two others do not."""
    if node.attributes.get_string("mode", "nearest") == "cubic":
        return _OPEN
    return _with_zero(node, computed)


def _pad(node: ir.Node, computed: Intervals) -> Interval:
    low, high = _first(node, computed)
    fill = optional_input(node, 2)
    fill_low, fill_high = 0.0, 0.0
    if fill is not None:
        fill_low, fill_high = _of(fill, computed)
    return min(fill_low, low), max(fill_high, high)


_MOVES = (
    "Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Gather GatherND GatherElements Slice Split "
    "DepthToSpace SpaceToDepth MaxPool GlobalMaxPool GlobalAveragePool ReduceMean ReduceMax ReduceMin Dropout"
)
_STEPS: dict[str, Step] = {
    **dict.fromkeys(_MOVES.split(), _first),
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax", "Hardmax"), _share),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), _unit),
    **dict.fromkeys(("Add", "Sum"), _sum),
    "AveragePool": _with_zero,
    "Concat": _any,
    "Where": _where,
    "Relu": _relu,
    "Clip": _clip,
    "Min": _least,
    "Max": _greatest,
    "Abs": _abs,
    "Neg": _neg,
    "Sub": _difference,
    "Mul": _product,
    "Cast": _cast,
    "Resize": _resize,
    "Pad": _pad,
}
