"""Activation checkpointing: activations are recomputed in the backward pass instead of stored. The `forward` attribute
of the instance is replaced, so that the model keeps its classes, names and state dict, and `remove()` restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from layerline.pipeline.errors import ConfigError
from layerline.training.model.canonical_names import unwrap
from layerline.training.randomness.rng_state import Apart, past

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Checkpointed:
    """A model some of whose layers store only their inputs and run again in the backward pass.

    These are the layers of the outermost nn.Sequential and nn.ModuleList of two layers or more. A Sequential is divided
    into segments of `every` layers. In a ModuleList the user's code runs between the layers, so each is a segment.
    Gradients equal those of the plain model bit for bit. Plain attributes of a layer are not restored, and forward
    hooks run twice.
    """

    def __init__(self, model: nn.Module, every: int = 4) -> None:
        self._bodies = list(_bodies(model, every))
        self._undo: list[tuple[nn.Module, Any]] = []
        for _, body in self._bodies:
            if isinstance(body, nn.Sequential):
                self._replace(body, _Segmented(body, every))
            else:
                for layer in body.children():
                    self._replace(layer, _Alone(layer))
        if not self._undo:
            what = "the model has no nn.Sequential or nn.ModuleList of two layers or more"
            raise ConfigError(what, where="memory.checkpointing", hint="leave it off: there are no layers to recompute")

    def remove(self) -> None:
        """Restores the model's own forward methods."""
        while self._undo:
            module, before = self._undo.pop()
            del module.__dict__["forward"]
            # The user may have set a forward of their own on the instance.
            if before is not None:
                module.__dict__["forward"] = before

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward


class _Segmented:
    """The forward of a Sequential in segments. An object, not a closure, so that a deep copy of the model copies it."""

    def __init__(self, body: nn.Sequential, every: int) -> None:
        self._body, self._every = body, every

    def segments(self) -> list[list[nn.Module]]:
        """The layers of each segment, as the body has them now."""
        out: list[list[nn.Module]] = []
        for layer in self._body:
            # A layer that writes over its input joins the segment before it: the input is kept for the second run.
            if not out or (len(out[-1]) >= self._every and not _overwrites(layer)):
                out.append([])
            out[-1].append(layer)
        return out

    def __call__(self, *args: Any) -> Any:
        for segment in self.segments():
            args = (_recomputed(partial(_chain, segment), segment, args, {}),)
        return args[0]


class _Alone:
    """The forward of one layer of a ModuleList."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.inner = layer, layer.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.inner or partial(type(self.layer).forward, self.layer)
        return _recomputed(run, [self.layer], args, kwargs)


def _overwrites(layer: nn.Module) -> bool:
    """Whether the layer begins with an activation that works in place."""
    if isinstance(layer, nn.Sequential) and len(layer):
        return _overwrites(layer[0])
    return bool(getattr(layer, "inplace", False))


def _recomputed(run: Callable[..., Any], layers: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Any) -> Any:
    # Nothing is kept without gradients.
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    # The second run has the random numbers, autocast and buffers of the first one. The context restores the random
    # state: torch's preserve_rng_state leaves python's and numpy's out.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False,
                      context_fn=partial(_contexts, layers), **kwargs)  # fmt: skip


# A function of the module and not a closure, which torch.compile does not take here.
def _contexts(layers: Sequence[nn.Module]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    inner = [m for layer in layers for m in layer.modules()]
    return nullcontext(), Apart(inner, past(inner))


def _chain(layers: Sequence[nn.Module], *args: Any) -> Any:
    for layer in layers:
        args = (layer(*args),)
    return args[0]


def _bodies(module: nn.Module, every: int, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    module = unwrap(module)
    inner: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        inner += _bodies(child, every, f"{path}.{name}".lstrip("."))
    if _is_body(module, every, holds_bodies=bool(inner)):
        yield path, module
    else:
        yield from inner


def _is_body(module: nn.Module, every: int, *, holds_bodies: bool) -> bool:
    layers = list(module._modules.values())
    if len(layers) < 2:
        return False
    if isinstance(module, nn.ModuleList):
        return not any(isinstance(layer, _CONTAINERS) for layer in layers)
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    # A short Sequential that contains bodies is left whole: the bodies in it are divided.
    return plain and (len(layers) > every or not holds_bodies)
