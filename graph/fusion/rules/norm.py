"""Normalisations written out, to LayerNormalization (opset 17) and RMSNormalization (opset 23).

TensorRT runs the single operator as one layer, with sums in float32 where the graph later becomes float16. The pattern
is matched without its scale and bias, which `norm-affine` then takes in: that covers every order people write them in.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, dim, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, only_within, sole

NORMS = ("LayerNormalization", "RMSNormalization")


def layer(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    found = _normalised(node)
    if found is None:
        return None
    deviation, square_mean, epsilon = found
    sub = parent(deviation, "Sub")
    mean = parent(sub.inputs[1], "ReduceMean") if sub is not None else None
    if sub is None or mean is None or mean.inputs[0] is not sub.inputs[0]:
        return None
    axis = _tail(mean, square_mean)
    return _single("LayerNormalization", 17, node, sub.inputs[0], axis, epsilon, tape, work)


def rms(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    found = _normalised(node)
    if found is None or parent(found[0], "Sub") is not None:
        return None
    x, square_mean, epsilon = found
    return _single("RMSNormalization", 23, node, x, _tail(square_mean), epsilon, tape, work)


def _single(
    op: str, since: int, node: ir.Node, x: ir.Value | None, axis: int, epsilon: float, tape: Tape, work: Rewriting
) -> ir.Value:
    where = f"{node.outputs[0].name} is a {op}"
    if work.opset < since:
        raise Declined(f"{where}, which opset {work.opset} doesn't have (it comes with {since})")
    if x is None or x.dtype != ir.DataType.FLOAT:
        raise Declined(f"{where} of type {x.dtype if x is not None else None}; the single operator sums in float32")
    count = rank(x) or 0
    sizes = [dim(x, i) for i in range(axis, count)]
    shape = [s for s in sizes if isinstance(s, int)]
    if len(shape) < len(sizes):
        raise Declined(f"{where} over axes of unknown size ({sizes})")
    only_within(node, x)
    ones = tape.initializer(ir.tensor(np.ones(shape, np.float32)), f"{node.outputs[0].name}/scale")
    return tape.op(op, [x, ones], {"axis": axis - count, "epsilon": epsilon, "stash_type": 1})


def _normalised(node: ir.Node) -> tuple[ir.Value, ir.Node, float] | None:
    """d, ReduceMean(d²) and epsilon, where the node is d / sqrt(mean(d²) + epsilon) in one of its spellings."""
    for d, root in _by_root(node):
        square = plus_constant(root)
        mean = parent(square[0], "ReduceMean") if square is not None else None
        if square is not None and mean is not None and _is_square(mean.inputs[0], d):
            return d, mean, square[1]
    return None


def _by_root(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Pairs (d, v) for which the node is d / sqrt(v)."""
    a, b = node.inputs
    pairs: list[tuple[ir.Value, ir.Value]] = []
    if a is None or b is None:
        return pairs
    if node.op_type == "Div":
        root = parent(b, "Sqrt")
        return [(a, root.inputs[0])] if root is not None and root.inputs[0] is not None else pairs
    for d, inverse in ((a, b), (b, a)):
        made = parent(inverse, "Reciprocal", "Pow", "Div")
        if made is None:
            continue
        if made.op_type == "Pow":
            inner = made.inputs[0] if scalar(made.inputs[1]) == -0.5 else None
        elif made.op_type == "Div":
            root = parent(made.inputs[1], "Sqrt") if scalar(made.inputs[0]) == 1.0 else None
            inner = root.inputs[0] if root is not None else None
        else:
            root = parent(made.inputs[0], "Sqrt")
            inner = root.inputs[0] if root is not None else None
        if inner is not None:
            pairs.append((d, inner))
    return pairs


