"""Runs a model again without side effects: the same random numbers, and no second update of running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from layerline.training.randomness.rng_state import Draws, draws, redraw


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
    """Inside this context modules work on copies of their buffers; afterwards the random state is restored.

    The buffers themselves are not written to, since a backward pass may have saved them. The context is reusable.
    """

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
