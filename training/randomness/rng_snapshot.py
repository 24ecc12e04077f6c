"""Running a model again without side effects: the same random draws, and no second update of running statistics."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Draws(NamedTuple):
    """The random state of this process as it is in memory; `rng_state` has the form that can be saved."""

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


class Past(NamedTuple):
    """What a pass of some modules began with: their buffers, copied, training or not, and the random state."""

    buffers: list[tuple[nn.Module, str, Tensor]]
    modes: list[tuple[nn.Module, bool]]
    draws: Draws


def past(modules: Iterable[nn.Module]) -> Past:
    """The state of modules before a pass that will be run again."""
    modules = list(modules)
    copies = [(m, n, b.detach().clone()) for m, n, b in _buffers(modules)]
    return Past(copies, [(m, m.training) for m in modules], draws())


class Apart:
    """Inside, modules work on copies of their buffers, and random draws leave no trace.

    The buffers themselves are not written to, so that a backward pass which saved them is not disturbed. Can be entered
    again and again.

    Args:
        modules: those whose buffers are put aside.
        start: the state to begin with; None goes on from the present one.
    """

    def __init__(self, modules: Iterable[nn.Module], start: Past | None = None) -> None:
        self._modules, self._start = list(modules), start

    def __enter__(self) -> None:
        now = list(_buffers(self._modules))
        self._before = Past(now, [(m, m.training) for m in self._modules], draws())
        for module, name, buffer in self._start.buffers if self._start else now:
            module._buffers[name] = buffer.detach().clone()
        if self._start is not None:
            _set_modes(self._start.modes)
            redraw(self._start.draws)

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._before.buffers:
            module._buffers[name] = buffer
        _set_modes(self._before.modes)
        redraw(self._before.draws)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """After the block every module is in training or evaluation mode as it was before."""
    before = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    return ((m, n, b) for m in modules for n, b in m._buffers.items() if b is not None)
