"""How large a graph's numbers can get, whatever it is fed: a bound means that no run gives more, nor NaN, nor infinity.

A float input may hold anything, so nothing that follows from one is bounded, however ordinary its numbers look: not by
a Sigmoid either, which passes NaN on. Integers are bounded by their type, stored tensors by what they hold; hence a
language model, which is fed tokens, is bounded from its embeddings on.

Bounds are of the numbers as computed, in any order of summing: each step allows for rounding, and nothing may come
near the end of its type on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import LIMITS, Array, constant, dim, optional_input, parent, rank, scalar

Bounds = dict[ir.Value, float]

# Sums of products, and what is worked out in several steps, stay this far from the end of the type and are off by less.
_HEADROOM = 2.0
# Some hardware takes the smallest numbers for 0.
_LEAST_DIVISOR = 1e-30


def bounds(graph: ir.Graph) -> Bounds:
    """The greatest magnitude of every value that a graph computes; inf where NaN or infinity can't be ruled out."""
    magnitudes: Bounds = {}
    for node in graph:
        largest = math.inf
        if node.domain == "" and node.op_type in _STEPS:
            largest = _STEPS[node.op_type](node, magnitudes)
        outputs = node.outputs
        if node.op_type != "Split":
            # Further outputs are statistics, masks and the like, which the bound does not hold for.
            outputs = outputs[:1]
        for output in outputs:
            magnitudes[output] = math.inf
            if largest <= _type_limit(output):
                magnitudes[output] = largest
    return magnitudes


def of(value: ir.Value | None, magnitudes: Bounds) -> float:
    """The bound of one value: what its type or its stored numbers say, or what was worked out."""
    if value is None:
        return math.inf
    if value.dtype == ir.DataType.BOOL:
        return 1.0
    if value.dtype is not None and value.dtype.is_integer():
        return float(2.0**value.dtype.bitwidth)
    stored = constant(value)
    if stored is None:
        return magnitudes.get(value, math.inf)
    return _stored_magnitude(stored)


def _stored_magnitude(stored: Array) -> float:
    # ml_dtypes gives bfloat16 and the 8-bit floats the kind "V".
    if stored.dtype.kind not in "fV":
        return math.inf
    if stored.size == 0:
        return 0.0
    if stored.dtype.kind == "V":
        stored = stored.astype(np.float32)
    return _finite_or_inf(max(-float(stored.min()), float(stored.max())))


def _finite_or_inf(magnitude: float) -> float:
    """NaN as inf: neither is a bound."""
    if math.isfinite(magnitude):
        return magnitude
    return math.inf


def _type_limit(value: ir.Value) -> float:
    """The largest number of a value's type; 0 for types that no bound is worked out for."""
    if value.dtype not in LIMITS:
        return 0.0
    return LIMITS[value.dtype][0]


Step = Callable[[ir.Node, Bounds], float]


def _first(node: ir.Node, magnitudes: Bounds) -> float:
    """Picks among the numbers of the first input, or makes none of them larger."""
    return of(node.inputs[0], magnitudes)


def _any(node: ir.Node, magnitudes: Bounds) -> float:
    """Picks among the numbers of all inputs."""
    return max((of(value, magnitudes) for value in node.inputs), default=math.inf)


def _where(node: ir.Node, magnitudes: Bounds) -> float:
    return max((of(value, magnitudes) for value in node.inputs[1:]), default=math.inf)


def _unit(node: ir.Node, magnitudes: Bounds) -> float:
    # Of NaN these give NaN.
    if math.isfinite(of(node.inputs[0], magnitudes)):
        return 1.0
    return math.inf


def _cast(node: ir.Node, magnitudes: Bounds) -> float:
    return _rounded(node, of(node.inputs[0], magnitudes))


def _gelu(node: ir.Node, magnitudes: Bounds) -> float:
    return _with_headroom(node, of(node.inputs[0], magnitudes))


def _sum(node: ir.Node, magnitudes: Bounds) -> float:
    exact = sum(of(value, magnitudes) for value in node.inputs)
    if len(node.inputs) <= 2:
        return _rounded(node, exact)
    return _with_headroom(node, exact)


