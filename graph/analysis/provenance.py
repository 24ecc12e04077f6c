"""Who a node descends from: module paths, source lines and replaced values, kept in the node's own metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from layerline.backends.base import MODULE

# Under MODULE stand the paths of everything the node computes, the main one first, separated by a comma and a blank.
RULE = "layerline.rule"
"""Rules that made the node, in the order they fired, separated likewise."""
SOURCES = "layerline.sources"
"""Names of the values it replaced, in topological order, as a JSON list."""


def modules(node: ir.Node) -> tuple[str, ...]:
    """Module paths of a node, the main one first."""
    return tuple(filter(None, node.metadata_props.get(MODULE, "").split(", ")))


def sources(node: ir.Node) -> tuple[str, ...]:
    """Values that a rewritten node replaced; empty where nothing was rewritten."""
    return tuple(json.loads(node.metadata_props.get(SOURCES, "[]")))


def stamp(made: Sequence[ir.Node], gone: Sequence[ir.Node], rule: str) -> tuple[str, ...]:
    """Writes onto the nodes made what they replace, and returns the module paths.

    The main source is the one of the same operator (the Conv of a Conv with its BatchNormalization), else the first
    that belongs to a module. Whatever the exporter wrote on it is carried over.
    """
    told = [n for n in gone if n.op_type != "Constant"]
    wanted = {n.op_type for n in made}
    main = min(told, key=lambda n: (n.op_type not in wanted, not modules(n)), default=None)
    ordered = [*([main] if main is not None else []), *told]
    paths = _unique(m for n in ordered for m in modules(n))
    replaced = _unique(v for n in told for v in (*sources(n), *(o.name for o in n.outputs if o.name)))
    rules = _unique(r for n in told for r in n.metadata_props.get(RULE, "").split(", ") if r)
    for node in made:
        told_itself = dict(node.metadata_props)
        node.metadata_props.update(main.metadata_props if main is not None else {})
        node.metadata_props[MODULE] = ", ".join(paths)
        node.metadata_props[SOURCES] = json.dumps(replaced, ensure_ascii=False)
        # Nodes that come out of a branch know whose they are.
        node.metadata_props.update(told_itself)
        node.metadata_props[RULE] = ", ".join((*rules, rule))
        if not node.metadata_props[MODULE]:
            del node.metadata_props[MODULE]
    return paths


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
