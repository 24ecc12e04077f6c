"""Finds the values of an exported program that are random: two runs differ there, so they can't be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram


def drawn(program: ExportedProgram) -> dict[str, str]:
    """Every node that depends on a random operator, with the first such operator's name."""
    sources: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        inherited = [sources[operand.name] for operand in node.all_input_nodes if operand.name in sources]
        if inherited:
            sources[node.name] = inherited[0]
        elif _draws(node):
            sources[node.name] = str(node.target)
    return sources


def first(program: ExportedProgram, nodes: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """The first random operator with its line, in words; empty where there is none.

    Args:
        nodes: program node of each value, by value name.
        lines: line of each value, in topological order.
    """
    random = drawn(program)
    for value, line in lines.items():
        if nodes.get(value) in random:
            return f"{random[nodes[value]]} ({line})"
    return next(iter(random.values()), "")


def dropout(program: ExportedProgram) -> tuple[fx.Node, float] | None:
    """The first operator that drops values in training mode, and its rate; None where all are switched off."""
    for node in program.graph.nodes:
        arguments = _arguments(node)
        rate = arguments.get("p", arguments.get("dropout"))
        training = arguments.get("train", arguments.get("training"))
        if training is True and isinstance(rate, float) and rate > 0.0:
            return node, rate
    return None


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Dropout and attention carry the tag even if they drop nothing.
    arguments = _arguments(node)
    training = arguments.get("train", arguments.get("training"))
    rate = arguments.get("dropout_p", arguments.get("p"))
    return training is not False and rate != 0.0


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by the operator's own names, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return {}
    arguments: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            arguments[argument.name] = node.args[index]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    return arguments | dict(node.kwargs)
