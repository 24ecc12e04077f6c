"""What the channels of a group hold where they hold one number, and which of them no layer needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import Array, constant, optional_input, rank
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.channel_groups import BINARY, ONE_TO_ONE, Group, size_along

# What these give for a channel that holds one number.
_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "Relu": lambda c: np.maximum(c, 0.0),
    "Sigmoid": lambda c: 1.0 / (1.0 + np.exp(-c)),
    "Tanh": np.tanh,
    "Identity": lambda c: c,
    "Dropout": lambda c: c,
    "Neg": lambda c: -c,
    "Abs": np.abs,
}
# The others keep a zero at zero; what they make of another number is left open.
_ZERO_STAYS = ONE_TO_ONE - _FUNCTIONS.keys()


def constants(group: Group, order: list[ir.Node]) -> dict[ir.Value, Array]:
    """One number for each channel of each value: what it holds everywhere, or NaN."""
    held: dict[ir.Value, Array] = {}
    for node in order:
        if node in group.producers:
            linear = group.producers[node]
            # A channel without weights gives its bias, whatever the layer is fed.
            is_zero = ~affine_ops.rows(node, linear.weight).any(axis=1)
            held[node.outputs[0]] = np.where(is_zero, linear.bias.astype(np.float64), np.nan)
        elif node in group.between:
            held[node.outputs[0]] = _of_node(group, node, held)
    return held


def _of_node(group: Group, node: ir.Node, held: Mapping[ir.Value, Array]) -> Array:
    op = node.op_type
    if op in BINARY:
        return _of_binary(group, node, held)
    data = node.inputs[0]
    assert data is not None
    numbers = held.get(data, group.unknown())
    if op in _FUNCTIONS:
        return np.asarray(_FUNCTIONS[op](numbers))
    # Beside the zeros of the padding another constant would be constant no more.
    if op in _ZERO_STAYS or op == "PRelu" or (op == "AveragePool" and pads(node)):
        return np.where(numbers == 0, 0.0, np.nan)
    if op == "Clip":
        low = constant(optional_input(node, 1))
        high = constant(optional_input(node, 2))
        if low is not None:
            numbers = np.maximum(numbers, float(low))
        if high is not None:
            numbers = np.minimum(numbers, float(high))
        return numbers
    if op == "BatchNormalization":
        gamma, beta, mean, var = (np.asarray(constant(v), np.float64) for v in node.inputs[1:5])
        return (numbers - mean) / np.sqrt(var + node.attributes.get_float("epsilon", 1e-5)) * gamma + beta
    if op == "Conv":
        # Depthwise: every output of a channel sums the same kernel over one constant.
        weight = np.asarray(constant(node.inputs[1]), np.float64).reshape(group.channels, -1).sum(axis=1)
        bias = constant(optional_input(node, 2))
        shift = bias.astype(np.float64) if bias is not None else np.zeros(group.channels)
        computed = np.where(numbers == 0, shift, shift + weight * numbers)
        return np.where((numbers != 0) & pads(node), np.nan, computed)
    return numbers


def _of_binary(group: Group, node: ir.Node, held: Mapping[ir.Value, Array]) -> Array:
    a, b = (_side(group, node, value, held) for value in node.inputs if value is not None)
    with np.errstate(invalid="ignore"):
        if node.op_type == "Add":
            return a + b
        if node.op_type == "Sub":
            return a - b
        # A zero on one side is enough: a channel that is gated off is 0 whatever the gate is fed.
        return np.where((a == 0) | (b == 0), 0.0, a * b)


def _side(group: Group, node: ir.Node, value: ir.Value, held: Mapping[ir.Value, Array]) -> Array:
    stored = constant(value)
    if stored is None:
        return held.get(value, group.unknown())
    out = node.outputs[0]
    axis, spread = group.places[out]
    if stored.size == 1:
        return np.full(group.channels, float(stored.reshape(-1)[0]))
    if spread == 1 and stored.size == group.channels == size_along(stored, rank(out) or 0, axis):
        return stored.reshape(-1).astype(np.float64)
    return group.unknown()


def pads(node: ir.Node) -> bool:
    """Whether a node pads with zeros, beside which a constant is constant no more."""
    amounts = node.attributes.get_ints("pads") or ()
    return any(amounts) or node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")


def removable(group: Group, held: Mapping[ir.Value, Array]) -> Array:
    """Which channels can go: constant wherever a layer reads them; zero where that layer pads. One at least stays."""
    gone = np.ones(group.channels, dtype=bool)
    for node in group.consumers:
        data = node.inputs[0]
        assert data is not None
        numbers = held.get(data, group.unknown())
        fits = np.isfinite(numbers)
        # A MatMul of more axes takes no bias that could hold what the channel adds.
        takes_no_bias = node.op_type == "MatMul" and rank(node.outputs[0]) != 2
        if takes_no_bias or (node.op_type == "Conv" and pads(node)):
            fits &= numbers == 0
        gone &= fits
    if gone.all():
        gone[0] = False
    return gone
