"""Who a node descends from: module paths, source lines and replaced values, kept in the node's own metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx_ir as ir

from layerline.backends.base import MODULE

# Under MODULE stand the paths of everything the node computes, the main one first, separated by a comma and a blank.
RULE = "layerline.rule"
"""Rules that made the node, in the order they fired, separated likewise."""
SOURCES = "layerline.sources"
"""Names of the values it replaced, in topological order, as a JSON list."""


def modules(node: ir.Node) -> tuple[str, ...]:
    """Module paths of a node, the main one first."""
    return _listed(node, MODULE)


def sources(node: ir.Node) -> tuple[str, ...]:
    """Values that a rewritten node replaced; empty where nothing was rewritten."""
    return tuple(json.loads(node.metadata_props.get(SOURCES, "[]")))


def stamp(made: Sequence[ir.Node], gone: Sequence[ir.Node], rule: str) -> tuple[str, ...]:
    """Writes onto the nodes made what they replace, and returns the module paths.

    The main source is the one of the same operator (the Conv of a Conv with its BatchNormalization), else the first
    that belongs to a module. Whatever the exporter wrote on it is carried over.
    """
    replaced = [node for node in gone if node.op_type != "Constant"]
    made_ops = {node.op_type for node in made}
    # False sorts before True: of the same operator first, then one that has a module.
    main = min(replaced, key=lambda node: (node.op_type not in made_ops, not modules(node)), default=None)
    # Dictionaries keep each once, in order.
    paths: dict[str, None] = {}
    values: dict[str, None] = {}
    rules: dict[str, None] = {}
    if main is not None:
        paths.update(dict.fromkeys(modules(main)))
    for node in replaced:
        paths.update(dict.fromkeys(modules(node)))
        values.update(dict.fromkeys(sources(node)))
        values.update((output.name, None) for output in node.outputs if output.name)
        rules.update(dict.fromkeys(_listed(node, RULE)))
    for node in made:
        metadata_before = dict(node.metadata_props)
        if main is not None:
            node.metadata_props.update(main.metadata_props)
        node.metadata_props[MODULE] = ", ".join(paths)
        node.metadata_props[SOURCES] = json.dumps(list(values), ensure_ascii=False)
        # A node that comes out of a branch keeps its own module and sources.
        node.metadata_props.update(metadata_before)
        node.metadata_props[RULE] = ", ".join((*rules, rule))
        if not node.metadata_props[MODULE]:
            del node.metadata_props[MODULE]
    return tuple(paths)


def _listed(node: ir.Node, key: str) -> tuple[str, ...]:
    """The parts of a metadata entry that holds a list."""
    return tuple(filter(None, node.metadata_props.get(key, "").split(", ")))
