"""Values whose channels belong together, from the layers that make them to the layers that read them.

A channel that is the same constant wherever a layer reads it can go from all of them at once: from the weights that
make it, from everything that works channel by channel in between (residual additions included, where both sides are
constant), and from the weights that read it, whose bias takes the constant over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array
from layerline.graph.analysis.ir_queries import clip_bounds, constant, dim, optional_input, rank, reduced_axes, scalar
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.firing import Declined

ONE_TO_ONE = frozenset(
    {
        *("Relu", "Sigmoid", "Tanh", "Identity", "Dropout", "Neg", "Abs"),
        *("LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "HardSwish", "Erf", "Softsign"),
    }
)
"""Each element of their output is computed from the same element of their input."""
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
BINARY = frozenset({"Add", "Sub", "Mul"})
# These multiply their output with a positive factor where their input is multiplied with it.
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Neg", "Abs", *_POOLS})
# Their scale and bias hold one number for each channel: the channels lie on the last axis, or on axis 1.
_LAST_AXIS_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_NORMS = _LAST_AXIS_NORMS | {"BatchNormalization", "InstanceNormalization"}
_FLATTENING = frozenset({"Flatten", "Reshape", "Squeeze", "ReduceMean"})

Place = tuple[int, int]
"""The axis that holds the channels of a value, and how many neighbouring elements of it are one channel: more than one
behind a Flatten, which lays the pixels of a channel side by side."""


@dataclass
class Group:
    """Connected values and the nodes around them.

    Attributes:
        places: where every value has its channels.
        producers, between, consumers: the layers that make, pass on and read the values.
        scaling: whether each channel of all values can be multiplied with a positive number of its own, which the
            weights of the layers then make up for. A grouped convolution ends such a group, and what makes the values
            may be a normalisation or a product with constants.
        norms: those, in a group for scaling.
    """

    channels: int
    scaling: bool = False
    norms: dict[ir.Node, None] = field(default_factory=dict)
    places: dict[ir.Value, Place] = field(default_factory=dict)
    producers: dict[ir.Node, affine_ops.Linear] = field(default_factory=dict)
    between: dict[ir.Node, None] = field(default_factory=dict)
    consumers: dict[ir.Node, None] = field(default_factory=dict)

    def unknown(self) -> Array:
        """What the channels of a value hold where nothing is known: NaN each."""
        return np.full(self.channels, np.nan)


def gather(start: ir.Node, *, scaling: bool = False) -> Group:
    """The group of the values that a layer makes.

    Raises Declined where something on the way is an input or output of the model, or mixes channels as no layer does.
    """
    first = _producer(start, scaling)
    norm = _norm(start) if scaling else None
    if first is not None:
        group = Group(first.channels, scaling)
        place = (first.axis, 1)
    elif norm is not None:
        channels, place = norm
        group = Group(channels, scaling)
    else:
        raise Declined(f"{start.op_type} {start.outputs[0].name} is no layer with constant weights")
    pending: list[tuple[ir.Value, Place]] = [(start.outputs[0], place)]
    while pending:
        value, place = pending.pop()
        axis, spread = place
        if value in group.places:
            # A residual sum is reached over both of its sides; they must agree.
            if group.places[value] != place:
                raise Declined(f"channels of {value.name} lie along two axes")
            continue
        # A named size can't be told from the number of channels, so only an unknown one passes.
        if dim(value, axis) not in (group.channels * spread, None):
            raise Declined(f"{value.name} has {dim(value, axis)} channels, not {group.channels}")
        group.places[value] = place
        pending += _sources(group, value)
        pending += _readers(group, value)
    if group.norms.keys() & group.between.keys():
        raise Declined("a product with constants has values of the group on both sides")
    return group


def _producer(node: ir.Node | None, scaling: bool) -> affine_ops.Linear | None:
    """A layer whose output channels can be cut, or scaled, one by one."""
    if node is None:
        return None
    can_cut = node.op_type in ("Conv", "Gemm", "MatMul") and node.attributes.get_int("group", 1) == 1
    if not can_cut and not scaling:
        return None
    return affine_ops.behind(node.outputs[0])


def _norm(node: ir.Node) -> tuple[int, Place] | None:
    """The channels of a normalisation or of a product with constants, and where its output has them."""
    out = node.outputs[0]
    out_rank = rank(out)
    if node.domain != "" or out_rank is None or out_rank < 2:
        return None
    if node.op_type == "Mul":
        stored = [array for array in map(constant, node.inputs) if array is not None]
        if len(stored) != 1 or stored[0].ndim > out_rank or stored[0].size < 2:
            return None
        axis = out_rank - stored[0].ndim + int(np.argmax(stored[0].shape))
        if stored[0].size != max(stored[0].shape) or axis == 0:
            return None
        return stored[0].size, (axis, 1)
    if node.op_type not in _NORMS or node.attributes.get_int("training_mode", 0) != 0:
        return None
    axis = 1
    if node.op_type in _LAST_AXIS_NORMS:
        axis = out_rank - 1
        if node.attributes.get_int("axis", -1) not in (-1, axis):
            return None
    parameters = [constant(value) for value in node.inputs[1:3] if value is not None]
    if not parameters or any(array is None or array.ndim != 1 for array in parameters):
        return None
    assert parameters[0] is not None
    return parameters[0].size, (axis, 1)


def _sources(group: Group, value: ir.Value) -> list[tuple[ir.Value, Place]]:
    """Takes in what computes a value; the other values that this brings in."""
    node = value.producer()
    if node is None or value.is_graph_input():
        raise Declined(f"{value.name} is an input of the model")
    layer = _producer(node, group.scaling)
    if layer is None:
        if group.scaling and node not in group.between and _norm(node) == (group.channels, group.places[value]):
            group.norms[node] = None
            return []
        return _through(group, node, value)
    if (layer.axis, 1) != group.places[value] or layer.channels != group.channels:
        raise Declined(f"channels of {value.name} are not those of {node.op_type} {node.outputs[0].name}")
    group.producers[node] = layer
    return []


def _readers(group: Group, value: ir.Value) -> list[tuple[ir.Value, Place]]:
    """Takes in what reads a value; the other values that this brings in."""
    if value.is_graph_output():
        raise Declined(f"{value.name} is an output of the model")
    producer = value.producer()
    more: list[tuple[ir.Value, Place]] = []
    for use in value.uses():
        node = use.node
        if producer is None or node.graph is not producer.graph:
            raise Declined(f"{value.name} is read in a body")
        if use.idx == 0 and _sums_over_channels(node, group.places[value], group.scaling):
            group.consumers[node] = None
        # Its other side may have taken it in before.
        elif node not in group.between:
            more += _through(group, node, value)
    return more


def _sums_over_channels(node: ir.Node, place: Place, scaling: bool) -> bool:
    """Whether a node is a layer that sums over the channels at `place` with constant weights."""
    axis, spread = place
    weight = constant(optional_input(node, 1))
    if weight is None or node.domain != "":
        return False
    if scaling and node.op_type in ("Conv", "ConvTranspose"):
        return axis == 1 and spread == 1 and _has_constant_bias(node)
    if node.op_type == "Conv":
        return axis == 1 and node.attributes.get_int("group", 1) == 1 and _has_constant_bias(node)
    if node.op_type == "Gemm":
        return axis == 1 and not node.attributes.get_int("transA", 0) and _has_constant_bias(node)
    data_rank = rank(node.inputs[0])
    return node.op_type == "MatMul" and weight.ndim == 2 and data_rank is not None and axis == data_rank - 1


def _has_constant_bias(node: ir.Node) -> bool:
    bias = optional_input(node, 2)
    return bias is None or constant(bias) is not None


def _through(group: Group, node: ir.Node, value: ir.Value) -> list[tuple[ir.Value, Place]]:
    """Takes in a node that works channel by channel; its values with their places, seen from one of them."""
    group.between[node] = None
    data = node.inputs[0]
    out = node.outputs[0]
    label = f"{node.op_type} {out.name}"
    if node.domain != "" or data is None or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        raise Declined(f"{label} is not followed channel by channel")
    place = group.places[value]
    if node.op_type in _FLATTENING:
        return _flat(group, node, data, value)
    if node.op_type in BINARY:
        return _binary(group, node, value)
    if not _keeps_channels(group, node, place):
        raise Declined(f"{label} reads {value.name} and is not followed channel by channel")
    return [(other, place) for other in (data, out) if other is not value]


def _keeps_channels(group: Group, node: ir.Node, place: Place) -> bool:
    """Whether each channel of a node's output is computed from the same channel of its input alone."""
    op = node.op_type
    passes_factors = op in _HOMOGENEOUS
    if op == "Clip":
        passes_factors = clip_bounds(node) in ((0.0, math.inf), (-math.inf, math.inf))
    if group.scaling and not passes_factors:
        return False
    if op in ONE_TO_ONE:
        return True
    # One slope per channel would have to be cut with them.
    if op in ("Clip", "PRelu"):
        return all(value is None or scalar(value) is not None for value in node.inputs[1:])
    axis, spread = place
    # What follows takes axis 1 for the channels, whatever the graph means by it.
    if axis != 1:
        return False
    if op in _POOLS:
        return True
    if spread != 1:
        return False
    if op == "BatchNormalization" and not node.attributes.get_int("training_mode", 0):
        return all(constant(parameter) is not None for parameter in node.inputs[1:5])
    # Depthwise: each channel has a kernel of its own.
    weight = constant(optional_input(node, 1))
    if op != "Conv" or weight is None or node.attributes.get_int("group", 1) != group.channels:
        return False
    return weight.shape[:2] == (group.channels, 1) and _has_constant_bias(node)


