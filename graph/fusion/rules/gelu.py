"""GELU written out, by erf or by tanh, to the one operator (opset 20), which TensorRT runs as one activation."""

from __future__ import annotations

import math

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
    found = _by(node, "Erf") or _by(node, "Tanh")
    if found is None:
        return None
    x, approximate = found
    if work.opset < SINCE:
        raise Declined(
            f"{node.outputs[0].name} is a GELU, which opset {work.opset} doesn't have (it comes with {SINCE})"
        )
    only_within(node, x)
    return tape.op("Gelu", [x], {"approximate": approximate})


def _by(node: ir.Node, op: str) -> tuple[ir.Value, str] | None:
    """x and the kind, where the node is x/2 (1 + op(…))."""
    whole = product(node.outputs[0])
    if len(whole.values) != 2 or not close(whole.number, 0.5, node.outputs[0]):
        return None
    for x, rest in (whole.values, whole.values[::-1]):
        squashed = parent(plus(rest, 1.0), op)
        if squashed is not None and (_is_erf if op == "Erf" else _is_tanh)(squashed.inputs[0], x):
            return x, "none" if op == "Erf" else "tanh"
    return None


def _is_erf(inner: ir.Value | None, x: ir.Value) -> bool:
    scaled = product(inner)
    return scaled.values == (x,) and close(scaled.number, math.sqrt(0.5), x)


def _is_tanh(inner: ir.Value | None, x: ir.Value) -> bool:
    """sqrt(2/pi) (x + 0.044715 x³), or sqrt(2/pi) x (1 + 0.044715 x²)."""
    scaled = product(inner)
    if not close(scaled.number, math.sqrt(2 / math.pi), x):
        return False
    if len(scaled.values) == 1:
        total = parent(scaled.values[0], "Add")
        return total is not None and any(
            total.inputs[side] is x and _is_power(total.inputs[1 - side], x, 3) for side in (0, 1)
        )
    return len(scaled.values) == 2 and any(
        a is x and _is_power(plus(b, 1.0), x, 2) for a, b in (scaled.values, scaled.values[::-1])
    )


def _is_power(value: ir.Value | None, x: ir.Value, exponent: int) -> bool:
    cube = product(value)
    if not close(cube.number, CUBIC, x):
        return False
    if len(cube.values) == exponent:
        return all(v is x for v in cube.values)
    power = parent(cube.values[0], "Pow") if len(cube.values) == 1 else None
    return power is not None and power.inputs[0] is x and scalar(power.inputs[1]) == exponent


RULE = on("gelu", "GELU written out with erf or tanh to Gelu (opset 20)", ["Mul", "Div"], rewrite)
