"""Running a model once more without a trace: the same random draws, and no second update of running statistics."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Draws(NamedTuple):
    """The random state of this process as it is in memory; `layerline.training.rng` has the form that can be saved."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]


def draws() -> Draws:
    """The present random state (some ten microseconds)."""
    # A process that has not used CUDA yet has drawn nothing there, and must not be made to start it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    # The user's layers may draw from numpy's global generator: it is their state that is kept, nothing is drawn here.
    return Draws(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)  # noqa: NPY002


def redraw(state: Draws) -> None:
    """Puts a random state back."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)


class Apart:
    """Inside, modules work on copies of their buffers; random draws begin at `start` and leave no trace.

    The buffers themselves are not written to, so that a backward pass which saved them is not disturbed. Can be entered
    again and again.

    Args:
        modules: those whose buffers are put aside.
        start: the random state to begin with; None goes on from the present one.
    """

    def __init__(self, modules: Iterable[nn.Module], start: Draws | None = None) -> None:
        self._modules, self._start = list(modules), start
        self._aside: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def __enter__(self) -> None:
        self._before = draws()
        self._aside = [(m._buffers, n, b) for m in self._modules for n, b in m._buffers.items() if b is not None]
        for buffers, name, buffer in self._aside:
            buffers[name] = buffer.clone()
        if self._start is not None:
            redraw(self._start)

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer in self._aside:
            buffers[name] = buffer
        redraw(self._before)
