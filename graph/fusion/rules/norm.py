"""Normalisations written out, to LayerNormalization (opset 17).

TensorRT runs the single operator as one layer, with sums in float32 where the graph later becomes float16. The pattern
is matched without its scale and bias, which `norm-affine` then takes in: that covers every order people write them in.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.backends.base import Array
from layerline.graph.analysis.ir_queries import constant, dim, optional_input, parent, rank, reduced_axes, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting, refuse_other_outputs
from layerline.graph.fusion.rule import on, only_within, sole
from layerline.graph.fusion.rules.activations import plus_constant

NORMS = ("LayerNormalization", "RMSNormalization")
SINCE = 17


@on("layer-norm", "Div", "Mul")
def layer(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    parts = _normalised(node)
    if parts is None:
        return None
    deviation, square_mean, epsilon = parts
    sub = parent(deviation, "Sub")
    if sub is None:
        return None
    x = sub.inputs[0]
    mean = parent(sub.inputs[1], "ReduceMean")
    # What is taken off has to be the mean of the very value that it is taken off from.
    if x is None or mean is None or mean.inputs[0] is not x:
        return None
    axis = _tail(mean, square_mean)
    where = f"{node.outputs[0].name} is a layer normalisation"
    if work.opset < SINCE:
        raise Declined(f"{where}, which opset {work.opset} doesn't have (it comes with {SINCE})")
    if x.dtype != ir.DataType.FLOAT:
        raise Declined(f"{where} of type {x.dtype}; the single operator sums in float32")
    count = rank(x) or 0
    sizes = [dim(x, index) for index in range(axis, count)]
    shape = [size for size in sizes if isinstance(size, int)]
    if len(shape) < len(sizes):
        raise Declined(f"{where} over axes of unknown size ({sizes})")
    only_within(node, x)
    # The operator demands a scale; `norm-affine` puts the real one in its place.
    ones = tape.initializer(ir.tensor(np.ones(shape, np.float32)), f"{node.outputs[0].name}/scale")
    return tape.op("LayerNormalization", [x, ones], {"axis": axis - count, "epsilon": epsilon, "stash_type": 1})


def _normalised(node: ir.Node) -> tuple[ir.Value, ir.Node, float] | None:
    """d, ReduceMean(d²) and epsilon, where the node is d / sqrt(mean(d²) + epsilon) in one of its spellings."""
    for d, root in _by_root(node):
        total = plus_constant(root)
        if total is None:
            continue
        square_mean, epsilon = total
        mean = parent(square_mean, "ReduceMean")
        if mean is not None and _is_square(mean.inputs[0], d):
            return d, mean, epsilon
    return None


def _by_root(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Pairs (d, v) for which the node is d / sqrt(v), or d · (1 / sqrt(v)) in either order."""
    a, b = node.inputs
    pairs = [(a, _under_inverse_root(b)), (b, _under_inverse_root(a))]
    if node.op_type == "Div":
        pairs = [(a, _under_root(b))]
    return [(d, v) for d, v in pairs if d is not None and v is not None]


def _under_inverse_root(value: ir.Value | None) -> ir.Value | None:
    """v, where the value is 1 / sqrt(v) in one of its spellings."""
    node = parent(value, "Reciprocal", "Pow", "Div")
    if node is None:
        return None
    if node.op_type == "Reciprocal":
        return _under_root(node.inputs[0])
    if node.op_type == "Pow" and scalar(node.inputs[1]) == -0.5:
        return node.inputs[0]
    if node.op_type == "Div" and scalar(node.inputs[0]) == 1.0:
        return _under_root(node.inputs[1])
    return None


def _under_root(value: ir.Value | None) -> ir.Value | None:
    root = parent(value, "Sqrt")
    return None if root is None else root.inputs[0]


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
        name = mean.outputs[0].name
        reduced = reduced_axes(mean)
        if count is None or reduced is None or not mean.attributes.get_int("keepdims", 1):
            raise Declined(f"the axes of ReduceMean {name} are not known, or not kept")
        axes = sorted(int(axis) % count for axis in reduced)
        if not axes or axes != list(range(axes[0], count)):
            raise Declined(f"ReduceMean {name} is over axes {axes} of {count}, not over the last ones")
        first.add(axes[0])
    if len(first) > 1:
        raise Declined(f"ReduceMean {means[0].outputs[0].name} and {means[1].outputs[0].name} are over other axes")
    return first.pop()


@on("norm-affine", "Mul", "Add")
def affine(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """A constant scale or bias after a normalisation into its own."""
    for side in (0, 1):
        norm = parent(node.inputs[side], *NORMS)
        other = node.inputs[1 - side]
        amount = constant(other)
        scale = None if norm is None else constant(norm.inputs[1])
        if norm is None or other is None or amount is None or scale is None:
            continue
        # RMSNormalization has a scale and no bias.
        if node.op_type == "Add" and norm.op_type == "RMSNormalization":
            return None
        sole(node.inputs[side], node)
        refuse_other_outputs(norm)
        count = rank(norm.inputs[0])
        if count is None or amount.ndim > count:
            raise Declined(f"constant {other.name} of shape {amount.shape} adds dimensions")
        return _scaled(node, norm, scale, _per_element(amount, scale, other.name), tape)
    return None


def _per_element(amount: Array, scale: Array, name: str | None) -> Array:
    """`amount` in the shape of the norm's own scale."""
    extra = max(amount.ndim - scale.ndim, 0)
    # Leading axes of size 1 change nothing, as long as x has at least as many axes.
    inner = amount.reshape(amount.shape[extra:]) if set(amount.shape[:extra]) <= {1} else amount
    try:
        return np.broadcast_to(inner, scale.shape)
    except ValueError:
        raise Declined(
            f"constant {name} of shape {amount.shape} is not one number per element of {scale.shape}"
        ) from None


def _scaled(node: ir.Node, norm: ir.Node, scale: Array, amount: Array, tape: Tape) -> ir.Value | None:
    bias_value = optional_input(norm, 2)
    bias = constant(bias_value)
    if bias_value is not None and bias is None:
        raise Declined(f"bias {bias_value.name} of {norm.outputs[0].name} is computed")
    was_finite = _all_finite(scale, bias)
    # In the weights' own type, as the graph computed it.
    with np.errstate(over="ignore", invalid="ignore"):
        if node.op_type == "Add":
            bias = amount if bias is None else bias + amount
        else:
            scale = scale * amount
            bias = None if bias is None else bias * amount
    if was_finite and not _all_finite(scale, bias):
        raise Declined(f"scale or bias of {norm.op_type} {norm.outputs[0].name} would overflow {scale.dtype}")
    stem = node.outputs[0].name
    inputs = [norm.inputs[0], tape.initializer(ir.tensor(np.ascontiguousarray(scale)), f"{stem}/scale")]
    if bias is not None:
        inputs.append(tape.initializer(ir.tensor(np.ascontiguousarray(bias)), f"{stem}/bias"))
    return tape.op(norm.op_type, inputs, norm.attributes)


def _all_finite(scale: Array, bias: Array | None) -> bool:
    return all(array is None or np.isfinite(array).all() for array in (scale, bias))
