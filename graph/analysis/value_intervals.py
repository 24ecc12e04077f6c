"""The least and greatest number that operators allow, of values that are bounded by construction.

Such are outputs of a Sigmoid, a Softmax or a Clip, and what only moves or averages them. Calibration sees samples;
these bounds hold for every input, so that the range of a Softmax reaches 1 also at lengths that no sample had.
Other than in graph/analysis/value_bounds.py NaN is no matter here: it has no place in any range.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant

Interval = tuple[float, float]
_OPEN: Interval = (-math.inf, math.inf)


def intervals(graph: ir.Graph) -> dict[ir.Value, Interval]:
    """The interval of every value that the main graph computes; infinite ends where nothing bounds it."""
    known: dict[ir.Value, Interval] = {}
    for node in graph:
        step = _STEPS.get(node.op_type) if node.domain == "" else None
        interval = _OPEN if step is None else step(node, known)
        # Further outputs are indices, masks and the like, but for the pieces of a Split.
        for output in node.outputs if node.op_type == "Split" else node.outputs[:1]:
            known[output] = interval
    return known


def magnitude(interval: Interval) -> float | None:
    """The greatest |x| in an interval; None where it has no end."""
    greatest = max(-interval[0], interval[1], 0.0)
    return greatest if math.isfinite(greatest) else None


Known = dict[ir.Value, Interval]
Step = Callable[[ir.Node, Known], Interval]


def _of(value: ir.Value | None, known: Known) -> Interval:
    if value is None:
        return _OPEN
    stored = constant(value)
    if stored is None:
        return known.get(value, _OPEN)
    if stored.dtype.kind not in "fiuV" or stored.size == 0:
        return _OPEN
    wide = stored.astype(np.float64)
    return (float(wide.min()), float(wide.max())) if np.isfinite(wide).all() else _OPEN


def _share(_node: ir.Node, _known: Known) -> Interval:
    return 0.0, 1.0


def _unit(_node: ir.Node, _known: Known) -> Interval:
    return -1.0, 1.0


def _first(node: ir.Node, known: Known) -> Interval:
    """Picks among the numbers of the first input, or averages them."""
    return _of(node.inputs[0], known)


def _with_zero(node: ir.Node, known: Known) -> Interval:
    """An average that may count padding."""
    low, high = _of(node.inputs[0], known)
    return min(low, 0.0), max(high, 0.0)


def _any(node: ir.Node, known: Known) -> Interval:
    read = [_of(v, known) for v in node.inputs[1 if node.op_type == "Where" else 0 :]]
    return min(low for low, _ in read), max(high for _, high in read)


def _relu(node: ir.Node, known: Known) -> Interval:
    low, high = _of(node.inputs[0], known)
    return max(low, 0.0), max(high, 0.0)


def _clip(node: ir.Node, known: Known) -> Interval:
    value, lower, upper = [*node.inputs, None, None][:3]
    low, high = _of(value, known)
    least, greatest = _of(lower, known)[0], _of(upper, known)[1]
    return min(max(low, least), greatest), min(max(high, least), greatest)


def _least(node: ir.Node, known: Known) -> Interval:
    read = [_of(v, known) for v in node.inputs]
    return min(low for low, _ in read), min(high for _, high in read)


def _greatest(node: ir.Node, known: Known) -> Interval:
    read = [_of(v, known) for v in node.inputs]
    return max(low for low, _ in read), max(high for _, high in read)


def _abs(node: ir.Node, known: Known) -> Interval:
    low, high = _of(node.inputs[0], known)
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(-low, high)


def _neg(node: ir.Node, known: Known) -> Interval:
    low, high = _of(node.inputs[0], known)
    return -high, -low


def _sum(node: ir.Node, known: Known) -> Interval:
    read = [_of(v, known) for v in node.inputs]
    return sum(low for low, _ in read), sum(high for _, high in read)


def _difference(node: ir.Node, known: Known) -> Interval:
    (a, b), (c, d) = (_of(v, known) for v in node.inputs)
    return a - d, b - c


def _product(node: ir.Node, known: Known) -> Interval:
    a, b = (_of(v, known) for v in node.inputs)
    ends = [x * y for x in a for y in b]
    return (min(ends), max(ends)) if all(map(math.isfinite, (*a, *b))) else _OPEN


def _cast(node: ir.Node, known: Known) -> Interval:
    same = node.inputs[0] is not None and node.inputs[0].dtype is not None and node.inputs[0].dtype.is_floating_point()
    return _first(node, known) if same else _OPEN


def _resize(node: ir.Node, known: Known) -> Interval:
    """Cubic interpolation overshoots; the two others do not."""
    return _OPEN if node.attributes.get_string("mode", "nearest") == "cubic" else _with_zero(node, known)


def _pad(node: ir.Node, known: Known) -> Interval:
    filled = node.inputs[2] if len(node.inputs) > 2 else None
    low, high = (0.0, 0.0) if filled is None else _of(filled, known)
    return min(low, _first(node, known)[0]), max(high, _first(node, known)[1])


_MOVES = (
    "Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Gather GatherND GatherElements Slice Split "
    "DepthToSpace SpaceToDepth MaxPool GlobalMaxPool GlobalAveragePool ReduceMean ReduceMax ReduceMin Dropout"
)
_STEPS: dict[str, Step] = {
    **dict.fromkeys(_MOVES.split(), _first),
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax", "Hardmax"), _share),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), _unit),
    **dict.fromkeys(("Concat", "Where"), _any),
    **dict.fromkeys(("Add", "Sum"), _sum),
    "AveragePool": _with_zero,
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
