"""The order of a graph's nodes: what is measured comes as early as it can, so that the rest can be let go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from layerline.backends.light import bodies
from layerline.graph.analysis.ir_queries import RANDOM


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
    stored = {tensor.name for tensor in graph.initializer}
    # Old files list what they store among the inputs.
    changing = {item.name for item in graph.input if item.name not in stored}
    for node in graph.node:
        # A body may draw at random as well, so no control flow counts as constant.
        is_random = node.op_type in RANDOM | {"Dropout"} or bool(bodies(node))
        if is_random or not changing.isdisjoint(reads(node)):
            changing.update(node.output)
    return changing
