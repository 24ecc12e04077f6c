"""What can go without a trace: what is unread or there twice, and nodes that do nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, constant_tensor, is_random, rank, subgraphs, trains
from layerline.graph.analysis.shape_functions import slice_bounds, takes_whole
from layerline.graph.analysis.shape_inference import ShapeSymbols
from layerline.graph.analysis.symbolic_sizes import sizes
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting, drop_initializer
from layerline.graph.fusion.rule import each, everywhere, on


@each("constants", "Constant")
def store(node: ir.Node, work: Rewriting) -> None:
    """A Constant node as an initializer, so that every later rule and stage finds weights in one place."""
    tensor = constant_tensor(node)
    if node.outputs[0].is_graph_output():
        return
    if tensor is None:
        raise Declined(f"Constant {node.outputs[0].name} holds no dense numeric tensor")
    work.fold("constants", node.outputs[0], tensor)


@everywhere("dead-code")
def remove_unread(work: Rewriting) -> None:
    """Nodes and stored tensors that no output depends on."""
    for graph in list(work.graphs()):
        work.prune(reversed(list(graph)))
        for value in list(graph.initializers.values()):
            if not value.uses():
                drop_initializer(value)


@everywhere("duplicate-initializers")
def duplicate_initializers(work: Rewriting) -> None:
    """Within a graph, and in bodies also against the graphs around them.

    A body may read what is stored around it; the names of a prepared model leave no doubt whose tensor is meant. Bodies
    of foreign operators keep their own.
    """
    for graph in work.graphs():
        alike: dict[Hashable, list[ir.Value]] = {}
        for outer in work.reachable(graph):
            for value in outer.initializers.values():
                alike.setdefault(_look(value), []).append(value)
        for value in list(graph.initializers.values()):
            group = alike.setdefault(_look(value), [])
            first = next((other for other in group if _digest(other) == _digest(value)), None)
            if first is None:
                group.append(value)
            elif value.is_graph_output():
                work.decline("duplicate-initializers", value, f"stored tensor {value.name} is a graph output")
            else:
                work.merge("duplicate-initializers", value, first)


def _look(value: ir.Value) -> Hashable:
    """What equal tensors share and few others do; nothing large is read for it."""
    tensor = value.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return id(value)
    return _once(value, "look", lambda: (tensor.dtype, tuple(tensor.shape.numpy()), tensor.numpy().flat[:16].tobytes()))


def _digest(value: ir.Value) -> Hashable:
    tensor = value.const_value
    assert tensor is not None
    return _once(value, "digest", lambda: hashlib.blake2b(tensor.tobytes(), digest_size=16).digest())


def _once(value: ir.Value, key: str, read: Callable[[], Hashable]) -> Hashable:
    """A value keeps its tensor for life, so what is read of it is read once."""
    if key not in value.meta:
        value.meta[key] = read()
    result: Hashable = value.meta[key]
    return result


@everywhere("duplicate-nodes")
def duplicate_nodes(work: Rewriting) -> None:
    """What reads the later of two equal nodes of a graph reads the earlier; never random ones, nor foreign domains."""
    for graph in work.graphs():
        first_by_meaning: dict[Hashable, ir.Node] = {}
        for node in graph:
            if node.domain != "" or is_random(node) or subgraphs(node) or node.op_type == "Constant":
                continue
            # In order of the graph, so that the earlier one is computed before all readers of the later one.
            first = first_by_meaning.setdefault(_meaning(node), node)
            if first is node:
                continue
            for old, new in zip(node.outputs, first.outputs, strict=True):
                if old.uses() or old.is_graph_output():
                    try:
                        work.swap("duplicate-nodes", [(old, new)], [], [])
                    except Declined as declined:
                        work.decline("duplicate-nodes", old, str(declined))


def _meaning(node: ir.Node) -> Hashable:
    """What two nodes share that compute the same: operator, inputs, attributes and which outputs they have."""
    attributes = tuple(sorted((a.name, a.type, _exact(a)) for a in node.attributes.values()))
    present = tuple(bool(output.name) for output in node.outputs)
    return node.op_identifier(), tuple(map(id, node.inputs)), attributes, present


def _exact(attribute: ir.Attr) -> str:
    """What an attribute holds, to the last bit: tensors print a few digits only."""
    content = attribute.value
    if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
        tensor = attribute.as_tensor()
        content = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tolist())
    return repr((attribute.ref_attr_name, content))


@on("identity", "Identity")
def identity(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    return node.inputs[0]


@on("dropout", "Dropout")
def dropout(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    if trains(node):
        raise Declined(f"Dropout {node.outputs[0].name} may be in training mode")
    return node.inputs[0]


@on("noop-reshape", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand")
def reshape(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape, Flatten, Squeeze, Unsqueeze and Expand to the shape a value has."""
    before = sizes(node.inputs[0])
    return node.inputs[0] if before is not None and before == sizes(node.outputs[0]) else None


@on("noop-transpose", "Transpose")
def transpose(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    perm = permutation(node)
    return node.inputs[0] if perm is not None and perm == tuple(range(len(perm))) else None


@on("noop-slice", "Slice")
def slice_all(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    value = node.inputs[0]
    bounds = slice_bounds(ShapeSymbols(), node)
    if value is None or value.shape is None or bounds is None:
        return None
    for start, end, axis, step in zip(*bounds, strict=True):
        if not isinstance(axis, int) or not takes_whole(start, end, step, value.shape[axis]):
            return None
    return value


@on("noop-pad", "Pad")
def pad(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    amounts = constant(node.inputs[1])
    if amounts is None or amounts.any():
        return None
    return node.inputs[0]


@on("noop-single", "Concat", "Sum", "Max", "Min", "Mean")
def single(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Concat, Sum, Max, Min and Mean of one value."""
    return node.inputs[0] if len(node.inputs) == 1 else None


@on("noop-arithmetic", "Add", "Sub", "Mul", "Div", "Pow")
def arithmetic(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """x * 1, x / 1, x + 0, x - 0 and x ** 1, where the constant doesn't broadcast x to another shape."""
    # 0 - x and 1 / x are not x.
    sides: tuple[int, ...] = (0, 1) if node.op_type in ("Add", "Mul") else (0,)
    neutral = 0 if node.op_type in ("Add", "Sub") else 1
    for side in sides:
        value = node.inputs[side]
        amount = constant(node.inputs[1 - side])
        # An operator that changes the type does something.
        if value is None or amount is None or not (amount == neutral).all() or value.dtype != node.outputs[0].dtype:
            continue
        count = rank(value)
        # One number leaves the shape as it is, unless it comes with more axes.
        scalar = amount.size == 1 and count is not None and amount.ndim <= count
        if scalar or (sizes(value) is not None and sizes(value) == sizes(node.outputs[0])):
            return value
    return None


def permutation(node: ir.Node) -> tuple[int, ...] | None:
    """What a Transpose does; its default turns the axes round, which takes the rank."""
    perm = node.attributes.get("perm")
    if perm is not None:
        return tuple(perm.as_ints())
    count = rank(node.inputs[0])
    return None if count is None else tuple(reversed(range(count)))


@on("noop-cast", "Cast", "CastLike")
def cast(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    value = node.inputs[0]
    to = _target(node)
    if value is None or value.dtype is None or to is None:
        return None
    if value.dtype == to:
        return value
    if node.op_type == "CastLike":
        # With the node's own attributes, which say what becomes of numbers beyond an 8-bit float.
        return tape.op("Cast", [value], {**node.attributes, "to": int(to)})
    return None


def _target(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    like = node.inputs[1]
    return None if like is None else like.dtype
