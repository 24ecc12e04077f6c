"""A shape as a person reads it: sizes nobody named as one sign, long names cut, brackets where they are needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

UNKNOWN = "?"
LONGEST = 12
"""Characters of a dimension's name that are shown."""

# What onnx's inference, this package and torch.export call a size that has no name.
_NAMELESS = re.compile(r"#|\bunk__\d+\b|\b[su]\d{2,}\b|\bu\d\b")
_NAME = re.compile(r"[^\W\d][\w.]*(?![\w.(])")
_NUMBERED = re.compile(r"[._-]?\d+$")
_MOST = 200  # characters of an expression that is worth taking apart


def shape(dims: Sequence[int | str], times: str = "×") -> str:
    """`batch×16×(h//2 + 1)`."""
    return times.join(_dim(d) if isinstance(d, str) else str(d) for d in dims)


def _dim(text: str) -> str:
    if not text or _NAMELESS.search(text):
        return UNKNOWN
    if not any(sign in text for sign in "+-*/("):
        return brief(text)
    names: list[str] = []

    def numbered(found: re.Match[str]) -> str:
        names.append(brief(found[0]))
        return f"_{len(names) - 1}_"

    try:
        tree = ast.parse(_NAME.sub(numbered, text[:_MOST]), mode="eval").body
    except SyntaxError:  # a name from elsewhere that only looks like an expression
        return brief(text)
    plain = re.sub(r" (//|\*) ", r"\1", ast.unparse(tree))
    told = re.sub(r"\b_(\d+)_\b", lambda found: names[int(found[1])], plain)
    alone = not isinstance(tree, ast.BinOp) or isinstance(tree.op, ast.Mult)
    return told if alone else f"({told})"


def brief(name: str) -> str:
    """A name cut in the middle, without the parts before its last dots; a number at its end stays."""
    if len(name) <= LONGEST:
        return name
    parts = name.split(".")
    kept = ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])
    if len(kept) <= LONGEST:
        return kept
    number = _NUMBERED.search(kept)
    tail = number[0][-LONGEST // 2 :] if number else kept[-LONGEST // 2 + 1 :]
    return f"{kept[: LONGEST - 1 - len(tail)]}…{tail}"
