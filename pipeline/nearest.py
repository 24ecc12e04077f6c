"""Which valid name was meant by one that is not valid: the one place for "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILAR = 0.6
"""How much of two names must agree, from 0 to 1, for one to stand for the other; difflib's own default."""


def closest(name: str, valid: Iterable[str], similarity: float = SIMILAR) -> str:
    """The valid name that is most like `name`, whatever their case; empty where none is similar enough."""
    by_lower = {v.lower(): v for v in valid}
    matches = difflib.get_close_matches(name.lower(), by_lower, 1, similarity)
    if not matches:
        return ""
    return by_lower[matches[0]]


def did_you_mean(name: str, valid: Iterable[str], similarity: float = SIMILAR) -> str:
    """The closest valid name as a hint, "did you mean 'engine'?"; empty where none is similar enough."""
    match = closest(name, valid, similarity)
    if not match:
        return ""
    return f"did you mean {match!r}?"


def hint(name: str, valid: Iterable[str]) -> str:
    """The closest valid name as a hint, or all valid names where none is close."""
    names = sorted(set(valid))
    return did_you_mean(name, names) or f"valid names: {', '.join(names)}"
