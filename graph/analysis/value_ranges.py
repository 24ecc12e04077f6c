"""The least and greatest number of every value, as far as operators and stored tensors say it, whatever is fed.

Two questions are asked of the same arithmetic:

- Calibration asks what operators bound by construction (a Sigmoid, a Softmax, a Clip), so that the range of a Softmax
  reaches 1 also at lengths that no sample had. NaN is no matter there: it has no place in any range.
- Fusion asks in which values neither NaN nor infinity can appear (`finite`). A float input may hold anything, so what
  follows from one has no bound, not even behind a Sigmoid, which passes NaN on. Integers are bounded by their type;
  hence a language model, which is fed tokens, is bounded from its embeddings on. Each step allows for rounding, and
  nothing may come near the end of its type on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import LIMITS, constant, dim, optional_input, parent, rank, scalar

Range = tuple[float, float]
OPEN: Range = (-math.inf, math.inf)
# Sums of products, and what is worked out in several steps, stay this far from the end of the type and are off by less.
_HEADROOM = 2.0
# Some hardware takes the smallest numbers for 0.
_LEAST_DIVISOR = 1e-30


class Ranges:
    """The range of every value that a graph computes; infinite ends where nothing bounds it.

    Args:
        finite: whether a range also means that no run gives NaN or infinity.
    """

    def __init__(self, graph: ir.Graph, *, finite: bool) -> None:
        self.finite = finite
        self.computed: dict[ir.Value, Range] = {}
        for node in graph:
            computed = self._computed(node)
            for index, output in enumerate(node.outputs):
                # Further outputs are statistics, indices and masks, which the range does not hold for.
                self.computed[output] = OPEN
                if index == 0 or node.op_type == "Split":
                    self.computed[output] = computed

    def of(self, value: ir.Value | None) -> Range:
        """What was worked out, or what the type or the stored numbers say."""
        if value is None:
            return OPEN
        # Calibration has no use for bounds of integers, which are never quantised.
        if self.finite and value.dtype is not None:
            if value.dtype == ir.DataType.BOOL:
                return 0.0, 1.0
            # Twice as far as signed types reach, which leaves room for those without a sign.
            if value.dtype.is_integer():
                return -(2.0**value.dtype.bitwidth), 2.0**value.dtype.bitwidth
        stored = constant(value)
        if stored is None:
            return self.computed.get(value, OPEN)
        # ml_dtypes gives bfloat16 and the 8-bit floats the kind "V".
        if stored.dtype.kind not in "fiuV" or stored.size == 0:
            return OPEN
        if stored.dtype.kind == "V":
            stored = stored.astype(np.float32)
        low = float(stored.min())
        high = float(stored.max())
        # Of NaN both are NaN.
        if math.isfinite(low) and math.isfinite(high):
            return low, high
        return OPEN

    def magnitude(self, value: ir.Value | None) -> float:
        """The greatest |x|; inf where nothing bounds it."""
        return greatest(self.of(value))

    def _computed(self, node: ir.Node) -> Range:
        if node.domain != "":
            return OPEN
        if not self.finite:
            if node.op_type in _BY_CONSTRUCTION:
                return _BY_CONSTRUCTION[node.op_type](node, self)
            return OPEN
        kind = node.outputs[0].dtype
        if kind not in LIMITS or not all(map(self._is_bounded, node.inputs)):
            return OPEN
        if node.op_type in _ROUNDED_ONCE:
            return _rounded(_ROUNDED_ONCE[node.op_type](node, self), kind)
        low, high = OPEN
        if node.op_type in _IN_STEPS:
            high = _HEADROOM * _IN_STEPS[node.op_type](node, self)
            low = -high
        elif node.op_type in _NOT_ROUNDED:
            low, high = _BY_CONSTRUCTION[node.op_type](node, self)
        if max(-low, high) <= LIMITS[kind][0]:
            return low, high
        return OPEN

    def _is_bounded(self, value: ir.Value | None) -> bool:
        return value is None or all(map(math.isfinite, self.of(value)))

    def ends(self, values: Iterable[ir.Value | None]) -> tuple[list[float], list[float]]:
        """The lower ends and the upper ends of several values."""
        read = [self.of(value) for value in values]
        return [low for low, _ in read], [high for _, high in read]


def greatest(interval: Range) -> float:
    """The greatest |x| in a range."""
    low, high = interval
    return max(-low, high, 0.0)


def _rounded(exact: Range, kind: ir.DataType) -> Range:
    """The range after one correctly rounded operation: numbers just past the largest are rounded back to it."""
    largest, step = LIMITS[kind]
    ends: list[float] = []
    for end, outwards in ((exact[0], -1.0), (exact[1], 1.0)):
        # NaN is not less either.
        if not abs(end) < largest * (1 + step / 4):
            return OPEN
        ends.append(min(max(end + outwards * step * abs(end), -largest), largest))
    return ends[0], ends[1]


Step = Callable[[ir.Node, Ranges], Range]


def _share(_node: ir.Node, _ranges: Ranges) -> Range:
    return 0.0, 1.0


def _unit(_node: ir.Node, _ranges: Ranges) -> Range:
    return -1.0, 1.0


def _first(node: ir.Node, ranges: Ranges) -> Range:
    """Picks among the numbers of the first input, or averages them."""
    return ranges.of(node.inputs[0])


def _with_zero(node: ir.Node, ranges: Ranges) -> Range:
    """An average that may count padding."""
    low, high = ranges.of(node.inputs[0])
    return min(low, 0.0), max(high, 0.0)


def _any(node: ir.Node, ranges: Ranges) -> Range:
    lows, highs = ranges.ends(node.inputs)
    return min(lows), max(highs)


def _where(node: ir.Node, ranges: Ranges) -> Range:
    lows, highs = ranges.ends(node.inputs[1:])
    return min(lows), max(highs)


def _relu(node: ir.Node, ranges: Ranges) -> Range:
    low, high = ranges.of(node.inputs[0])
    return max(low, 0.0), max(high, 0.0)


def _clip(node: ir.Node, ranges: Ranges) -> Range:
    low, high = ranges.of(node.inputs[0])
    least, _ = ranges.of(optional_input(node, 1))
    _, greatest = ranges.of(optional_input(node, 2))
    return min(max(low, least), greatest), min(max(high, least), greatest)


def _least(node: ir.Node, ranges: Ranges) -> Range:
    lows, highs = ranges.ends(node.inputs)
    return min(lows), min(highs)


def _greatest(node: ir.Node, ranges: Ranges) -> Range:
    lows, highs = ranges.ends(node.inputs)
    return max(lows), max(highs)


def _abs(node: ir.Node, ranges: Ranges) -> Range:
    low, high = ranges.of(node.inputs[0])
    least = 0.0
    if low > 0 or high < 0:
        least = min(abs(low), abs(high))
    return least, max(-low, high)


def _neg(node: ir.Node, ranges: Ranges) -> Range:
    low, high = ranges.of(node.inputs[0])
    return -high, -low


def _sum(node: ir.Node, ranges: Ranges) -> Range:
    lows, highs = ranges.ends(node.inputs)
    return sum(lows), sum(highs)


def _difference(node: ir.Node, ranges: Ranges) -> Range:
    low, high = ranges.of(node.inputs[0])
    other_low, other_high = ranges.of(node.inputs[1])
    return low - other_high, high - other_low


def _product(node: ir.Node, ranges: Ranges) -> Range:
    a = ranges.of(node.inputs[0])
    b = ranges.of(node.inputs[1])
    # 0 times an infinite end would be NaN.
    if not all(map(math.isfinite, (*a, *b))):
        return OPEN
    # A product is extreme where both factors are.
    corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return min(corners), max(corners)


def _quotient(node: ir.Node, ranges: Ranges) -> Range:
    divisor = constant(node.inputs[1])
    if divisor is None:
        return OPEN
    least = float(np.abs(divisor.astype(np.float64)).min(initial=math.inf))
    if not least > _LEAST_DIVISOR:  # NaN is not greater either
        return OPEN
    most = ranges.magnitude(node.inputs[0]) / least
    return -most, most


def _cast(node: ir.Node, ranges: Ranges) -> Range:
    value = node.inputs[0]
    # Without `finite` nothing is known of integers, and casts to them wrap around.
    if not ranges.finite and (value is None or value.dtype is None or not value.dtype.is_floating_point()):
        return OPEN
    return _first(node, ranges)


def _resize(node: ir.Node, ranges: Ranges) -> Range:
    """Cubic interpolation overshoots; the two others do not."""
    if node.attributes.get_string("mode", "nearest") == "cubic":
        return OPEN
    return _with_zero(node, ranges)


def _pad(node: ir.Node, ranges: Ranges) -> Range:
    low, high = _first(node, ranges)
    fill = optional_input(node, 2)
    fill_low, fill_high = 0.0, 0.0
    if fill is not None:
        fill_low, fill_high = ranges.of(fill)
    return min(fill_low, low), max(fill_high, high)


def _matmul(node: ir.Node, ranges: Ranges) -> float:
    a = node.inputs[0]
    b = node.inputs[1]
    # What averages is as large as the largest at most, however many it averages.
    count: int | str | None = 1
    if not _averages(a):
        count = dim(a, -1)
    if not isinstance(count, int):
        return math.inf
    return count * ranges.magnitude(a) * ranges.magnitude(b)


def _gemm(node: ir.Node, ranges: Ranges) -> float:
    a = node.inputs[0]
    count = dim(a, -1)
    if node.attributes.get_int("transA", 0):
        count = dim(a, 0)
    if not isinstance(count, int):
        return math.inf
    most = count * ranges.magnitude(a) * ranges.magnitude(node.inputs[1])
    most *= abs(node.attributes.get_float("alpha", 1.0))
    bias = optional_input(node, 2)
    if bias is not None:
        most += ranges.magnitude(bias) * abs(node.attributes.get_float("beta", 1.0))
    return most


def _averages(value: ir.Value | None) -> bool:
    """Whether the last axis holds weights that add up to 1 at most: a Softmax, or one with some of them set to 0."""
    masked = parent(value, "Where")
    if masked is not None and scalar(masked.inputs[1]) == 0:
        value = masked.inputs[2]
    softmax = parent(value, "Softmax")
    count = rank(value)
    if softmax is None or count is None or count <= 1:
        return False
    return softmax.attributes.get_int("axis", 0) in (-1, count - 1)


def _normalised(node: ir.Node, ranges: Ranges) -> float:
    """d / sqrt(mean(d²) + epsilon) is at most the root of how many d there are."""
    count = _normalised_count(node)
    output = node.outputs[0]
    if count is None or output.dtype is None or node.attributes.get_float("epsilon", 1e-5) <= 0:
        return math.inf
    largest = ranges.magnitude(node.inputs[0])
    # Squares are summed on the way; d is x less a mean, so twice as large at most.
    if not _HEADROOM * count * 4.0 * largest * largest <= LIMITS[output.dtype][0]:
        return math.inf
    shift = 0.0
    bias = optional_input(node, 2)
    if bias is not None:
        shift = ranges.magnitude(bias)
    return math.sqrt(count) * ranges.magnitude(node.inputs[1]) + shift


def _normalised_count(node: ir.Node) -> int | None:
    """How many numbers one mean is taken over; None where that is not known."""
    axis: int = node.attributes.get_int("axis", -1)
    if axis >= 0:
        axis -= rank(node.inputs[0]) or 0
    if axis >= 0:
        return None
    count = 1
    for index in range(axis, 0):
        size = dim(node.inputs[0], index)
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _gelu(node: ir.Node, ranges: Ranges) -> float:
    return ranges.magnitude(node.inputs[0])


def _total(node: ir.Node, ranges: Ranges) -> float:
    return sum(map(ranges.magnitude, node.inputs))


_MOVES = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Gather", "GatherND"}
    | {"GatherElements", "Slice", "Split", "DepthToSpace", "SpaceToDepth", "MaxPool", "GlobalMaxPool", "Dropout"}
    | {"GlobalAveragePool", "ReduceMean", "ReduceMax", "ReduceMin"}
)
_BY_CONSTRUCTION: dict[str, Step] = {
    **dict.fromkeys(_MOVES, _first),
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
# Their numbers are those of their inputs, or correct to the last bit. Averages are not: what they add up on the way may
# pass the end of the type.
_NOT_ROUNDED = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Gather", "GatherND"}
    | {"GatherElements", "Slice", "Split", "Concat", "Where", "Relu", "Clip", "Min", "Max", "Abs", "Neg", "Sigmoid"}
    | {"HardSigmoid", "Softmax", "Tanh", "Erf", "Sin", "Cos"}
)
_ROUNDED_ONCE: dict[str, Step] = {
    "Add": _sum,
    "Sub": _difference,
    "Mul": _product,
    "Div": _quotient,
    "Cast": _cast,
}
# The greatest |x| as exact arithmetic has it, of what is rounded in several steps.
_IN_STEPS: dict[str, Callable[[ir.Node, Ranges], float]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Gelu": _gelu,
    "Sum": _total,
    "LayerNormalization": _normalised,
    "RMSNormalization": _normalised,
}
