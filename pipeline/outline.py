"""Arrays, and trees of them, in words. A tensor is recognised by its `detach`: torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def outlined(value: Any) -> str:
    """Types and shapes of a tree of arrays, in words: `{boxes: float32 (2, 4), label: int64 (2,)}`."""
    if is_array(value):
        return f"{dtype_name(value)} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        entries = [f"{key}: {outlined(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, tuple | list):
        items = [outlined(item) for item in value[:8]]
        if len(value) > len(items):
            items.append("…")
        return "(" + ", ".join(items) + ")"
    return type(value).__name__


def is_array(value: Any) -> bool:
    """Whether it is an array, a tensor, or a number of numpy's."""
    return hasattr(value, "detach") or (hasattr(value, "shape") and hasattr(value, "dtype"))


def dtype_name(array: Any) -> str:
    """The name of an array's element type, as numpy has it."""
    return str(array.dtype).removeprefix("torch.")
