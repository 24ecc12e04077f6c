"""Formats a shape for people: unnamed sizes as `?`, long names cut, parentheses only where they are needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

UNKNOWN = "?"
LONGEST = 12
"""Characters of a dimension's name that are shown."""

# Placeholders that onnx's shape inference, this package and torch.export write for a size without a name.
_NAMELESS = re.compile(r"#|\bunk__\d+\b|\b[su]\d{2,}\b|\bu\d\b")
_NAME = re.compile(r"[^\W\d][\w.]*(?![\w.(])")
_TRAILING_NUMBER = re.compile(r"[._-]?\d+$")
_MOST = 200  # longer expressions are cut before they are parsed


def shape(dims: Sequence[int | str], times: str = "×") -> str:
    """`batch×16×(h//2 + 1)`."""
    return times.join(map(_size, dims))


def _size(dim: int | str) -> str:
    """A number, or a symbolic dimension: a name or an expression over names."""
    text = str(dim)
    if not text or _NAMELESS.search(text):
        return UNKNOWN
    if not any(sign in text for sign in "+-*/("):
        return brief(text)
    names: list[str] = []

    # Names may hold dots, which Python's parser reads differently, so they are parsed as `_0_`, `_1_`.
    def placeholder(match: re.Match[str]) -> str:
        names.append(brief(match[0]))
        return f"_{len(names) - 1}_"

    def original(match: re.Match[str]) -> str:
        return names[int(match[1])]

    try:
        tree = ast.parse(_NAME.sub(placeholder, text[:_MOST]), mode="eval").body
    except SyntaxError:  # a name from another tool that only looks like an expression
        return brief(text)
    # `h // 2` is written `h//2`, so that only sums have spaces.
    compact = re.sub(r" (//|\*) ", r"\1", ast.unparse(tree))
    expression = re.sub(r"\b_(\d+)_\b", original, compact)
    # The dimensions are joined by a times sign, so everything that binds less tightly needs parentheses.
    if isinstance(tree, ast.BinOp) and not isinstance(tree.op, ast.Mult):
        return f"({expression})"
    return expression


def brief(name: str) -> str:
    """Shortens a name to its last dotted part, then cuts it in the middle; a number at its end stays."""
    if len(name) <= LONGEST:
        return name
    parts = name.split(".")
    last = parts[-2:] if parts[-1].isdigit() else parts[-1:]
    short_name = ".".join(last)
    if len(short_name) <= LONGEST:
        return short_name
    number = _TRAILING_NUMBER.search(short_name)
    if number:
        tail = number[0][-LONGEST // 2 :]
    else:
        tail = short_name[-LONGEST // 2 + 1 :]
    return f"{short_name[: LONGEST - 1 - len(tail)]}…{tail}"
