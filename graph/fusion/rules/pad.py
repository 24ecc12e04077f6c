"""Pad into the Conv or pooling after it, which pads for itself.

A Conv pads with 0. AveragePool must go on counting the padding, as it did. MaxPool pads with -inf: a Pad with 0 can
only go where nothing in the window is below 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole

_AT_LEAST_ZERO = frozenset({"Relu", "Sigmoid", "Softmax", "Abs", "Exp", "HardSigmoid", "Softplus", "Sqrt"})
_KEEPS_SIGN = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Transpose", "Slice"})


@dataclass(frozen=True)
class _Pad:
    x: ir.Value
    value: float
    before: list[int]
    after: list[int]
    name: str | None


def conv(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    pad = _before(node, work.opset)
    if pad is None:
        return None
    if pad.value != 0:
        raise Declined(f"Pad {pad.name} fills with {pad.value}, Conv {node.outputs[0].name} with 0")
    return _merged(node, pad, tape, {})


def pool(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    pad = _before(node, work.opset)
    if pad is None:
        return None
    where = f"{node.op_type} {node.outputs[0].name}"
    if node.attributes.get_int("ceil_mode", 0):
        raise Declined(f"{where} rounds its size up, which counts padding in another way")
    if len(node.outputs) > 1 and node.outputs[1].name:
        raise Declined(f"{where} gives indices into the padded tensor")
    if node.op_type == "MaxPool":
        _refuse_fill(node, pad, where)
        return _merged(node, pad, tape, {})
    if pad.value != 0 or work.opset < 7:
        raise Declined(f"Pad {pad.name} fills with {pad.value}, and {where} must go on counting it")
    own = any(node.attributes.get_ints("pads", ()) or ())
    if own and not node.attributes.get_int("count_include_pad", 0):
        raise Declined(f"{where} has padding of its own that it doesn't count")
    return _merged(node, pad, tape, {"count_include_pad": 1})


def _refuse_fill(node: ir.Node, pad: _Pad, where: str) -> None:
    if pad.value == -math.inf:
        return
    plain = all(d == 1 for d in node.attributes.get_ints("dilations", ()) or ())
    if pad.value != 0 or not plain or not _at_least_zero(pad.x):
        raise Declined(f"Pad {pad.name} fills with {pad.value}, {where} with -inf, and {pad.x.name} may be below")


def _at_least_zero(value: ir.Value | None, depth: int = 6) -> bool:
    node = value.producer() if value is not None else None
    if node is None or node.domain != "" or depth == 0:
        return False
    if node.op_type in _AT_LEAST_ZERO:
        return True
    if node.op_type == "Clip":
        return all(end is not None and end >= 0 for end in _ends(node))
    tensors = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type in _KEEPS_SIGN and all(_at_least_zero(v, depth - 1) for v in tensors)


def _ends(clip: ir.Node) -> tuple[float | None, float | None]:
    """Both bounds of a Clip: the upper one wins where it is below the lower one; None for one that is computed."""
    if len(clip.inputs) == 1:
        return clip.attributes.get_float("min", -math.inf), clip.attributes.get_float("max", math.inf)
    low, high = (*clip.inputs[1:], None)[:2]
    return -math.inf if low is None else scalar(low), math.inf if high is None else scalar(high)


def _before(node: ir.Node, opset: int) -> _Pad | None:
    """The constant Pad before a node, along spatial axes only.

    Raises:
        Declined: there is a Pad, and it does something that a Conv or pooling can't.
    """
    pad = parent(node.inputs[0], "Pad")
    if pad is None:
        return None
    name, count = pad.outputs[0].name, rank(pad.inputs[0])
    amounts, value = _amounts(pad, opset, count)
    if pad.attributes.get_string("mode", "constant") != "constant":
        raise Declined(f"Pad {name} doesn't fill with a constant")
    if pad.inputs[0] is None or count is None or amounts is None or value is None:
        raise Declined(f"the amounts or the value of Pad {name} are computed")
    before, after = amounts[:count], amounts[count:]
    if any(before[:2]) or any(after[:2]) or min(amounts) < 0:
        raise Declined(f"Pad {name} changes batch or channels, or cuts ({amounts})")
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Declined(f"{node.op_type} {node.outputs[0].name} pads by auto_pad, after Pad {name}")
    sole(node.inputs[0], node)
    return _Pad(pad.inputs[0], value, before[2:], after[2:], name)


def _amounts(pad: ir.Node, opset: int, count: int | None) -> tuple[list[int] | None, float | None]:
    if opset < 11:
        given = pad.attributes.get_ints("pads") or pad.attributes.get_ints("paddings")
        return (list(given) if given is not None else None), pad.attributes.get_float("value", 0.0)
    pads = constant(pad.inputs[1])
    value = scalar(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else 0.0
    if pads is None or count is None:
        return None, value
    if len(pad.inputs) < 4 or pad.inputs[3] is None:
        return [int(p) for p in pads], value
    axes = constant(pad.inputs[3])
    if axes is None:
        return None, value
    full = [0] * (2 * count)
    for index, axis in enumerate(int(a) % count for a in axes):
        full[axis], full[axis + count] = int(pads[index]), int(pads[index + len(axes)])
    return full, value


def _merged(node: ir.Node, pad: _Pad, tape: Tape, more: dict[str, int]) -> ir.Value:
    spatial = len(pad.before)
    own = list(node.attributes.get_ints("pads", ()) or [0] * (2 * spatial))
    pads = [a + b for a, b in zip(own, pad.before + pad.after, strict=True)]
    kernel = node.attributes.get_ints("kernel_shape")
    if node.op_type != "Conv" and (
        kernel is None or any(p >= k for p, k in zip(pads, (*kernel, *kernel), strict=True))
    ):
        raise Declined(f"Pad {pad.name} is as wide as the window of {node.op_type} {node.outputs[0].name}")
    attributes = {k: v for k, v in node.attributes.items() if k not in ("auto_pad", "pads", *more)}
    return tape.op(node.op_type, [pad.x, *node.inputs[1:]], {**attributes, "pads": pads, **more})


CONV = on("pad-conv", "Pad with 0 into the Conv after it", ["Conv"], conv)
POOL = on("pad-pool", "Pad into the pooling after it, where it fills alike", ["AveragePool", "MaxPool"], pool)
