"""Hooks on a model that leave it free to be copied and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Attached:
    """A hook that belongs to this very module.

    `copy.deepcopy` and `torch.save` of a model take its hooks along. What stands behind these (optimizer, process
    group, log) must not be doubled, and often cannot be pickled: in a copy they do nothing.

    Args:
        call: given the hook's arguments after the module.
    """

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    def __call__(self, _: Any, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: Any) -> Attached:
        return Attached(None)

    def __reduce__(self) -> tuple[type[Attached], tuple[None]]:
        return Attached, (None,)
