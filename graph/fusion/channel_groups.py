"""Values whose channels belong together, from the layers that make them to the layers that read them.

A channel that is the same constant wherever a layer reads it can go from all of them at once: from the weights that
make it, from everything that works channel by channel in between (residual additions included, where both sides are
constant), and from the weights that read it, whose bias takes the constant over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import Array, constant, dim, rank
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.firing import Declined

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
# These keep a zero at zero; what they make of another number is left open.
_ZERO_STAYS = frozenset({"LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "HardSwish", "Erf", "Softsign"})
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
_BINARY = frozenset({"Add", "Sub", "Mul"})
PADDED = frozenset({"Conv", "AveragePool"})


@dataclass
class Group:
    """Connected values and the nodes around them.

    Attributes:
        channels: how many each value has.
        axes: the axis of every value that holds them.
        spread: how many neighbouring elements of that axis are one channel; more than one behind a Flatten.
        producers, between, consumers: the layers that make, pass on and read the values.
    """

    channels: int
    axes: dict[ir.Value, int] = field(default_factory=dict)
    spread: dict[ir.Value, int] = field(default_factory=dict)
    producers: dict[ir.Node, affine_ops.Linear] = field(default_factory=dict)
    between: dict[ir.Node, None] = field(default_factory=dict)
    consumers: dict[ir.Node, None] = field(default_factory=dict)


def gather(start: ir.Node) -> Group:
    """The group of the values that a layer makes.

    Raises:
        Declined: something on the way is an input or output of the model, or mixes channels as no layer does.
    """
    first = _producer(start)
    if first is None:
        raise Declined(f"{start.op_type} {start.outputs[0].name} is no layer with constant weights")
    group = Group(first.channels)
    pending: list[tuple[ir.Value, int, int]] = [(start.outputs[0], first.axis, 1)]
    while pending:
        value, axis, spread = pending.pop()
        if value in group.axes:
            if (group.axes[value], group.spread[value]) != (axis, spread):
                raise Declined(f"channels of {value.name} lie along two axes")
            continue
        if dim(value, axis) not in (group.channels * spread, None):
            raise Declined(f"{value.name} has {dim(value, axis)} channels, not {group.channels}")
        group.axes[value], group.spread[value] = axis, spread
        pending += _sources(group, value, axis, spread)
        pending += _readers(group, value, axis)
    return group


def _producer(node: ir.Node | None) -> affine_ops.Linear | None:
    """A layer whose output channels can be cut one by one."""
    if node is None or node.op_type not in ("Conv", "Gemm", "MatMul") or node.attributes.get_int("group", 1) != 1:
        return None
    return affine_ops.behind(node.outputs[0])


def _sources(group: Group, value: ir.Value, axis: int, spread: int) -> list[tuple[ir.Value, int, int]]:
    """Takes in what computes a value; the other values that this brings in."""
    node = value.producer()
    if node is None or value.is_graph_input():
        raise Declined(f"{value.name} is an input of the model")
    made = _producer(node)
    if made is not None:
        if made.axis != axis or spread != 1 or made.channels != group.channels:
            raise Declined(f"channels of {value.name} are not those of {node.op_type} {node.outputs[0].name}")
        group.producers[node] = made
        return []
    return _through(group, node, value)


def _readers(group: Group, value: ir.Value, axis: int) -> list[tuple[ir.Value, int, int]]:
    if value.is_graph_output():
        raise Declined(f"{value.name} is an output of the model")
    more: list[tuple[ir.Value, int, int]] = []
    for use in value.uses():
        node = use.node
        if node.graph is not group_graph(value):
            raise Declined(f"{value.name} is read in a body")
        if use.idx == 0 and _reads_all(node, axis):
            group.consumers[node] = None
        elif node in group.between:
            continue
        else:
            more += _through(group, node, value)
    return more


def group_graph(value: ir.Value) -> ir.Graph | None:
    """The graph that a computed value belongs to."""
    node = value.producer()
    graph: ir.Graph | None = node.graph if node is not None else None
    return graph


def _reads_all(node: ir.Node, axis: int) -> bool:
    """Whether a node is a layer that sums over the channels on `axis` with constant weights."""
    weight = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if weight is None or node.domain != "":
        return False
    if node.op_type == "Conv":
        return axis == 1 and node.attributes.get_int("group", 1) == 1 and _constant_bias(node)
    if node.op_type == "Gemm":
        return axis == 1 and not node.attributes.get_int("transA", 0) and _constant_bias(node)
    data = rank(node.inputs[0])
    return node.op_type == "MatMul" and weight.ndim == 2 and data is not None and axis == data - 1


def _constant_bias(node: ir.Node) -> bool:
    return len(node.inputs) < 3 or node.inputs[2] is None or constant(node.inputs[2]) is not None


def _through(group: Group, node: ir.Node, value: ir.Value) -> list[tuple[ir.Value, int, int]]:
    """Takes in a node that works channel by channel; its values with their axes, seen from one of them.

    Raises:
        Declined: it does not.
    """
    group.between[node] = None
    inside, out = node.inputs[0], node.outputs[0]
    what = f"{node.op_type} {out.name}"
    if node.domain != "" or inside is None or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        raise Declined(f"{what} is not followed channel by channel")
    op = node.op_type
    if op in ("Flatten", "Reshape", "Squeeze", "ReduceMean"):
        return _flat(group, node, value)
    if value in group.axes:
        axis, spread = group.axes[value], group.spread[value]
    if op in _FUNCTIONS or op in _ZERO_STAYS or op == "Clip" or op == "PRelu":
        if op in ("Clip", "PRelu") and not all(_is_single_number(value) for value in node.inputs[1:] if value):
            raise Declined(f"{what} takes more than single numbers")
        return [(v, axis, spread) for v in (inside, out) if v is not value]
    if op in _POOLS and axis == 1:
        return [(v, axis, spread) for v in (inside, out) if v is not value]
    if op == "BatchNormalization" and axis == 1 and spread == 1 and not node.attributes.get_int("training_mode", 0):
        if any(constant(v) is None for v in node.inputs[1:5]):
            raise Declined(f"a parameter of {what} is computed")
        return [(v, axis, spread) for v in (inside, out) if v is not value]
    if op == "Conv" and axis == 1 and spread == 1 and _depthwise(node, group.channels):
        return [(v, axis, spread) for v in (inside, out) if v is not value]
    if op in _BINARY:
        return _binary(group, node, value, axis, spread)
    raise Declined(f"{what} reads {value.name} and is not followed channel by channel")


def _depthwise(node: ir.Node, channels: int) -> bool:
    weight = constant(node.inputs[1])
    groups = node.attributes.get_int("group", 1)
    return (
        weight is not None and groups == channels == weight.shape[0] and weight.shape[1] == 1 and _constant_bias(node)
    )


def _binary(group: Group, node: ir.Node, value: ir.Value, axis: int, spread: int) -> list[tuple[ir.Value, int, int]]:
    """Two values of one shape, or one and a constant of one number, or one number per channel."""
    more = [(v, axis, spread) for v in node.outputs if v is not value]
    ranks = {rank(v) for v in (*node.inputs, *node.outputs) if v is not None and constant(v) is None}
    if len(ranks) != 1 or None in ranks:
        raise Declined(f"{node.op_type} {node.outputs[0].name} broadcasts over a number of axes")
    for other in node.inputs:
        if other is None or other is value:
            continue
        stored = constant(other)
        if stored is None:
            more.append((other, axis, spread))
            continue
        size = _along(stored, rank(node.outputs[0]) or 0, axis)
        if size not in (1, group.channels * spread):
            raise Declined(f"{other.name} has {size} channels")
    return more


def _along(array: Array, out_rank: int, axis: int) -> int:
    """Size of a constant along an axis of what it is broadcast to."""
    place = axis - (out_rank - array.ndim)
    return int(array.shape[place]) if place >= 0 else 1


def _flat(group: Group, node: ir.Node, value: ir.Value) -> list[tuple[ir.Value, int, int]]:
    """From (N, C, …) to (N, C · …) or (N, C): a mean over all that follows the channels, or a reshaping."""
    inside, out = node.inputs[0], node.outputs[0]
    assert inside is not None
    what = f"{node.op_type} {out.name}"
    shape, after = inside.shape, out.shape
    if shape is None or after is None or len(shape) < 3:
        raise Declined(f"{what} has no known shape of three axes or more")
    if node.op_type == "ReduceMean":
        axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        reduced = {int(a) % len(shape) for a in axes.ravel()} if axes is not None else set()
        if not reduced or reduced & {0, 1}:
            raise Declined(f"{what} reduces the channels or the batch")
        return [(v, 1, 1) for v in (inside, out) if v is not value]
    places = [dim(inside, a) for a in range(2, len(shape))]
    if len(after) != 2 or not all(isinstance(p, int) for p in places):
        raise Declined(f"{what} does not flatten fixed sizes behind the channels")
    spread = math.prod(int(p) for p in places if isinstance(p, int))
    if dim(out, 1) not in (group.channels * spread, None) or (spread != 1 and node.op_type == "Squeeze"):
        raise Declined(f"{what} does not leave the batch apart")
    if node.op_type == "Flatten" and node.attributes.get_int("axis", 1) != 1:
        raise Declined(f"{what} does not leave the batch apart")
    if node.op_type == "Reshape":
        target = constant(node.inputs[1])
        if target is None or target.size != 2 or int(target[1]) not in (-1, group.channels * spread):
            raise Declined(f"the shape of {what} is computed")
    return [(v, 1, s) for v, s in ((inside, 1), (out, spread)) if v is not value]


def constants(group: Group, order: list[ir.Node]) -> dict[ir.Value, Array]:
    """One number for each channel of each value: what it holds everywhere, or NaN."""
    held: dict[ir.Value, Array] = {}
    for node in order:
        if node in group.producers:
            held[node.outputs[0]] = _of_producer(group.producers[node])
        elif node in group.between:
            held[node.outputs[0]] = _of_node(group, node, held)
    return held


def _of_producer(linear: affine_ops.Linear) -> Array:
    node, weight = linear.node, linear.weight
    by_output = node.op_type == "Conv" or bool(node.attributes.get_int("transB", 0))
    rows = weight if by_output else np.moveaxis(weight, -1, 0)
    zero = ~rows.reshape(len(rows), -1).any(axis=1)
    return np.where(zero, linear.bias.astype(np.float64), np.nan)


def _of_node(group: Group, node: ir.Node, held: Mapping[ir.Value, Array]) -> Array:
    inside = node.inputs[0]
    assert inside is not None
    op, nothing = node.op_type, np.full(group.channels, np.nan)
    if op in _BINARY:
        sides = [_side(group, node, v, held) for v in node.inputs if v is not None]
        with np.errstate(invalid="ignore"):
            if op == "Mul":
                product = sides[0] * sides[1]
                return np.where((sides[0] == 0) | (sides[1] == 0), 0.0, product)
            return sides[0] + sides[1] if op == "Add" else sides[0] - sides[1]
    numbers = held.get(inside, nothing)
    if op in _FUNCTIONS:
        return np.asarray(_FUNCTIONS[op](numbers))
    if op in _ZERO_STAYS or op == "PRelu":
        return np.where(numbers == 0, 0.0, np.nan)
    if op == "Clip":
        ends = [constant(v) for v in node.inputs[1:]]
        low = ends[0] if ends else None
        high = ends[1] if len(ends) > 1 else None
        return np.clip(numbers, -np.inf if low is None else float(low), np.inf if high is None else float(high))
    if op == "BatchNormalization":
        gamma, beta, mean, var = (np.asarray(constant(v), np.float64) for v in node.inputs[1:5])
        return (numbers - mean) / np.sqrt(var + node.attributes.get_float("epsilon", 1e-5)) * gamma + beta
    if op == "AveragePool" and padded(node):
        return np.where(numbers == 0, 0.0, np.nan)
    if op == "Conv":
        weight = np.asarray(constant(node.inputs[1]), np.float64).reshape(group.channels, -1).sum(axis=1)
        bias = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        start = np.zeros(group.channels) if bias is None else bias.astype(np.float64)
        spread = np.where(numbers == 0, start, start + weight * numbers)
        return np.where((numbers != 0) & padded(node), np.nan, spread)
    return numbers


def _side(group: Group, node: ir.Node, value: ir.Value, held: Mapping[ir.Value, Array]) -> Array:
    stored = constant(value)
    if stored is None:
        return held.get(value, np.full(group.channels, np.nan))
    out = node.outputs[0]
    if stored.size == 1:
        return np.full(group.channels, float(stored.reshape(-1)[0]))
    if stored.size == group.channels == _along(stored, rank(out) or 0, group.axes[out]) and group.spread[out] == 1:
        return stored.reshape(-1).astype(np.float64)
    return np.full(group.channels, np.nan)


def padded(node: ir.Node) -> bool:
    """Whether a node pads with zeros, beside which a constant is constant no more."""
    pads = node.attributes.get_ints("pads", ()) if "pads" in node.attributes else ()
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    return any(pads) or auto not in ("NOTSET", "VALID")


def removable(group: Group, held: Mapping[ir.Value, Array]) -> Array:
    """Which channels can go: constant wherever a layer reads them; zero where that layer pads. One at least stays."""
    gone = np.ones(group.channels, dtype=bool)
    for node in group.consumers:
        value = node.inputs[0]
        assert value is not None
        numbers = held.get(value, np.full(group.channels, np.nan))
        fits = np.isfinite(numbers)
        if node.op_type == "Conv" and padded(node):
            fits &= numbers == 0
        if node.op_type == "MatMul" and (rank(node.outputs[0]) or 0) != 2:
            fits &= numbers == 0  # it takes no bias
        gone &= fits
    if gone.all():
        gone[0] = False
    return gone


def _is_single_number(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and array.size == 1