def _product(node: ir.Node, magnitudes: Bounds) -> float:
    return _rounded(node, _times(*(of(value, magnitudes) for value in node.inputs)))


def _quotient(node: ir.Node, magnitudes: Bounds) -> float:
    divisor = constant(node.inputs[1])
    if divisor is None:
        return math.inf
    least = float(np.abs(divisor.astype(np.float64)).min(initial=math.inf))
    if not least > _LEAST_DIVISOR:  # NaN is not greater either
        return math.inf
    return _rounded(node, of(node.inputs[0], magnitudes) / least)


def _matmul(node: ir.Node, magnitudes: Bounds) -> float:
    a = node.inputs[0]
    b = node.inputs[1]
    # What averages is as large as the largest at most, however many it averages.
    count: int | str | None = 1
    if not _averages(a):
        count = dim(a, -1)
    if not isinstance(count, int):
        return math.inf
    return _with_headroom(node, _times(count, of(a, magnitudes), of(b, magnitudes)))


def _gemm(node: ir.Node, magnitudes: Bounds) -> float:
    a = node.inputs[0]
    count = dim(a, -1)
    if node.attributes.get_int("transA", 0):
        count = dim(a, 0)
    if not isinstance(count, int):
        return math.inf
    largest = _times(count, of(a, magnitudes), of(node.inputs[1], magnitudes))
    largest = _times(largest, abs(node.attributes.get_float("alpha", 1.0)))
    bias = optional_input(node, 2)
    if bias is not None:
        largest += _times(of(bias, magnitudes), abs(node.attributes.get_float("beta", 1.0)))
    return _with_headroom(node, largest)


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


def _normalised(node: ir.Node, magnitudes: Bounds) -> float:
    """d / sqrt(mean(d²) + epsilon) is at most the root of how many d there are."""
    x = node.inputs[0]
    count = _normalised_count(node)
    if count is None or node.attributes.get_float("epsilon", 1e-5) <= 0:
        return math.inf
    largest = of(x, magnitudes)
    # Squares are summed on the way; d is x less a mean, so twice as large at most.
    if not math.isfinite(_with_headroom(node, _times(count, 4.0, largest, largest))):
        return math.inf
    bias = optional_input(node, 2)
    shift = 0.0
    if bias is not None:
        shift = of(bias, magnitudes)
    return _with_headroom(node, _times(math.sqrt(count), of(node.inputs[1], magnitudes)) + shift)


def _normalised_count(node: ir.Node) -> int | None:
    """How many numbers one mean is taken over; None where that is not known."""
    axis: int = node.attributes.get_int("axis", -1)
    if axis >= 0:
        ranks = rank(node.inputs[0])
        if ranks is None:
            return None
        axis -= ranks
    if axis >= 0:
        return None
    count = 1
    for index in range(axis, 0):
        size = dim(node.inputs[0], index)
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _times(*parts: float) -> float:
    # Without the test 0 * inf would be NaN.
    if all(map(math.isfinite, parts)):
        return math.prod(parts)
    return math.inf


def _rounded(node: ir.Node, exact: float) -> float:
    """The bound of one correctly rounded operation: numbers just past the largest are rounded back to it."""
    kind = node.outputs[0].dtype
    if kind not in LIMITS or math.isnan(exact):
        return math.inf
    largest, step = LIMITS[kind]
    if exact < largest * (1 + step / 4):
        return min(exact * (1 + step), largest)
    return math.inf


def _with_headroom(node: ir.Node, exact: float) -> float:
    if _HEADROOM * exact <= _type_limit(node.outputs[0]):
        return _HEADROOM * exact
    return math.inf


_STEPS: dict[str, Step] = {
    **dict.fromkeys(("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"), _first),
    **dict.fromkeys(("Gather", "GatherND", "GatherElements", "Slice", "Split", "Neg", "Abs", "Relu"), _first),
    **dict.fromkeys(("Concat", "Max", "Min"), _any),
    **dict.fromkeys(("Sigmoid", "Tanh", "Softmax", "Erf", "HardSigmoid", "Sin", "Cos"), _unit),
    **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalised),
    "Where": _where,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Cast": _cast,
    "Mul": _product,
    "Div": _quotient,
    "Gelu": _gelu,
}
