"""Pad into the Conv or pooling after it, which pads for itself.

A Conv pads with 0. AveragePool must go on counting the padding, as it did. MaxPool pads with -inf: a Pad with 0 can
only go where nothing in the window is below 0.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import clip_bounds, constant, optional_input, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole

_AT_LEAST_ZERO = frozenset({"Relu", "Sigmoid", "Softmax", "Abs", "Exp", "HardSigmoid", "Softplus", "Sqrt"})
_KEEPS_SIGN = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Transpose", "Slice"})


@dataclass(frozen=True)
class _Pad:
    """A constant Pad: what it pads and with what, and how much along each spatial axis."""

    x: ir.Value
    value: float
    before: list[int]
    after: list[int]
    name: str | None


@on("pad-conv", "Conv")
def conv(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    pad = _before(node)
    if pad is None:
        return None
    if pad.value != 0:
        raise Declined(f"Pad {pad.name} fills with {pad.value}, Conv {node.outputs[0].name} with 0")
    return _merged(node, pad, tape, {})


@on("pad-pool", "AveragePool", "MaxPool")
def pool(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    pad = _before(node)
    if pad is None:
        return None
    where = f"{node.op_type} {node.outputs[0].name}"
    if node.attributes.get_int("ceil_mode", 0):
        raise Declined(f"{where} rounds its size up, which counts padding in another way")
    # MaxPool's second output: they would count other elements.
    if len(node.outputs) > 1 and node.outputs[1].name:
        raise Declined(f"{where} gives indices into the padded tensor")
    if node.op_type == "MaxPool":
        # A dilated window may lie on padding alone.
        is_dilated = any(dilation != 1 for dilation in node.attributes.get_ints("dilations", ()) or ())
        changes = pad.value != 0 or is_dilated or not _at_least_zero(pad.x)
        if pad.value != -math.inf and changes:
            raise Declined(f"Pad {pad.name} fills with {pad.value}, {where} with -inf, and {pad.x.name} may be below")
        return _merged(node, pad, tape, {})
    if pad.value != 0:
        raise Declined(f"Pad {pad.name} fills with {pad.value}, and {where} must go on counting it")
    pads_itself = any(node.attributes.get_ints("pads", ()) or ())
    if pads_itself and not node.attributes.get_int("count_include_pad", 0):
        raise Declined(f"{where} has padding of its own that it doesn't count")
    return _merged(node, pad, tape, {"count_include_pad": 1})


def _at_least_zero(value: ir.Value | None, depth: int = 6) -> bool:
    """Whether nothing in a value is below 0, as far as operators say so within `depth` steps."""
    if value is None:
        return False
    node = value.producer()
    if node is None or node.domain != "" or depth == 0:
        return False
    if node.op_type in _AT_LEAST_ZERO:
        return True
    if node.op_type == "Clip":
        return all(end is not None and end >= 0 for end in clip_bounds(node))
    if node.op_type not in _KEEPS_SIGN:
        return False
    tensors = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return all(_at_least_zero(tensor, depth - 1) for tensor in tensors)


def _before(node: ir.Node) -> _Pad | None:
    """The constant Pad before a node, along spatial axes only."""
    pad = parent(node.inputs[0], "Pad")
    if pad is None:
        return None
    name = pad.outputs[0].name
    count = rank(pad.inputs[0])
    amounts, value = _amounts(pad, count)
    if pad.attributes.get_string("mode", "constant") != "constant":
        raise Declined(f"Pad {name} doesn't fill with a constant")
    if pad.inputs[0] is None or count is None or amounts is None or value is None:
        raise Declined(f"the amounts or the value of Pad {name} are computed")
    # All starts first, then all ends.
    before = amounts[:count]
    after = amounts[count:]
    # A Conv pads spatial axes only, and never cuts.
    if any(before[:2]) or any(after[:2]) or min(amounts) < 0:
        raise Declined(f"Pad {name} changes batch or channels, or cuts ({amounts})")
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Declined(f"{node.op_type} {node.outputs[0].name} pads by auto_pad, after Pad {name}")
    sole(node.inputs[0], node)
    return _Pad(pad.inputs[0], value, before[2:], after[2:], name)


def _amounts(pad: ir.Node, count: int | None) -> tuple[list[int] | None, float | None]:
    """What a Pad adds at the start of every axis, then at every end, and what it fills with; None where computed."""
    pads = constant(pad.inputs[1])
    value: float | None = scalar(pad.inputs[2]) if optional_input(pad, 2) is not None else 0.0
    if pads is None or count is None:
        return None, value
    if optional_input(pad, 3) is None:
        return [int(amount) for amount in pads], value
    axes = constant(pad.inputs[3])
    if axes is None:
        return None, value
    amounts = np.zeros((2, count), np.int64)
    amounts[:, axes % count] = pads.reshape(2, -1)
    return amounts.ravel().tolist(), value


def _merged(node: ir.Node, pad: _Pad, tape: Tape, more: dict[str, int]) -> ir.Value:
    spatial = len(pad.before)
    own_pads = list(node.attributes.get_ints("pads", ()) or [0] * (2 * spatial))
    pads = [own + added for own, added in zip(own_pads, pad.before + pad.after, strict=True)]
    # A pooling window must never lie on padding alone; a Conv's may.
    if node.op_type != "Conv":
        kernel = node.attributes.get_ints("kernel_shape")
        if kernel is None or any(map(operator.ge, pads, (*kernel, *kernel))):
            raise Declined(f"Pad {pad.name} is as wide as the window of {node.op_type} {node.outputs[0].name}")
    attributes = dict(node.attributes)
    for name in ("auto_pad", "pads", *more):
        attributes.pop(name, None)
    return tape.op(node.op_type, [pad.x, *node.inputs[1:]], {**attributes, "pads": pads, **more})
