"""Memory: activations recomputed instead of kept, and which module holds how many bytes of what.

Checkpointing replaces the `forward` of a body's instance, so the model keeps its classes, its names and its state dict,
and `remove()` leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from layerline.pipeline.errors import ConfigError
from layerline.training.names import modules, unwrap
from layerline.training.parts import local
from layerline.training.replay import Apart, draws

if TYPE_CHECKING:
    from layerline.training.lane import Lane

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Checkpointed:
    """A model some of whose layers keep their inputs only and are run again in the backward pass.

    Bodies are the outermost nn.Sequential and nn.ModuleList of two layers or more. A Sequential is cut into segments of
    `every` layers (and one that would begin by writing over its input joins the one before); in a ModuleList the user's
    own code runs between the layers, so each of them is a segment. A Sequential of at most `every` layers that holds
    bodies itself is left to them.

    Gradients are those of the plain model, bit for bit: the second run has the same random numbers (torch, numpy,
    python), the same autocast and its own copy of the buffers, so that BatchNorm counts a batch once. Forward hooks on
    recomputed layers run twice.

    Args:
        model: as the user has it, wrapped or not.
        every: layers recomputed together.

    Attributes:
        segments: the layers of each segment, by canonical path.

    Raises:
        ConfigError: there is nothing to cut.
    """

    def __init__(self, model: nn.Module, every: int = 4) -> None:
        self.segments: list[tuple[str, ...]] = []
        self._undo: list[tuple[nn.Module, Any]] = []
        for path, body in _bodies(model, every):
            names = {layer: f"{path}.{n}".lstrip(".") for n, layer in body.named_children()}
            if isinstance(body, nn.Sequential):
                cut = _Cut(body, every)
                self._replace(body, cut)
                self.segments += [tuple(names[layer] for layer in segment) for segment in cut.segments]
            else:
                for layer, name in names.items():
                    self._replace(layer, _Alone(layer))
                    self.segments.append((name,))
        if not self.segments:
            raise ConfigError(
                "the model has no nn.Sequential or nn.ModuleList of two layers or more",
                where="memory.checkpointing",
                hint="there is nothing to cut: leave it off",
            )

    def remove(self) -> None:
        """Takes checkpointing off again."""
        while self._undo:
            module, before = self._undo.pop()
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward


class _Cut:
    """The forward of a Sequential in segments. An object, not a closure: a deep copy of the model takes it along."""

    def __init__(self, body: nn.Sequential, every: int) -> None:
        self.segments: list[list[nn.Module]] = []
        for layer in body:
            if not self.segments or (len(self.segments[-1]) >= every and not _overwrites(layer)):
                self.segments.append([])
            self.segments[-1].append(layer)

    def __call__(self, *args: Any) -> Any:
        for segment in self.segments:
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
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    # The random state is restored by the context: torch's own way leaves python and numpy out.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False,
                      context_fn=partial(_contexts, layers), **kwargs)  # fmt: skip


def _chain(layers: Sequence[nn.Module], *args: Any) -> Any:
    for layer in layers:
        args = (layer(*args),)
    return args[0]


def _contexts(layers: Sequence[nn.Module]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    inner = [m for layer in layers for m in layer.modules()]
    return nullcontext(), Apart(inner, draws())


def _bodies(module: nn.Module, every: int, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    module = unwrap(module)
    inner = [b for n, child in module.named_children() for b in _bodies(child, every, f"{path}.{n}".lstrip("."))]
    if _is_body(module, every, holds_bodies=bool(inner)):
        yield path, module
    else:
        yield from inner


def _is_body(module: nn.Module, every: int, *, holds_bodies: bool) -> bool:
    layers = list(module.children())
    if len(layers) < 2:
        return False
    if isinstance(module, nn.ModuleList):
        return not any(isinstance(layer, _CONTAINERS) for layer in layers)
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and (len(layers) > every or not holds_bodies)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that belong to one module itself, its children left out.

    Attributes:
        module: canonical path; "" is the model.
        parameters: of its own parameters and buffers, each tied tensor at the first module that has it.
        gradients: at the end of a backward pass; float32 where there are masters.
        optimizer: states and masters, as they are now (0 before the first step).
        ema: averages.
        activations: kept for the backward pass of one micro-batch; None where no inputs were given to measure them.
    """

    module: str
    parameters: int
    gradients: int
    optimizer: int
    ema: int
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.ema + (self.activations or 0)


