"""GELU written out, by erf or by tanh, to the one operator (opset 20), which TensorRT runs as one activation."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import parent, scalar
from layerline.graph.fusion.factors import close, plus, product
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, only_within

SINCE = 20
# x³ in tanh's argument; Hendrycks and Gimpel, arXiv:1606.08415.
CUBIC = 0.044715


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    approximate = "none"
    x = _argument(node, "Erf", _is_erf)
    if x is None:
        approximate = "tanh"
        x = _argument(node, "Tanh", _is_tanh)
    if x is None:
        return None
    if work.opset < SINCE:
        raise Declined(
            f"{node.outputs[0].name} is a GELU, which opset {work.opset} doesn't have (it comes with {SINCE})"
        )
    only_within(node, x)
    return tape.op("Gelu", [x], {"approximate": approximate})


def _argument(node: ir.Node, op: str, is_inner: Callable[[ir.Value | None, ir.Value], bool]) -> ir.Value | None:
    """x, where the node is x/2 (1 + op(…)) and `is_inner` holds for what stands in the brackets."""
    whole = product(node.outputs[0])
    if len(whole.values) != 2 or not close(whole.number, 0.5, node.outputs[0]):
        return None
    # A product has no order: either factor may be x.
    for x, rest in (whole.values, whole.values[::-1]):
        squashed = parent(plus(rest, 1.0), op)
        if squashed is not None and is_inner(squashed.inputs[0], x):
            return x
    return None


def _is_erf(inner: ir.Value | None, x: ir.Value) -> bool:
    scaled = product(inner)
    # erf(x / sqrt(2)), so that x/2 (1 + erf(…)) is x times the normal distribution's Φ(x).
    return scaled.values == (x,) and close(scaled.number, math.sqrt(0.5), x)


def _is_tanh(inner: ir.Value | None, x: ir.Value) -> bool:
    """sqrt(2/pi) (x + 0.044715 x³), or sqrt(2/pi) x (1 + 0.044715 x²)."""
    scaled = product(inner)
    if not close(scaled.number, math.sqrt(2 / math.pi), x):
        return False
    if len(scaled.values) == 1:
        total = parent(scaled.values[0], "Add")
        if total is None:
            return False
        a, b = total.inputs
        return (a is x and _is_power(b, x, 3)) or (b is x and _is_power(a, x, 3))
    if len(scaled.values) == 2:
        first, second = scaled.values
        if first is x and _is_power(plus(second, 1.0), x, 2):
            return True
        return second is x and _is_power(plus(first, 1.0), x, 2)
    return False


def _is_power(value: ir.Value | None, x: ir.Value, exponent: int) -> bool:
    """Whether `value` is 0.044715 times a power of x, as a product or by Pow."""
    scaled = product(value)
    if not close(scaled.number, CUBIC, x):
        return False
    if len(scaled.values) == exponent:
        return all(factor is x for factor in scaled.values)
    if len(scaled.values) != 1:
        return False
    power = parent(scaled.values[0], "Pow")
    return power is not None and power.inputs[0] is x and scalar(power.inputs[1]) == exponent


RULE = on("gelu", "GELU written out with erf or tanh to Gelu (opset 20)", ["Mul", "Div"], rewrite)
