"""The same thing twice: stored tensors of equal bytes, and nodes that compute the same from the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import is_random, subgraphs
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import everywhere


@everywhere("duplicate-initializers")
def initializers(work: Rewriting) -> None:
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
def nodes(work: Rewriting) -> None:
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
                        work.fire("duplicate-nodes", old, new, Tape())
                    except Declined as declined:
                        work.decline("duplicate-nodes", old, str(declined))


def _meaning(node: ir.Node) -> Hashable:
    """What two nodes share that compute the same: operator, inputs, attributes and which outputs they have."""
    attributes = tuple(sorted((a.name, a.type, _exact(a)) for a in node.attributes.values()))
    present = tuple(bool(output.name) for output in node.outputs)
    return node.op_identifier(), tuple(map(id, node.inputs)), attributes, present


def _exact(attribute: ir.Attr) -> str:
    """What an attribute holds, to the last bit: tensors print a few digits only."""
    if attribute.is_ref() or attribute.type not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
        return repr((attribute.ref_attr_name, attribute.value))
    if attribute.type == ir.AttributeType.TENSOR:
        tensors = [attribute.as_tensor()]
    else:
        tensors = list(attribute.as_tensors())
    return repr([(tensor.dtype, tuple(tensor.shape), _content(tensor)) for tensor in tensors])


def _content(tensor: ir.TensorProtocol) -> object:
    return tensor.numpy().tolist() if tensor.dtype == ir.DataType.STRING else tensor.tobytes()
