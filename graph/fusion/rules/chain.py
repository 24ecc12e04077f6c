"""Two shape-changing nodes in a row that one can do."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, parent, rank
from layerline.graph.analysis.size_algebra import sizes
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole
from layerline.graph.fusion.rules.noop import permutation


def reshape(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """Reshape, Flatten, Squeeze or Unsqueeze of one of these: one Reshape, as all keep the order of elements."""
    inner = parent(node.inputs[0], "Reshape", "Flatten", "Squeeze", "Unsqueeze")
    if inner is None or work.opset < 5:
        return None
    of, wanted = sizes(inner.inputs[0]), sizes(node.outputs[0])
    if of is not None and of == wanted:
        return inner.inputs[0]
    sole(node.inputs[0], node)
    asked = constant(node.inputs[1]) if node.op_type == "Reshape" else None
    if asked is not None and (asked > 0).all():
        shape = [int(a) for a in asked]
    elif of is None or wanted is None or 0 in wanted:
        raise Declined(f"the shape of {node.outputs[0].name} is not known")
    else:
        shape = [w if isinstance(w, int) else 0 if i < len(of) and w == of[i] else -1 for i, w in enumerate(wanted)]
    if shape.count(-1) > 1:
        raise Declined(f"shape {list(wanted or ())} of {node.outputs[0].name} leaves more than one size open")
    target = tape.initializer(ir.tensor(np.array(shape, np.int64)), f"{node.outputs[0].name}/shape")
    return tape.op("Reshape", [inner.inputs[0], target])


def transpose(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    inner = parent(node.inputs[0], "Transpose")
    first, second = permutation(inner) if inner is not None else None, permutation(node)
    if inner is None or first is None or second is None:
        return None
    both = [first[axis] for axis in second]
    if both == list(range(len(both))):
        return inner.inputs[0]
    sole(node.inputs[0], node)
    return tape.op("Transpose", [inner.inputs[0]], {"perm": both})


def slices(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """Slices along different axes, by constants."""
    inner = parent(node.inputs[0], "Slice")
    if inner is None or work.opset < 10:
        return None
    sole(node.inputs[0], node)
    first, second = _bounds(inner), _bounds(node)
    if first is None or second is None:
        raise Declined(f"the bounds of {node.outputs[0].name} or of the Slice before it are computed")
    if set(first[2].tolist()) & set(second[2].tolist()):
        raise Declined(f"{node.outputs[0].name} and the Slice before it cut the same axis")
    both = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    names = ("starts", "ends", "axes", "steps")
    given = [tape.initializer(ir.tensor(b), f"{node.outputs[0].name}/{n}") for b, n in zip(both, names, strict=True)]
    return tape.op("Slice", [inner.inputs[0], *given])


def _bounds(node: ir.Node) -> list[Array] | None:
    """starts, ends, axes (not negative) and steps as int64 vectors of one length."""
    starts, ends = (constant(v) for v in node.inputs[1:3])
    count = rank(node.inputs[0])
    if starts is None or ends is None or count is None:
        return None
    rest = [*node.inputs[3:5], None, None][:2]
    axes = constant(rest[0]) if rest[0] is not None else np.arange(starts.size)
    steps = constant(rest[1]) if rest[1] is not None else np.ones(starts.size)
    if axes is None or steps is None:
        return None
    return [np.asarray(a, np.int64).reshape(-1) for a in (starts, ends, np.where(axes < 0, axes + count, axes), steps)]


RESHAPE = on(
    "reshape-reshape",
    "Reshape, Flatten, Squeeze and Unsqueeze in a row to one Reshape",
    ["Reshape", "Flatten", "Squeeze", "Unsqueeze"],
    reshape,
)
TRANSPOSE = on("transpose-transpose", "Transposes in a row to one or none", ["Transpose"], transpose)
SLICE = on("slice-slice", "Slices of different axes in a row to one", ["Slice"], slices)
