"""Hard sigmoid and hard swish written out: clip(x + 3, 0, 6) / 6, and x times that."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import optional_input, parent, scalar
from layerline.graph.fusion.factors import Product, close, plus, product
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, only_within

SINCE = 14


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    whole = product(node.outputs[0])
    gated = _gated(whole)
    if work.opset >= SINCE and gated is not None:
        only_within(node, gated)
        return tape.op("HardSwish", [gated])
    if not close(whole.number, 1 / 6, node.outputs[0]) or len(whole.values) not in (1, 2):
        return None
    for index, clipped in enumerate(whole.values):
        x = _unclipped(clipped)
        rest = [*whole.values[:index], *whole.values[index + 1 :]]
        if x is None or rest not in ([], [x]):
            continue
        only_within(node, x)
        if rest and work.opset >= SINCE:
            return tape.op("HardSwish", [x])
        # HardSigmoid is max(0, min(1, x / 6 + 1 / 2)), which is clip(x + 3, 0, 6) / 6.
        gate = tape.op("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})
        if rest:
            return tape.op("Mul", [x, gate])
        return gate
    return None


def _gated(whole: Product) -> ir.Value | None:
    """x, where the product is x times its hard sigmoid."""
    if whole.number != 1.0 or len(whole.values) != 2:
        return None
    for x, gate in (whole.values, whole.values[::-1]):
        node = parent(gate, "HardSigmoid")
        if node is None or node.inputs[0] is not x:
            continue
        slope: float = node.attributes.get_float("alpha", 0.0)
        middle: float = node.attributes.get_float("beta", 0.0)
        if close(slope, 1 / 6, x) and middle == 0.5:
            return x
    return None


def _unclipped(value: ir.Value) -> ir.Value | None:
    """x, where `value` is clip(x + 3, 0, 6)."""
    clip = parent(value, "Clip")
    if clip is None:
        return None
    low = scalar(optional_input(clip, 1))
    high = scalar(optional_input(clip, 2))
    if len(clip.inputs) == 1:
        # Up to opset 10 the bounds are attributes.
        low = clip.attributes.get_float("min")
        high = clip.attributes.get_float("max")
    # relu6(x + 3), as MobileNetV3 writes it (Howard et al., arXiv:1905.02244).
    if (low, high) != (0.0, 6.0):
        return None
    return plus(clip.inputs[0], 3.0)


RULE = on("hard-swish", "hard sigmoid and hard swish written out to the single operators", ["Mul", "Div"], rewrite)
