"""Questions asked of a graph in onnx's protobuf form; `ir_queries` answers those about onnx_ir's form."""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def metadata(node: onnx.NodeProto, key: str) -> str:
    """One entry of a node's metadata; empty where there is none."""
    for entry in node.metadata_props:
        if entry.key == key:
            return str(entry.value)
    return ""


def stored(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Name and tensor of everything stored in one graph, Constant nodes included."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t


def node_label(node: onnx.NodeProto) -> str:
    """What a message calls a node: its name, or else its operator and first output."""
    if node.name:
        return str(node.name)
    return f"{node.op_type} of {first_output(node) or 'nothing'}"


def first_output(node: onnx.NodeProto) -> str:
    """The first output that has a name; empty where none has."""
    for name in node.output:
        if name:
            return str(name)
    return ""


def defined(graph: onnx.GraphProto) -> set[str]:
    """Every name that the graph itself gives a value, whatever the order of its nodes."""
    names = {item.name for item in (*graph.input, *graph.initializer)}
    names.update(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        names.update(filter(None, node.output))
    return names
