"""Pad into the Conv or MaxPool after it, which pads for itself: a Conv with 0, MaxPool with -inf.

Keras pads its ResNets and DenseNets with 0 in front of the first MaxPool, behind a Relu.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import clip_bounds, constant, optional_input, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting, refuse_other_outputs
from layerline.graph.fusion.rule import on, sole


@on("pad-conv", "Conv")
def conv(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    return _merged(node, tape)


@on("pad-pool", "MaxPool")
def pool(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    return _merged(node, tape)


def _merged(node: ir.Node, tape: Tape) -> ir.Value | None:
    """The node with the padding of a constant Pad before it."""
    pad = parent(node.inputs[0], "Pad")
    if pad is None:
        return None
    name = pad.outputs[0].name
    label = f"{node.op_type} {node.outputs[0].name}"
    count = rank(pad.inputs[0])
    amounts, value = _amounts(pad, count)
    if pad.attributes.get_string("mode", "constant") != "constant":
        raise Declined(f"Pad {name} doesn't fill with a constant")
    if count is None or amounts is None or value is None:
        raise Declined(f"the amounts or the value of Pad {name} are computed")
    # All starts first, then all ends.
    before = amounts[:count]
    after = amounts[count:]
    # A Conv pads spatial axes only, and never cuts.
    if any(before[:2]) or any(after[:2]) or min(amounts) < 0:
        raise Declined(f"Pad {name} changes batch or channels, or cuts ({amounts})")
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Declined(f"{label} pads by auto_pad, after Pad {name}")
    sole(node.inputs[0], node)
    spatial = before[2:] + after[2:]
    own_pads = node.attributes.get_ints("pads", ()) or [0] * len(spatial)
    pads = [own + added for own, added in zip(own_pads, spatial, strict=True)]
    if node.op_type == "MaxPool":
        _refuse_pool(node, pad.inputs[0], value, pads)
    elif value != 0:
        raise Declined(f"Pad {name} fills with {value}, {label} with 0")
    attributes = dict(node.attributes)
    for key in ("auto_pad", "pads"):
        attributes.pop(key, None)
    return tape.op(node.op_type, [pad.inputs[0], *node.inputs[1:]], {**attributes, "pads": pads})


def _refuse_pool(node: ir.Node, padded: ir.Value | None, value: float, pads: list[int]) -> None:
    """Refuses a MaxPool that would see something else than before."""
    label = f"MaxPool {node.outputs[0].name}"
    # Indices count in the padded tensor.
    refuse_other_outputs(node)
    # Rounded up, a size counts padding in another way.
    if node.attributes.get_int("ceil_mode", 0):
        raise Declined(f"{label} rounds its size up")
    # A window must not lie on padding alone, as a dilated or a small one may.
    kernel = list(node.attributes.get_ints("kernel_shape", ()) or ())
    is_dilated = any(step != 1 for step in node.attributes.get_ints("dilations", ()) or ())
    if is_dilated or any(pad >= size for pad, size in zip(pads, 2 * kernel, strict=True)):
        raise Declined(f"{label} may have windows of padding alone")
    if value != -math.inf and not (value == 0 and _is_at_least_zero(padded)):
        raise Declined(f"its Pad fills with {value}, {label} with -inf, and what is padded may be below")


def _is_at_least_zero(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    if producer is None or producer.domain:
        return False
    if producer.op_type == "Clip":
        return all(end is not None and end >= 0 for end in clip_bounds(producer))
    return producer.op_type in ("Relu", "Sigmoid")


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
