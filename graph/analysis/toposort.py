"""The order of a graph's nodes: what is measured comes as early as it can, so that the rest can be let go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from layerline.backends.light import bodies
from layerline.graph.analysis.ir_queries import RANDOM


def in_order(wanted: Iterable[onnx.NodeProto], others: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The wanted nodes in their order, each with those of the others that it needs right before it."""
    stack = list(wanted)[::-1]
    makers = {o: n for n in (*stack, *others) for o in n.output if o}
    ordered, opened, done = list[onnx.NodeProto](), set[int](), set[int]()
    while stack:
        node = stack[-1]
        if id(node) not in opened:
            opened.add(id(node))
            needed = [makers[v] for v in reads(node) if v in makers]
            stack += [n for n in reversed(needed) if id(n) not in opened]
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
        made = {o for n in graph.node for o in n.output} | {v.name for v in (*graph.input, *graph.initializer)}
        outside = [*(v for n in graph.node for v in reads(n)), *(o.name for o in graph.output)]
        yield from (v for v in outside if v not in made)


def moving(graph: onnx.GraphProto) -> set[str]:
    """Values that may differ from run to run: what is computed from inputs, or drawn at random."""
    stored = {t.name for t in graph.initializer}
    found = {i.name for i in graph.input if i.name not in stored}
    for node in graph.node:
        if node.op_type in RANDOM | {"Dropout"} or bodies(node) or not found.isdisjoint(reads(node)):
            found.update(node.output)
    return found
