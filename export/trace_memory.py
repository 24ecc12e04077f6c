"""What a program's inner values take, at the example's size and at any other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def activation_bytes(program: ExportedProgram, known: Mapping[str, int] | None = None) -> int:
    """Bytes of all inner values.

    Args:
        known: numbers for torch's symbols, by name; sizes that depend on others are taken as they are in the example.
    """
    metas = (n.meta.get("val") for n in program.graph.nodes if n.op == "call_function")
    values = [v for v in metas if isinstance(v, torch.Tensor)]
    exprs = {e for v in values for s in v.shape if (e := _expr(s)) is not None} if known else ()
    numbers = {e: _number(e, known or {}) for e in exprs}
    return sum(math.prod(numbers.get(_expr(s)) or _hint(s) for s in v.shape) * v.element_size() for v in values)


def _number(expr: Any, known: Mapping[str, int]) -> int | None:
    """What a size comes to, given torch's symbols by name; None where it depends on others."""
    values = {s: known[s.name] for s in expr.free_symbols if s.name in known}
    return int(sympy_interp(PythonReferenceAnalysis, values, expr)) if len(values) == len(expr.free_symbols) else None


def _expr(size: int | torch.SymInt) -> Any:
    return getattr(getattr(size, "node", None), "expr", None)


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 1)