def _binary(group: Group, node: ir.Node, value: ir.Value) -> list[tuple[ir.Value, Place]]:
    """Two values of one shape, or one and a constant of one number, or one number per channel."""
    place = group.places[value]
    axis, spread = place
    out = node.outputs[0]
    if group.scaling and node.op_type == "Mul" and all(constant(v) is None for v in node.inputs):
        raise Declined(f"Mul {out.name} would multiply two scaled values")
    # With more axes on one side the channels of the other would lie elsewhere.
    ranks = {rank(v) for v in (*node.inputs, out) if v is not None and constant(v) is None}
    if len(ranks) != 1 or None in ranks:
        raise Declined(f"{node.op_type} {out.name} broadcasts over a number of axes")
    more: list[tuple[ir.Value, Place]] = []
    if out is not value:
        more.append((out, place))
    for other in node.inputs:
        if other is None or other is value:
            continue
        stored = constant(other)
        if stored is None:
            more.append((other, place))
        elif size_along(stored, rank(out) or 0, axis) not in (1, group.channels * spread):
            raise Declined(f"{other.name} has {size_along(stored, rank(out) or 0, axis)} channels")
    return more


def size_along(array: Array, out_rank: int, axis: int) -> int:
    """Size of a constant along an axis of what it is broadcast to."""
    own_axis = axis - (out_rank - array.ndim)
    return 1 if own_axis < 0 else int(array.shape[own_axis])


