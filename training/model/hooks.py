"""Hooks that don't keep a model from being copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Attached:
    """A hook that does nothing in copies of its module. `copy.deepcopy` and `torch.save` of a model copy its hooks. The
    objects behind a hook (optimizer, process group, log) must not be copied, and often can't be pickled."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    def __call__(self, _: Any, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: Any) -> Attached:
        return Attached(None)

    def __reduce__(self) -> tuple[type[Attached], tuple[None]]:
        return Attached, (None,)