def report(lane: Lane, forward: Callable[[], Any] | None = None) -> list[LayerMemory]:
    """Every module that holds anything, in the model's order; a rank of several reports its own part.

    Args:
        lane: the model and its optimizer.
        forward: one forward pass of the model, under whose autocast activations are measured. It leaves no trace.
    """
    held = activations(lane.model, forward) if forward is not None else None
    grads, states, averages = _by_parameter(lane)
    rows = []
    for path, module in _unique(lane.model):
        own = {n: t for n, t in lane.named.tensors.items() if lane.named.owners[n] is module}
        row = LayerMemory(
            path, sum(_bytes(t) for t in own.values()), sum(grads.get(n, 0) for n in own),
            sum(states.get(n, 0) for n in own), sum(averages.get(n, 0) for n in own),
            None if held is None else held.get(path, 0),
        )  # fmt: skip
        if row.total:
            rows.append(row)
    return rows


def activations(model: nn.Module, forward: Callable[[], Any]) -> dict[str, int]:
    """Bytes that autograd keeps for the backward pass, by the module whose forward saved them first.

    Parameters, buffers and the model's inputs are there anyway and not counted; memory shared by several saved tensors
    counts once. A checkpointed segment holds its inputs alone.
    """
    model = unwrap(model)
    stack = [""]
    known: set[int] = set()
    held: dict[int, tuple[str, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in known:
            held.setdefault(address, (stack[-1], local(tensor).untyped_storage().nbytes()))
        return tensor

    def inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
        there = (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs)))
        known.update(_address(t) for t in there if isinstance(t, Tensor))

    def leave(*_: Any) -> None:
        stack.pop()

    handles = [model.register_forward_pre_hook(inputs, with_kwargs=True)]
    for path, module in _unique(model):
        handles.append(module.register_forward_pre_hook(lambda _m, _a, path=path: stack.append(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Apart(model.modules()), torch.enable_grad(), saved_tensors_hooks(keep, lambda t: t):
            alive = forward()  # kept until the sums are taken: a freed address could come again
    finally:
        for handle in handles:
            handle.remove()
    out: dict[str, int] = {}
    for path, size in held.values():
        out[path] = out.get(path, 0) + size
    del alive
    return out


def empty_cache(device: torch.device) -> None:
    """Gives the allocator's unused blocks back to a GPU; other processes can have them then.

    It does not lower this process's own peak. Its cost: it waits for everything the device has still to do, and the
    next step asks the driver for the same blocks again, which waits once more. Every step it follows is slower for it,
    so it is off unless asked for (`gpu.enable_memory_compact`). The CPU has no such cache: nothing is done there.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _unique(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for path, module in modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _by_parameter(lane: Lane) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]]:
    states = getattr(lane.optimizer, "state", {})
    grads, optimizer = {}, {}
    for name, param, stepped in zip(lane.names, lane.params, lane.stepped, strict=True):
        grads[name] = _bytes(stepped)
        own = states.get(stepped, {}) if isinstance(states, Mapping) else {}
        optimizer[name] = sum(_bytes(t) for t in own.values() if isinstance(t, Tensor))
        optimizer[name] += _bytes(stepped) if stepped is not param else 0
    ema = dict(zip(lane.ema.names, map(_bytes, lane.ema.shadow), strict=True)) if lane.ema else {}
    return grads, optimizer, ema


def _bytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