def _flat(group: Group, node: ir.Node, data: ir.Value, value: ir.Value) -> list[tuple[ir.Value, Place]]:
    """From (N, C, …) to (N, C · …) or (N, C): a mean over all that follows the channels, or a reshaping."""
    out = node.outputs[0]
    label = f"{node.op_type} {out.name}"
    if data.shape is None or out.shape is None or len(data.shape) < 3:
        raise Declined(f"{label} has no known shape of three axes or more")
    spread = 1
    # A mean over all pixels of a constant channel is that constant.
    if node.op_type == "ReduceMean":
        axes = reduced_axes(node)
        reduced: set[int] = set()
        if axes is not None:
            reduced = {int(axis) % len(data.shape) for axis in axes.ravel()}
        if not reduced or reduced & {0, 1}:
            raise Declined(f"{label} reduces the channels or the batch")
    else:
        joined = _flattened(group, node, data)
        if joined is None:
            raise Declined(f"{label} does more than to lay the pixels of each channel side by side")
        spread = joined
    places = ((data, (1, 1)), (out, (1, spread)))
    return [(other, place) for other, place in places if other is not value]


def _flattened(group: Group, node: ir.Node, data: ir.Value) -> int | None:
    """How many elements of one channel a reshaping lays side by side; None where it does more than that."""
    out = node.outputs[0]
    behind = [dim(data, axis) for axis in range(2, rank(data) or 0)]
    numbers = [size for size in behind if isinstance(size, int)]
    spread = math.prod(numbers)
    if rank(out) != 2 or len(numbers) < len(behind) or dim(out, 1) not in (group.channels * spread, None):
        return None
    # A Squeeze joins nothing, and a Flatten from another axis on takes in the batch.
    if node.op_type == "Squeeze" and spread != 1:
        return None
    if node.op_type == "Flatten" and node.attributes.get_int("axis", 1) != 1:
        return None
    if node.op_type == "Reshape":
        target = constant(node.inputs[1])
        if target is None or target.size != 2 or int(target[1]) not in (-1, group.channels * spread):
            return None
    return spread
