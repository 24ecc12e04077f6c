"""Switches of fake quantisation: torch keeps them as buffers of its modules, torchao as an attribute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Base classes of torch's and torchao's modules that follow the range of their input, by name: importing them is slow.
_OBSERVERS = frozenset({"ObserverBase", "FakeQuantizeBase", "AffineQuantizedObserverBase"})


def is_observer(module: nn.Module) -> bool:
    """Whether the module follows the range of its input."""
    return not _OBSERVERS.isdisjoint(_class_names(module))


def is_fake_quantized(model: nn.Module) -> bool:
    """Whether the model has fake quantisation, switched on or off."""
    return bool(_switches(model, "fake_quant_enabled") or _torchao(model))


def stop_observers(model: nn.Module) -> None:
    """Switches observers off: one that is on changes its range at each call, in eval mode too."""
    for switch in _switches(model, "observer_enabled"):
        switch.zero_()


@contextmanager
def ranges_kept(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes leave all ranges as they are."""
    kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in model.modules():
        if is_observer(module) or "observer_enabled" in module._buffers:
            kept += [(module, name, b, b.clone()) for name, b in module._buffers.items() if b is not None]
    # Observers with a switch are off, as in the weights that ship. Those without one get their buffers back.
    stop_observers(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                # A range of each channel may have taken the place of one for all, or another tensor that of the buffer.
                buffer.resize_(value.shape).copy_(value)
                module._buffers[name] = buffer


@contextmanager
def without_fake_quantization(model: nn.Module) -> Iterator[None]:
    """Inside, fake quantisation passes its input on."""
    switches = _switches(model, "fake_quant_enabled")
    before = list(map(torch.clone, switches))
    attributes = [(module, module.enabled) for module in _torchao(model)]
    for switch in switches:
        switch.zero_()
    # torchao has no buffer for it.
    for module, _ in attributes:
        module.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.copy_(value)
        for module, enabled in attributes:
            module.enabled = enabled


def _switches(model: nn.Module, name: str) -> list[Tensor]:
    return [switch for path, switch in model.named_buffers() if path.rpartition(".")[2] == name]


def _torchao(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "FakeQuantizerBase" in _class_names(module)]


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}
