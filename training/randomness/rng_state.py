"""The random state of this process: python, numpy, torch and every CUDA device."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Draws(NamedTuple):
    """A random state. A checkpoint holds it as a plain tuple."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]


def draws() -> Draws:
    """The present random state. Takes about ten microseconds."""
    # A process that has not used CUDA has no state there, and reading one would initialise CUDA.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    # The user's code may draw from numpy's global generator, so its state is part of it.
    return Draws(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)  # noqa: NPY002


def redraw(state: Draws) -> None:
    """Restores a random state, except for CUDA devices that this machine lacks."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002
    torch.set_rng_state(state.cpu)
    if state.cuda and torch.cuda.is_available():
        for device, saved in enumerate(state.cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers. Similar inputs give unrelated seeds (the finaliser of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers on the CPU come from `seed`. Restores the state afterwards. CUDA's is not changed."""
    before = Draws(random.getstate(), np.random.get_state(), torch.get_rng_state(), [])  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        redraw(before)


class Past(NamedTuple):
    """The state that a pass of some modules began with: copies of buffers, training modes and the random state."""

    buffers: list[tuple[nn.Module, str, Tensor]]
    modes: list[tuple[nn.Module, bool]]
    draws: Draws


def past(modules: Iterable[nn.Module]) -> Past:
    """The present state of modules, taken before a pass that will be run again."""
    modules = list(modules)
    copies = [(m, n, b.detach().clone()) for m, n, b in _buffers(modules)]
    return Past(copies, [(m, m.training) for m in modules], draws())


class Apart:
    """Inside this context modules work on copies of their buffers; afterwards the random state is restored. The buffers
    themselves are not written to, since a backward pass may have saved them. The context is reusable."""

    def __init__(self, modules: Iterable[nn.Module], start: Past | None = None) -> None:
        self._modules, self._start = list(modules), start

    def __enter__(self) -> None:
        buffers = list(_buffers(self._modules))
        self._before = Past(buffers, [(m, m.training) for m in self._modules], draws())
        if self._start is not None:
            buffers = self._start.buffers
            _set_modes(self._start.modes)
            redraw(self._start.draws)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.detach().clone()

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._before.buffers:
            module._buffers[name] = buffer
        _set_modes(self._before.modes)
        redraw(self._before.draws)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the training or evaluation mode of every module after the block."""
    before = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
