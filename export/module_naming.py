"""Modules of any name: torch writes attribute paths into Python code as they are, and some names are no Python."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def any_names() -> Iterator[None]:
    """Inside, torch's generated code reads modules called `class`, `a"b` or the like by a literal of their name."""
    with patch.object(torch.fx.graph, "_format_target", _attribute):
        yield


def _attribute(base: str, target: str) -> str:
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
    return base
