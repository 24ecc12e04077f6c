"""Questions asked of a file in onnx's protobuf form, before it is checked and while it is written.

Everything else works on onnx_ir's form; `ir_queries` answers questions about that.
"""

from __future__ import annotations

import onnx

from layerline.backends.light import bodies


def graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """The main graph and every subgraph inside If, Loop, Scan and functions."""
    visited: list[onnx.GraphProto] = []
    pending: list[onnx.GraphProto] = [model.graph]
    for function in model.functions:
        for node in function.node:
            pending += bodies(node)
    while pending:
        graph = pending.pop()
        visited.append(graph)
        for node in graph.node:
            pending += bodies(node)
    return visited


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Every node: of the main graph, of subgraphs and of functions."""
    all_nodes: list[onnx.NodeProto] = []
    for graph in graphs(model):
        all_nodes += graph.node
    for function in model.functions:
        all_nodes += function.node
    return all_nodes


def tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every stored tensor: initializers and tensor attributes, in subgraphs and functions too."""
    all_tensors: list[onnx.TensorProto] = []
    for graph in graphs(model):
        all_tensors += graph.initializer
    for node in nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                all_tensors.append(attribute.t)
            all_tensors += attribute.tensors
    return all_tensors


def node_label(node: onnx.NodeProto) -> str:
    """What a message calls a node: its name, or else its operator and first output."""
    if node.name:
        return str(node.name)
    outputs = [name for name in node.output if name]
    return f"{node.op_type} of {outputs[0] if outputs else 'nothing'}"


def defined(graph: onnx.GraphProto) -> set[str]:
    """Every name that the graph itself gives a value, whatever the order of its nodes."""
    names = {item.name for item in (*graph.input, *graph.initializer)}
    names.update(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        names.update(filter(None, node.output))
    return names
