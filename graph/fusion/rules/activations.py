"""Activations written out, to the one operator: GELU by erf or tanh, hard sigmoid and hard swish.

People write products in any order: x * 0.5 * (1 + erf(x / 1.414)) has four spellings and one meaning, so they are taken
apart into factors. TensorRT runs the single operator as one activation. The guard against NaN behind a Softmax goes
where it can't be met.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import clip_bounds, name_of, parent, scalar
from layerline.graph.analysis.value_ranges import ValueRanges
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import everywhere, on, only_within

GELU_SINCE = 20
HARD_SWISH_SINCE = 14
# x³ in tanh's argument; Hendrycks and Gimpel, arXiv:1606.08415.
CUBIC = 0.044715
# Mul and Div nodes that are taken apart at most: more than a written-out function has. n squares make 2^n.
MOST_OPENED = 16
# Constants are compared in the precision they are stored in.
_CLOSE = {ir.DataType.FLOAT: 1e-6, ir.DataType.DOUBLE: 1e-6, ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1e-2}


def product(value: ir.Value | None) -> tuple[float, tuple[ir.Value, ...]]:
    """The product of all constants in `value`, and its other factors, as far as Mul and Div by constants go."""
    number = 1.0
    values: list[ir.Value] = []
    opened = 0
    pending = [value]
    while pending:
        factor = pending.pop()
        if factor is None:
            return math.nan, ()
        constant = scalar(factor)
        if constant is not None:
            number *= constant
            continue
        node = parent(factor, "Mul", "Div")
        divisor = scalar(node.inputs[1]) if node is not None and node.op_type == "Div" else None
        # A divisor that is computed makes the quotient a factor of its own.
        if node is None or opened == MOST_OPENED or (node.op_type == "Div" and not divisor):
            values.append(factor)
            continue
        opened += 1
        if divisor:
            number /= divisor
            pending.append(node.inputs[0])
        else:
            pending += [node.inputs[1], node.inputs[0]]
    return number, tuple(values)


def close(a: float | None, b: float, of: ir.Value | None) -> bool:
    """Whether two constants are the same in the precision of a value's type."""
    if a is None:
        return False
    tolerance = _CLOSE.get(of.dtype, 0.0) if of is not None and of.dtype is not None else 0.0
    return bool(np.isclose(a, b, rtol=tolerance, atol=0.0))


def plus(value: ir.Value | None, amount: float) -> ir.Value | None:
    """x, where `value` is x + amount."""
    total = plus_constant(value)
    if total is None or not close(total[1], amount, value):
        return None
    return total[0]