def plus_constant(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """x and c, where the value is x + c."""
    node = parent(value, "Add")
    for side in (0, 1):
        amount = scalar(node.inputs[1 - side]) if node is not None else None
        x = node.inputs[side] if node is not None else None
        if amount is not None and x is not None:
            return x, amount
    return None


def _is_square(value: ir.Value | None, d: ir.Value) -> bool:
    node = parent(value, "Mul", "Pow")
    if node is None or node.inputs[0] is not d:
        return False
    return node.inputs[1] is d if node.op_type == "Mul" else scalar(node.inputs[1]) == 2.0


def _tail(*means: ir.Node) -> int:
    """The first of the last axes that all the means are over, kept as size 1."""
    first: set[int] = set()
    for mean in means:
        count = rank(mean.inputs[0])
        given = constant(mean.inputs[1]) if len(mean.inputs) > 1 else mean.attributes.get_ints("axes")
        name = mean.outputs[0].name
        if count is None or given is None or not mean.attributes.get_int("keepdims", 1):
            raise Declined(f"the axes of ReduceMean {name} are not known, or not kept")
        axes = sorted(int(a) % count for a in given)
        if not axes or axes != list(range(axes[0], count)):
            raise Declined(f"ReduceMean {name} is over axes {axes} of {count}, not over the last ones")
        first.add(axes[0])
    if len(first) > 1:
        raise Declined(f"ReduceMean {means[0].outputs[0].name} and {means[1].outputs[0].name} are over other axes")
    return first.pop()


def affine(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """A constant scale or bias after a normalisation into its own."""
    for side in (0, 1):
        norm, amount = parent(node.inputs[side], *NORMS), constant(node.inputs[1 - side])
        scale = constant(norm.inputs[1]) if norm is not None else None
        if norm is None or amount is None or scale is None:
            continue
        if node.op_type == "Add" and norm.op_type == "RMSNormalization":
            return None
        sole(node.inputs[side], node)
        if others := [o.name for o in norm.outputs[1:] if o.uses() or o.is_graph_output()]:
            raise Declined(f"second output {others[0]} of {norm.op_type} {norm.outputs[0].name} is used")
        if (count := rank(norm.inputs[0])) is None or amount.ndim > count:
            raise Declined(f"constant {_name(node.inputs[1 - side])} of shape {amount.shape} adds dimensions")
        return _scaled(node, norm, scale, _per_element(amount, scale, _name(node.inputs[1 - side])), tape)
    return None


def _per_element(amount: Array, scale: Array, name: str | None) -> Array:
    """`amount` in the shape of the norm's own scale."""
    extra = max(amount.ndim - scale.ndim, 0)
    inner = amount.reshape(amount.shape[extra:]) if set(amount.shape[:extra]) <= {1} else amount
    try:
        return np.broadcast_to(inner, scale.shape)
    except ValueError:
        raise Declined(
            f"constant {name} of shape {amount.shape} is not one number per element of {scale.shape}"
        ) from None


def _scaled(node: ir.Node, norm: ir.Node, scale: Array, amount: Array, tape: Tape) -> ir.Value | None:
    given = norm.inputs[2] if len(norm.inputs) > 2 else None
    bias = constant(given)
    if given is not None and bias is None:
        raise Declined(f"bias {given.name} of {norm.outputs[0].name} is computed")
    finite = np.isfinite(scale).all() and (bias is None or np.isfinite(bias).all())
    with np.errstate(over="ignore", invalid="ignore"):
        if node.op_type == "Mul":
            scale, bias = scale * amount, None if bias is None else bias * amount
        else:
            bias = amount if bias is None else bias + amount
    if finite and not (np.isfinite(scale).all() and (bias is None or np.isfinite(bias).all())):
        raise Declined(f"scale or bias of {norm.op_type} {norm.outputs[0].name} would overflow {scale.dtype}")
    stem = node.outputs[0].name
    inputs = [norm.inputs[0], tape.initializer(ir.tensor(np.ascontiguousarray(scale)), f"{stem}/scale")]
    if bias is not None:
        inputs.append(tape.initializer(ir.tensor(np.ascontiguousarray(bias)), f"{stem}/bias"))
    return tape.op(norm.op_type, inputs, norm.attributes)


def _name(value: ir.Value | None) -> str | None:
    return value.name if value is not None else None


LAYER = on("layer-norm", "layer normalisation written out to LayerNormalization (opset 17)", ["Div", "Mul"], layer)
RMS = on("rms-norm", "RMS normalisation written out to RMSNormalization (opset 23)", ["Div", "Mul"], rms)
AFFINE = on("norm-affine", "constant scale and bias into the normalisation before them", ["Mul", "Add"], affine)
