"""A node where it stands, what may be asked of its inputs before a build, and how a fault at it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from layerline.graph.analysis import ir_queries, provenance


@dataclass(frozen=True)
class Refusal:
    """One thing in the way of a build.

    Attributes:
        tensor: its name.
        where: tensor and node, with the module path where there is one.
        what: what was seen and what TensorRT takes.
        hint: what to change.
    """

    tensor: str
    where: str
    what: str
    hint: str


@dataclass(frozen=True)
class Site:
    """A node and the control-flow nodes whose bodies it lies in, outermost first."""

    node: ir.Node
    inside: tuple[ir.Node, ...] = ()

    def refuse(self, value: ir.Value | None, what: str, hint: str) -> Refusal:
        node = self.node
        tensor = (value.name if value is not None else None) or ""
        parts = [f"tensor {tensor}"] if tensor else []
        parts += [f"{node.op_type} node {name(node)}", *(f"module {m}" for m in provenance.modules(node)[:1])]
        return Refusal(tensor, ", ".join(parts), what, hint)


def sites(graph: ir.Graph, inside: tuple[ir.Node, ...] = ()) -> Iterator[Site]:
    """Every node in order, those in bodies after the node that holds them."""
    for node in graph:
        yield Site(node, inside)
        for body in ir_queries.subgraphs(node):
            yield from sites(body, (*inside, node))


def name(node: ir.Node) -> str:
    """The node's name, or that of its first output."""
    return node.name or next((o.name for o in node.outputs if o.name), "")


def is_quantizer(node: ir.Node) -> bool:
    """Whether it is one of Q/DQ."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def readable(value: ir.Value | None) -> bool:
    """Known to a parser: absent, an initializer, a Constant, or either behind Identity and Cast."""
    if value is None or value.const_value is not None:
        return True
    node = value.producer()
    if node is None:
        return False
    return node.op_type == "Constant" or (node.op_type in ("Identity", "Cast") and readable(node.inputs[0]))


def known(value: ir.Value | None) -> bool:
    """Follows from constants alone, however long the way."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        if current is None or current.const_value is not None or current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is None or ir_queries.is_random(node) or ir_queries.subgraphs(node):
            return False
        pending += node.inputs
    return True
