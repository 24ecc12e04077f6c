"""Memory that a program's inner values take, at the example's sizes and at others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from layerline.export import torch_private


def activation_bytes(program: ExportedProgram, symbols: Mapping[str, int] | None = None) -> int:
    """Bytes of all inner values.

    Args:
        symbols: numbers for torch's symbols, by name. Sizes that depend on other symbols are the example's.
    """
    # Expressions repeat over many values, and each takes sympy a while.
    numbers: dict[Any, int | None] = {}
    total = 0
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        sizes = []
        for size in value.shape:
            expr = getattr(getattr(size, "node", None), "expr", None)
            if symbols and expr is not None and expr not in numbers:
                numbers[expr] = _number(expr, symbols)
            sizes.append(numbers.get(expr) or _hint(size))
        total += math.prod(sizes) * value.element_size()
    return total


def _number(expr: Any, symbols: Mapping[str, int]) -> int | None:
    """The size that an expression comes to; None if it depends on further symbols."""
    values = {symbol: symbols[symbol.name] for symbol in expr.free_symbols if symbol.name in symbols}
    if len(values) < len(expr.free_symbols):
        return None
    return int(torch_private.evaluate(expr, values))


def _hint(size: int | torch.SymInt) -> int:
    """The size in the example; 1 for a size that depends on values."""
    if isinstance(size, int):
        return size
    return int(size.node.hint or 1)
