"""Pad with 0 into the Conv after it, which pads for itself. Pooling stays behind its Pad: MaxPool pads with -inf."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, optional_input, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole


@on("pad-conv", "Conv")
def conv(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    pad = parent(node.inputs[0], "Pad")
    if pad is None:
        return None
    name = pad.outputs[0].name
    label = f"Conv {node.outputs[0].name}"
    count = rank(pad.inputs[0])
    amounts, value = _amounts(pad, count)
    if pad.attributes.get_string("mode", "constant") != "constant":
        raise Declined(f"Pad {name} doesn't fill with a constant")
    if count is None or amounts is None or value is None:
        raise Declined(f"the amounts or the value of Pad {name} are computed")
    if value != 0:
        raise Declined(f"Pad {name} fills with {value}, {label} with 0")
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
    attributes = dict(node.attributes)
    for key in ("auto_pad", "pads"):
        attributes.pop(key, None)
    pads = [own + added for own, added in zip(own_pads, spatial, strict=True)]
    return tape.op("Conv", [pad.inputs[0], *node.inputs[1:]], {**attributes, "pads": pads})


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
