"""Questions asked of a graph in onnx's protobuf form; `ir_queries` answers those about onnx_ir's form.

In the order of nodes, what is measured comes as early as it can, so that the rest can be let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from layerline.backends.light import bodies
from layerline.graph.analysis.ir_queries import RANDOM


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


def in_order(wanted: Iterable[onnx.NodeProto], others: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The wanted nodes in their order, each with those of the others that it needs right before it."""
    stack = list(wanted)[::-1]
    makers: dict[str, onnx.NodeProto] = {}
    for node in (*stack, *others):
        makers.update((name, node) for name in node.output if name)
    ordered: list[onnx.NodeProto] = []
    # Depth first without recursion: a node stays on the stack until all that it reads is in order. Messages have no
    # hash, so nodes are told apart by their ids.
    opened: set[int] = set()
    done: set[int] = set()
    while stack:
        node = stack[-1]
        if id(node) not in opened:
            opened.add(id(node))
            needed = [makers[name] for name in reads(node) if name in makers]
            stack += [maker for maker in reversed(needed) if id(maker) not in opened]
            continue
        stack.pop()
        if id(node) not in done:
            done.add(id(node))
            ordered.append(node)
    return ordered


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names a node reads, those that its bodies take from outside among them."""
    yield from node.input
    for graph in bodies(node):
        inside = {item.name for item in (*graph.input, *graph.initializer)}
        read: list[str] = []
        for inner in graph.node:
            inside.update(inner.output)
            read += reads(inner)
        read += [output.name for output in graph.output]
        yield from (name for name in read if name not in inside)


def moving(graph: onnx.GraphProto) -> set[str]:
    """Values that may differ from run to run: what is computed from inputs, or drawn at random."""
    # Old files list what they store among the inputs.
    changing = {item.name for item in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        # A body may draw at random as well, so no control flow counts as constant.
        is_random = node.op_type in RANDOM | {"Dropout"} or bool(bodies(node))
        if is_random or not changing.isdisjoint(reads(node)):
            changing.update(node.output)
    return changing
