"""Questions about an exported program: what it stores, what it draws at random, how much memory its values take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from layerline.export import torch_private


def stored(program: ExportedProgram) -> dict[str, Any]:
    """Parameters, buffers and constants of a program by the name of their placeholder."""
    values: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            values[spec.arg.name] = spec.arg.value
        elif spec.kind is not InputKind.USER_INPUT:
            table: Mapping[str, Any] = program.state_dict
            if spec.target not in table:
                table = program.constants
            values[spec.arg.name] = table[str(spec.target)]
    return values


def drawn(program: ExportedProgram) -> dict[str, str]:
    """Every node that depends on a random operator, with the first such operator's name. Two runs differ there."""
    sources: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        inherited = [sources[operand.name] for operand in node.all_input_nodes if operand.name in sources]
        # What is computed from a random value is as random.
        if inherited:
            sources[node.name] = inherited[0]
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            # Dropout and attention carry the tag even if they drop nothing.
            rate, training = _dropout(node)
            if training is not False and rate != 0.0:
                sources[node.name] = str(node.target)
    return sources


def first_drawn(program: ExportedProgram, nodes: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """The first random operator with its line, in words; empty where there is none.

    `nodes` and `lines` give the program node and the line of each value, in topological order.
    """
    random = drawn(program)
    for value, line in lines.items():
        if nodes.get(value) in random:
            return f"{random[nodes[value]]} ({line})"
    return next(iter(random.values()), "")


def dropout(program: ExportedProgram) -> tuple[fx.Node, float] | None:
    """The first operator that drops values in training mode, and its rate; None where all are switched off."""
    for node in program.graph.nodes:
        rate, training = _dropout(node)
        if training is True and isinstance(rate, float) and rate > 0.0:
            return node, rate
    return None


def _dropout(node: fx.Node) -> tuple[Any, Any]:
    """The dropout rate and the training switch among a node's arguments; None where it has no such argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None, None
    arguments: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            arguments[argument.name] = node.args[index]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    arguments |= node.kwargs
    # nn.Dropout, recurrent layers and attention name their rate differently.
    rates = [arguments[name] for name in ("p", "dropout", "dropout_p") if name in arguments]
    switches = [arguments[name] for name in ("train", "training") if name in arguments]
    return next(iter(rates), None), next(iter(switches), None)


def activation_bytes(program: ExportedProgram, symbols: Mapping[str, int] | None = None) -> int:
    """Bytes of all inner values, with numbers for torch's symbols by name; sizes of other symbols are the example's."""
    # Expressions repeat over many values, and each takes sympy a while.
    numbers: dict[Any, int | None] = {}
    total = 0
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        sizes: list[int] = []
        for size in value.shape:
            expr = getattr(getattr(size, "node", None), "expr", None)
            if symbols and expr is not None and expr not in numbers:
                values = {symbol: symbols[symbol.name] for symbol in expr.free_symbols if symbol.name in symbols}
                numbers[expr] = None
                if len(values) == len(expr.free_symbols):
                    numbers[expr] = int(torch_private.evaluate(expr, values))
            sizes.append(numbers.get(expr) or example_size(size))
        total += math.prod(sizes) * value.element_size()
    return total


def example_size(size: int | torch.SymInt) -> int:
    """The size in the example; 1 for a size that depends on values."""
    return size if isinstance(size, int) else int(size.node.hint or 1)
