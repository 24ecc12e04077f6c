"""Which nodes of a graph a user's patterns mean."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from layerline.graph.analysis.provenance import modules
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import did_you_mean


def first_output(node: ir.Node) -> str:
    """What identifies a node: the name of its first output that has one."""
    return next((o.name for o in node.outputs if o.name), "")


def module_of(node: ir.Node) -> str:
    """The main module path of a node; empty where it belongs to no module."""
    return next(iter(modules(node)), "")


def matching(model: ir.Model, patterns: Sequence[str], *, field: str) -> set[ir.Node]:
    """The nodes, in bodies too, that any pattern means.

    A pattern is the name of a value that the node reads or writes, its own name, or its module path or one above it;
    or a glob of any of these.

    Raises:
        ConfigError: a pattern means nothing in this model.
    """
    found: dict[str, set[ir.Node]] = {p: set() for p in patterns}
    known: dict[str, None] = {}
    for node in model.graph.all_nodes():
        values = [v.name for v in (*node.inputs, *node.outputs) if v is not None and v.name]
        names = (*values, node.name or "", *modules(node))
        known |= dict.fromkeys(filter(None, names))
        for pattern in patterns:
            if any(fnmatchcase(n, pattern) or n.startswith(f"{pattern}.") for n in names):
                found[pattern].add(node)
    for pattern, nodes in found.items():
        if not nodes:
            raise ConfigError(
                f"{pattern!r} matches no value, node or module of the model",
                where=field,
                hint=did_you_mean(pattern, known, 0),
            )
    return set().union(*found.values())
