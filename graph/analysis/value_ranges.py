"""The least and greatest number of every value, as far as operators and stored tensors say it, whatever is fed.

- Calibration asks what operators bound by construction (a Sigmoid, a Softmax, a Clip), so that the range of a Softmax
  reaches 1 also at lengths that no sample had. NaN is no matter there: it has no place in any range.
- Fusion asks in which values neither NaN nor infinity can appear (`finite`). A float input may hold anything, so what
  follows from one has no bound, not even behind a Sigmoid, which passes NaN on. Integers are bounded by their type, so
  a language model, which is fed tokens, is bounded from its embeddings on. Each step allows for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import LIMITS, constant, dim, optional_input, parent, rank, scalar

Interval = tuple[float, float]
OPEN: Interval = (-math.inf, math.inf)
# Sums of products, and what is worked out in several steps, stay this far from the end of the type and are off by less.
_HEADROOM = 2.0
# Some hardware takes the smallest numbers for 0.
_LEAST_DIVISOR = 1e-30


class ValueRanges:
    """The range of every value that a graph computes; infinite ends where nothing bounds it.

    With `finite`, a range also means that no run gives NaN or infinity.
    """

    def __init__(self, graph: ir.Graph, *, finite: bool) -> None:
        self.finite = finite
        self.computed: dict[ir.Value, Interval] = {}
        for node in graph:
            computed = self._computed(node)
            for index, output in enumerate(node.outputs):
                # Further outputs are statistics, indices and masks, which the range does not hold for.
                self.computed[output] = computed if index == 0 or node.op_type == "Split" else OPEN

    def of(self, value: ir.Value | None) -> Interval:
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

    def _computed(self, node: ir.Node) -> Interval:
        if node.domain != "":
            return OPEN
        if not self.finite:
            return self._by_construction(node)
        kind = node.outputs[0].dtype
        if kind not in LIMITS or not all(map(self._is_bounded, node.inputs)):
            return OPEN
        if node.op_type in ("Add", "Sub", "Mul", "Div", "Cast"):
            return _rounded(self._by_construction(node), kind)
        low, high = OPEN
        if node.op_type in _IN_STEPS:
            high = _HEADROOM * _IN_STEPS[node.op_type](node, self)
            low = -high
        elif node.op_type in _NOT_ROUNDED:
            low, high = self._by_construction(node)
        if max(-low, high) <= LIMITS[kind][0]:
            return low, high
        return OPEN

    def _is_bounded(self, value: ir.Value | None) -> bool:
        return value is None or all(map(math.isfinite, self.of(value)))

    def _by_construction(self, node: ir.Node) -> Interval:
        """The range that the operator gives numbers of these ranges, in exact arithmetic."""
        op = node.op_type
        if op in _MOVES or (op == "Cast" and self._casts_floats(node)):
            return self.of(node.inputs[0])
        # Cubic interpolation overshoots; the two others do not.
        interpolates = op == "Resize" and node.attributes.get_string("mode", "nearest") != "cubic"
        pads_with_zero = op == "AveragePool" or (op == "Pad" and optional_input(node, 2) is None)
        if interpolates or pads_with_zero:
            low, high = self.of(node.inputs[0])
            return min(low, 0.0), max(high, 0.0)
        if op == "Div" and self.finite:
            return self._quotient(node)
        if op not in _ENDS:
            return _FIXED.get(op, OPEN)
        ranges = [self.of(value) for value in node.inputs]
        return _ENDS[op]([low for low, _ in ranges], [high for _, high in ranges])

    def _casts_floats(self, node: ir.Node) -> bool:
        """Whether a Cast keeps the range: without `finite` nothing is known of integers, and casts to them wrap."""
        value = node.inputs[0]
        return self.finite or (value is not None and value.dtype is not None and value.dtype.is_floating_point())

    def _quotient(self, node: ir.Node) -> Interval:
        divisor = constant(node.inputs[1])
        if divisor is None:
            return OPEN
        least = float(np.abs(divisor.astype(np.float64)).min(initial=math.inf))
        if not least > _LEAST_DIVISOR:  # NaN is not greater either
            return OPEN
        most = self.magnitude(node.inputs[0]) / least
        return -most, most


def greatest(interval: Interval) -> float:
    """The greatest |x| in a range."""
    low, high = interval
    return max(-low, high, 0.0)


def _rounded(exact: Interval, kind: ir.DataType) -> Interval:
    """The range after one correctly rounded operation: numbers just past the largest are rounded back to it."""
    largest, step = LIMITS[kind]
    ends: list[float] = []
    for end, outwards in ((exact[0], -1.0), (exact[1], 1.0)):
        # NaN is not less either.
        if not abs(end) < largest * (1 + step / 4):
            return OPEN
        ends.append(min(max(end + outwards * step * abs(end), -largest), largest))
    return ends[0], ends[1]


Ends = list[float]


def _product(low: Ends, high: Ends) -> Interval:
    # 0 times an infinite end would be NaN.
    if not all(map(math.isfinite, (*low, *high))):
        return OPEN
    # A product is extreme where both factors are.
    corners = (low[0] * low[1], low[0] * high[1], high[0] * low[1], high[0] * high[1])
    return min(corners), max(corners)


def _clip(low: Ends, high: Ends) -> Interval:
    # A bound that is left out leaves that side open.
    least = [*low[1:2], -math.inf][0]
    greatest = [*high[2:3], math.inf][0]
    return min(max(low[0], least), greatest), min(max(high[0], least), greatest)


def _matmul(node: ir.Node, ranges: ValueRanges) -> float:
    a = node.inputs[0]
    b = node.inputs[1]
    # What averages is as large as the largest at most, however many it averages.
    count = 1 if _averages(a) else dim(a, -1)
    if not isinstance(count, int):
        return math.inf
    return count * ranges.magnitude(a) * ranges.magnitude(b)


def _gemm(node: ir.Node, ranges: ValueRanges) -> float:
    a = node.inputs[0]
    count = dim(a, 0) if node.attributes.get_int("transA", 0) else dim(a, -1)
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


def _normalised(node: ir.Node, ranges: ValueRanges) -> float:
    """d / sqrt(mean(d²) + epsilon) is at most the root of how many d there are."""
    axis: int = node.attributes.get_int("axis", -1)
    if axis >= 0:
        axis -= rank(node.inputs[0]) or 0
    # How many numbers one mean is taken over.
    sizes = [dim(node.inputs[0], index) for index in range(axis, 0)]
    numbers = [size for size in sizes if isinstance(size, int)]
    count = math.prod(numbers)
    output = node.outputs[0]
    if not sizes or len(numbers) < len(sizes):
        return math.inf
    if output.dtype is None or node.attributes.get_float("epsilon", 1e-5) <= 0:
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


_MOVES = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Gather", "GatherND"}
    | {"GatherElements", "Slice", "Split", "DepthToSpace", "SpaceToDepth", "MaxPool", "GlobalMaxPool", "Dropout"}
    | {"GlobalAveragePool", "ReduceMean", "ReduceMax", "ReduceMin"}
)
"""They pick among the numbers of the first input, or average them."""
_FIXED = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax", "Hardmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), (-1.0, 1.0)),
}
# From the lower and the upper ends of the inputs to those of the output.
_ENDS: dict[str, Callable[[Ends, Ends], Interval]] = {
    **dict.fromkeys(("Add", "Sum"), lambda low, high: (sum(low), sum(high))),
    "Sub": lambda low, high: (low[0] - high[1], high[0] - low[1]),
    "Mul": _product,
    "Concat": lambda low, high: (min(low), max(high)),
    "Where": lambda low, high: (min(low[1:]), max(high[1:])),
    "Relu": lambda low, high: (max(low[0], 0.0), max(high[0], 0.0)),
    "Clip": _clip,
    "Min": lambda low, high: (min(low), min(high)),
    "Max": lambda low, high: (max(low), max(high)),
    "Abs": lambda low, high: (max(low[0], -high[0], 0.0), max(-low[0], high[0])),
    "Neg": lambda low, high: (-high[0], -low[0]),
    "Pad": lambda low, high: (min(low[0], low[2]), max(high[0], high[2])),
}
# Their numbers are those of their inputs, or correct to the last bit. Averages are not: what they add up on the way may
# pass the end of the type.
_NOT_ROUNDED = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Gather", "GatherND"}
    | {"GatherElements", "Slice", "Split", "Concat", "Where", "Relu", "Clip", "Min", "Max", "Abs", "Neg", "Sigmoid"}
    | {"HardSigmoid", "Softmax", "Tanh", "Erf", "Sin", "Cos"}
)
# The greatest |x| as exact arithmetic has it, of what is rounded in several steps.
_IN_STEPS: dict[str, Callable[[ir.Node, ValueRanges], float]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Gelu": lambda node, ranges: ranges.magnitude(node.inputs[0]),
    "Sum": lambda node, ranges: sum(map(ranges.magnitude, node.inputs)),
    "LayerNormalization": _normalised,
    "RMSNormalization": _normalised,
}
