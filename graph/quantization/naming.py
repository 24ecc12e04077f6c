"""Names of nodes, and the nodes that a user's patterns match."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from layerline.calib.plan import Kept
from layerline.graph.analysis.ir_queries import first_output
from layerline.graph.analysis.provenance import modules
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import did_you_mean


def module_of(node: ir.Node) -> str:
    """The main module path of a node; empty where it belongs to no module."""
    return next(iter(modules(node)), "")


def kept_float(node: ir.Node, reason: str) -> Kept:
    """The line of a plan for a node that stays float."""
    return Kept(name=first_output(node), op=node.op_type, module=module_of(node), reason=reason)


def matching(model: ir.Model, patterns: Sequence[str], *, field: str, reads: bool = True) -> set[ir.Node]:
    """The nodes, in subgraphs too, that any pattern matches.

    A pattern is the name of a value that the node reads or writes, its own name, or its module path or one above it;
    or a glob of any of these.

    Args:
        reads: whether a computed value that a node reads names the node too.

    Raises:
        ConfigError: a pattern matches nothing in this model.
    """
    matches: dict[str, set[ir.Node]] = {p: set() for p in patterns}
    all_names: dict[str, None] = {}
    for node in model.graph.all_nodes():
        read = [v for v in node.inputs if v is not None and (reads or v.is_initializer())]
        values = [v.name for v in (*read, *node.outputs) if v.name]
        names = (*values, node.name or "", *modules(node))
        all_names.update(dict.fromkeys(filter(None, names)))
        for pattern in patterns:
            if any(fnmatchcase(n, pattern) or n.startswith(f"{pattern}.") for n in names):
                matches[pattern].add(node)
    for pattern, nodes in matches.items():
        if not nodes:
            raise ConfigError(
                f"{pattern!r} matches no value, node or module of the model",
                where=field,
                hint=did_you_mean(pattern, all_names, 0),
            )
    return set().union(*matches.values())
