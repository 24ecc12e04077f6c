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

from layerline.graph.analysis.ir_queries import LIMITS, Array, constant, dim, parent, rank, scalar

Bounds = dict[ir.Value, float]

# Sums of products, and what is worked out in several steps, stay this far from the end of the type and are off by less.
_ROOM = 2.0
# Some hardware takes the smallest numbers for 0.
_LEAST_DIVISOR = 1e-30


def bounds(graph: ir.Graph) -> Bounds:
    """The greatest magnitude of every value that a graph computes; inf where NaN or infinity can't be ruled out."""
    found: Bounds = {}
    for node in graph:
        step = _STEPS.get(node.op_type) if node.domain == "" else None
        largest = step(node, found) if step is not None else math.inf
        # Further outputs are statistics and the like, but for pieces.
        for output in node.outputs if node.op_type == "Split" else node.outputs[:1]:
            found[output] = largest if largest <= _largest(output) else math.inf
    return found


def of(value: ir.Value | None, found: Bounds) -> float:
    """The bound of one value: what its type or its stored numbers say, or what was found."""
    if value is None:
        return math.inf
    if value.dtype == ir.DataType.BOOL:
        return 1.0
    if value.dtype is not None and value.dtype.is_integer():
        return float(2.0**value.dtype.bitwidth)
    stored = constant(value)
    if stored is None:
        return found.get(value, math.inf)
    return _greatest(stored)


def _greatest(stored: Array) -> float:
    if stored.dtype.kind not in "fV":
        return math.inf
    if stored.size == 0:
        return 0.0
    known = stored.astype(np.float32) if stored.dtype.kind == "V" else stored
    greatest = max(-float(known.min()), float(known.max()))
    return greatest if math.isfinite(greatest) else math.inf


def _largest(value: ir.Value) -> float:
    return LIMITS[value.dtype][0] if value.dtype in LIMITS else 0.0


Step = Callable[[ir.Node, Bounds], float]


def _first(node: ir.Node, found: Bounds) -> float:
    """Picks among the numbers of the first input, or makes none of them larger."""
    return of(node.inputs[0], found)


def _any(node: ir.Node, found: Bounds) -> float:
    return max((of(v, found) for v in node.inputs[1 if node.op_type == "Where" else 0 :]), default=math.inf)


def _unit(node: ir.Node, found: Bounds) -> float:
    return 1.0 if math.isfinite(of(node.inputs[0], found)) else math.inf


def _cast(node: ir.Node, found: Bounds) -> float:
    return _rounded(node, of(node.inputs[0], found))


def _sum(node: ir.Node, found: Bounds) -> float:
    exact = sum(of(v, found) for v in node.inputs)
    return _rounded(node, exact) if len(node.inputs) <= 2 else _roomy(node, exact)


def _product(node: ir.Node, found: Bounds) -> float:
    return _rounded(node, _times(*(of(v, found) for v in node.inputs)))


def _quotient(node: ir.Node, found: Bounds) -> float:
    by = constant(node.inputs[1])
    least = float(np.abs(by.astype(np.float64)).min(initial=math.inf)) if by is not None else 0.0
    return _rounded(node, of(node.inputs[0], found) / least) if least > _LEAST_DIVISOR else math.inf


def _matmul(node: ir.Node, found: Bounds) -> float:
    a, b = node.inputs[0], node.inputs[1]
    gemm = node.op_type == "Gemm"
    turned: int = node.attributes.get_int("transA", 0)
    # What averages is as large as the largest at most, however many it averages.
    count = 1 if not gemm and _averages(a) else dim(a, 0 if turned else -1)
    if not isinstance(count, int):
        return math.inf
    largest = _times(count, of(a, found), of(b, found))
    if gemm:
        largest = _times(largest, abs(node.attributes.get_float("alpha", 1.0)))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        largest += _times(of(bias, found), abs(node.attributes.get_float("beta", 1.0))) if bias is not None else 0.0
    return _roomy(node, largest)


def _averages(value: ir.Value | None) -> bool:
    """Whether the last axis holds weights that add up to 1 at most: a Softmax, or one with some of them set to 0."""
    chosen = parent(value, "Where")
    if chosen is not None and scalar(chosen.inputs[1]) == 0:
        value = chosen.inputs[2]
    softmax, count = parent(value, "Softmax"), rank(value)
    axis: int = softmax.attributes.get_int("axis", 0) if softmax is not None else 0
    return softmax is not None and count is not None and axis in (-1, count - 1) and count > 1


def _normalised(node: ir.Node, found: Bounds) -> float:
    """d / sqrt(mean(d²) + epsilon) is at most the root of how many d there are."""
    x, ranks = node.inputs[0], rank(node.inputs[0])
    axis: int = node.attributes.get_int("axis", -1)
    sizes = [dim(x, i) for i in range(axis - ranks if axis >= 0 else axis, 0)] if ranks is not None else []
    known = [s for s in sizes if isinstance(s, int)]
    if not sizes or len(known) < len(sizes) or node.attributes.get_float("epsilon", 1e-5) <= 0:
        return math.inf
    count = math.prod(known)
    # Squares are summed on the way.
    if not math.isfinite(_roomy(node, _times(count, 4.0, of(x, found), of(x, found)))):
        return math.inf
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    shift = of(bias, found) if bias is not None else 0.0
    return _roomy(node, _times(math.sqrt(count), of(node.inputs[1], found)) + shift)


def _times(*parts: float) -> float:
    return math.prod(parts) if all(map(math.isfinite, parts)) else math.inf


def _rounded(node: ir.Node, exact: float) -> float:
    """The bound of one correctly rounded operation: numbers just past the largest are rounded back to it."""
    kind = node.outputs[0].dtype
    if kind not in LIMITS or math.isnan(exact):
        return math.inf
    largest, step = LIMITS[kind]
    return min(exact * (1 + step), largest) if exact < largest * (1 + step / 4) else math.inf


def _roomy(node: ir.Node, exact: float) -> float:
    return _ROOM * exact if _ROOM * exact <= _largest(node.outputs[0]) else math.inf


_STEPS: dict[str, Step] = {
    **dict.fromkeys(("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"), _first),
    **dict.fromkeys(("Gather", "GatherND", "GatherElements", "Slice", "Split", "Neg", "Abs", "Relu"), _first),
    **dict.fromkeys(("Concat", "Where", "Max", "Min"), _any),
    **dict.fromkeys(("Sigmoid", "Tanh", "Softmax", "Erf", "HardSigmoid", "Sin", "Cos"), _unit),
    **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    **dict.fromkeys(("MatMul", "Gemm"), _matmul),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalised),
    "Cast": _cast,
    "Mul": _product,
    "Div": _quotient,
    "Gelu": lambda node, found: _roomy(node, of(node.inputs[0], found)),
}
