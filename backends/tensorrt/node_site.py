"""A node with the control flow around it, and what the checks before a build ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from layerline.graph.analysis import ir_queries, provenance


@dataclass(frozen=True)
class Refusal:
    """A reason why TensorRT can't build the model.

    Attributes:
        tensor: name of the tensor it is about.
        where: tensor and node, with the module path where there is one.
        what: what the model has and what TensorRT takes.
        hint: what to change.
    """

    tensor: str
    where: str
    what: str
    hint: str


@dataclass(frozen=True)
class NodeSite:
    """A node and the control-flow nodes whose bodies it lies in, outermost first."""

    node: ir.Node
    inside: tuple[ir.Node, ...] = ()

    def refuse(self, value: ir.Value | None, what: str, hint: str) -> Refusal:
        """A refusal at this node, about one of its values."""
        tensor = ""
        parts: list[str] = []
        if value is not None and value.name:
            tensor = value.name
            parts.append(f"tensor {tensor}")
        parts.append(f"{self.node.op_type} node {name(self.node)}")
        modules = provenance.modules(self.node)
        if modules:
            parts.append(f"module {modules[0]}")
        return Refusal(tensor, ", ".join(parts), what, hint)


def sites(graph: ir.Graph, inside: tuple[ir.Node, ...] = ()) -> Iterator[NodeSite]:
    """Every node in order, those in bodies after the node that holds them."""
    for node in graph:
        yield NodeSite(node, inside)
        for body in ir_queries.subgraphs(node):
            yield from sites(body, (*inside, node))


def name(node: ir.Node) -> str:
    """The node's name, or that of its first output."""
    if node.name:
        return node.name
    for output in node.outputs:
        if output.name:
            return output.name
    return ""


def is_quantizer(node: ir.Node) -> bool:
    """Whether it is one of Q/DQ."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def readable(value: ir.Value | None) -> bool:
    """Whether the parser can read the value: absent, stored, a Constant, or one of these after Identity or Cast."""
    if value is None or value.const_value is not None:
        return True
    node = value.producer()
    if node is None:
        return False
    return node.op_type == "Constant" or (node.op_type in ("Identity", "Cast") and readable(node.inputs[0]))


def is_foldable(value: ir.Value | None) -> bool:
    """Whether the value is computed from constants alone."""
    pending = [value]
    visited = set[ir.Value]()
    while pending:
        current = pending.pop()
        if current is None or current.const_value is not None or current in visited:
            continue
        visited.add(current)
        node = current.producer()
        if node is None or ir_queries.is_random(node) or ir_queries.subgraphs(node):
            return False
        pending += node.inputs
    return True