def plus_constant(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """x and c, where the value is x + c."""
    node = parent(value, "Add")
    if node is None:
        return None
    for side in (0, 1):
        x = node.inputs[side]
        amount = scalar(node.inputs[1 - side])
        if amount is not None and x is not None:
            return x, amount
    return None


@on("gelu", "Mul", "Div")
def gelu(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    approximate = "none"
    x = _argument(node, "Erf", _is_erf)
    if x is None:
        approximate = "tanh"
        x = _argument(node, "Tanh", _is_tanh)
    if x is None:
        return None
    if work.opset < GELU_SINCE:
        raise Declined(
            f"{node.outputs[0].name} is a GELU, which opset {work.opset} doesn't have (it comes with {GELU_SINCE})"
        )
    only_within(node, x)
    return tape.op("Gelu", [x], {"approximate": approximate})


def _argument(node: ir.Node, op: str, is_inner: Callable[[ir.Value | None, ir.Value], bool]) -> ir.Value | None:
    """x, where the node is x/2 (1 + op(…)) and `is_inner` holds for what stands in the brackets."""
    number, factors = product(node.outputs[0])
    if len(factors) != 2 or not close(number, 0.5, node.outputs[0]):
        return None
    # A product has no order: either factor may be x.
    for x, rest in (factors, factors[::-1]):
        squashed = parent(plus(rest, 1.0), op)
        if squashed is not None and is_inner(squashed.inputs[0], x):
            return x
    return None


def _is_erf(inner: ir.Value | None, x: ir.Value) -> bool:
    number, factors = product(inner)
    # erf(x / sqrt(2)), so that x/2 (1 + erf(…)) is x times the normal distribution's Φ(x).
    return factors == (x,) and close(number, math.sqrt(0.5), x)


def _is_tanh(inner: ir.Value | None, x: ir.Value) -> bool:
    """sqrt(2/pi) (x + 0.044715 x³), or sqrt(2/pi) x (1 + 0.044715 x²)."""
    number, factors = product(inner)
    if not close(number, math.sqrt(2 / math.pi), x):
        return False
    if len(factors) == 1:
        total = parent(factors[0], "Add")
        if total is None:
            return False
        a, b = total.inputs
        return (a is x and _is_power(b, x, 3)) or (b is x and _is_power(a, x, 3))
    if len(factors) != 2:
        return False
    first, second = factors
    return (first is x and _is_power(plus(second, 1.0), x, 2)) or (second is x and _is_power(plus(first, 1.0), x, 2))


def _is_power(value: ir.Value | None, x: ir.Value, exponent: int) -> bool:
    """Whether `value` is 0.044715 times a power of x, as a product or by Pow."""
    number, factors = product(value)
    if not close(number, CUBIC, x):
        return False
    if len(factors) == exponent:
        return all(factor is x for factor in factors)
    power = parent(factors[0], "Pow") if len(factors) == 1 else None
    return power is not None and power.inputs[0] is x and scalar(power.inputs[1]) == exponent


@on("hard-swish", "Mul", "Div")
def hard_swish(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    number, factors = product(node.outputs[0])
    gated = _gated(number, factors)
    if work.opset >= HARD_SWISH_SINCE and gated is not None:
        only_within(node, gated)
        return tape.op("HardSwish", [gated])
    if not close(number, 1 / 6, node.outputs[0]) or len(factors) not in (1, 2):
        return None
    for index, clipped in enumerate(factors):
        x = _unclipped(clipped)
        rest = [*factors[:index], *factors[index + 1 :]]
        if x is None or rest not in ([], [x]):
            continue
        only_within(node, x)
        if rest and work.opset >= HARD_SWISH_SINCE:
            return tape.op("HardSwish", [x])
        # HardSigmoid is max(0, min(1, x / 6 + 1 / 2)), which is clip(x + 3, 0, 6) / 6.
        gate = tape.op("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})
        if rest:
            return tape.op("Mul", [x, gate])
        return gate
    return None


def _gated(number: float, factors: tuple[ir.Value, ...]) -> ir.Value | None:
    """x, where the product is x times its hard sigmoid."""
    if number != 1.0 or len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        node = parent(gate, "HardSigmoid")
        if node is None or node.inputs[0] is not x:
            continue
        # As PyTorch and HardSwish have it; ONNX's own default slope is 0.2.
        if close(node.attributes.get_float("alpha", 0.0), 1 / 6, x) and node.attributes.get_float("beta", 0.0) == 0.5:
            return x
    return None


def _unclipped(value: ir.Value) -> ir.Value | None:
    """x, where `value` is clip(x + 3, 0, 6)."""
    clip = parent(value, "Clip")
    # relu6(x + 3), as MobileNetV3 writes it (Howard et al., arXiv:1905.02244).
    return plus(clip.inputs[0], 3.0) if clip is not None and clip_bounds(clip) == (0.0, 6.0) else None


@everywhere("softmax-nan-guard")
def guard(work: Rewriting) -> None:
    """Where(IsNaN(s), 0, s) after a Softmax whose scores are finite in every run.

    torch writes it for rows that a mask of -inf covers whole, and TensorRT's fused attention is lost to it. A row is
    NaN too when a score is NaN or a product has overflowed, so it goes only where neither can be (value_ranges.py).
    """
    for graph in work.graphs():
        ranges: ValueRanges | None = None
        for node in graph:
            if node.op_type != "Where" or node.domain != "":
                continue
            test = parent(node.inputs[0], "IsNaN")
            softmax = parent(node.inputs[2], "Softmax")
            if test is None or softmax is None or test.inputs[0] is not node.inputs[2] or scalar(node.inputs[1]) != 0.0:
                continue
            # Worked out at the first guard only: most graphs have none.
            if ranges is None:
                ranges = ValueRanges(graph, finite=True)
            scores = softmax.inputs[0]
            if math.isfinite(ranges.magnitude(scores)):
                work.attempt("softmax-nan-guard", node, lambda node, tape, work: node.inputs[2])  # noqa: ARG005
            else:
                out = node.outputs[0]
                what = f"scores {name_of(scores) or ''} of {out.name} may be NaN or infinite"
                work.decline("softmax-nan-guard", out, what)
