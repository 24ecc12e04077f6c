"""The same thing twice: stored tensors of equal bytes, and nodes that compute the same from the same."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.facts import is_random, subgraphs
from layerline.graph.rewrite import Rewriting, drop_initializer
from layerline.graph.rule import Declined, Rule

_DIGEST = "layerline.digest"


def initializers(work: Rewriting) -> None:
    """Within a graph, and in bodies also against the graphs around them (whose tensors a body may read)."""
    for graph in work.graphs():
        kept: dict[Hashable, ir.Value] = {}
        for outer in reversed(work.around(graph)):
            kept |= {_contents(v): v for v in outer.initializers.values()}
        for value in list(graph.initializers.values()):
            first = kept.setdefault(_contents(value), value)
            if first is not value and not value.is_graph_output():
                value.replace_all_uses_with(first)
                drop_initializer(value)


def _contents(value: ir.Value) -> Hashable:
    tensor = value.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return id(value)
    # A value keeps its tensor for life, so its digest is taken once.
    known: Hashable = value.meta.get(_DIGEST)
    if known is None:
        digest = hashlib.blake2b(tensor.tobytes(), digest_size=16).digest()
        known = value.meta[_DIGEST] = tensor.dtype, tuple(tensor.shape.numpy()), digest
    return known


def nodes(work: Rewriting) -> None:
    """What reads the later of two equal nodes of a graph reads the earlier; never random ones, nor foreign domains."""
    for graph in work.graphs():
        seen: dict[Hashable, ir.Node] = {}
        for node in graph:
            if node.domain != "" or is_random(node) or subgraphs(node) or node.op_type == "Constant":
                continue
            first = seen.setdefault(_meaning(node), node)
            if first is not node:
                _merge(work, node, first)


def _meaning(node: ir.Node) -> Hashable:
    attributes = tuple(sorted((a.name, a.type, repr(a.value)) for a in node.attributes.values()))
    present = tuple(bool(o.name) for o in node.outputs)
    return node.op_identifier(), tuple(id(v) for v in node.inputs), attributes, present


def _merge(work: Rewriting, node: ir.Node, first: ir.Node) -> None:
    for old, new in zip(node.outputs, first.outputs, strict=True):
        if old.uses() or old.is_graph_output():
            try:
                work.fire(NODES.name, old, new, Tape())
            except Declined as declined:
                work.decline(NODES.name, old, str(declined))


INITIALIZERS = Rule("duplicate-initializers", "stored tensors of equal bytes, kept once", initializers)
NODES = Rule("duplicate-nodes", "nodes that compute the same from the same, kept once", nodes)
