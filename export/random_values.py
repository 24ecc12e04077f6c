"""Which values of an exported program are drawn at random: two runs differ there, and no comparison means anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram


def drawn(program: ExportedProgram) -> dict[str, str]:
    """Every node that depends on a random operator, with the first such operator's name."""
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        source = next((found[n.name] for n in node.all_input_nodes if n.name in found), None)
        if source or _draws(node):
            found[node.name] = source or str(node.target)
    return found


def first(program: ExportedProgram, nodes: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """The first random operator with its line, in words; empty where there is none.

    Args:
        nodes: program node of each value, by value name.
        lines: line of each value, in topological order.
    """
    random = drawn(program)
    at = next((v for v in lines if nodes.get(v) in random), None)
    return f"{random[nodes[at]]} ({lines[at]})" if at else next(iter(random.values()), "")


def dropout(program: ExportedProgram) -> tuple[fx.Node, float] | None:
    """The first operator that drops values in training mode, and its rate; None where all are switched off."""
    for node in program.graph.nodes:
        given = _arguments(node)
        rate = given.get("p", given.get("dropout"))
        if given.get("train", given.get("training")) is True and isinstance(rate, float) and rate > 0.0:
            return node, rate
    return None


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = _arguments(node)
    # Dropout and attention carry the tag even where they are told to drop nothing.
    return given.get("train", given.get("training")) is not False and given.get("dropout_p", given.get("p")) != 0.0


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by the operator's own names, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return {}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
