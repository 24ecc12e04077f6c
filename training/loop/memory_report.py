"""Which module holds how many bytes of what: weights, gradients, optimizer state, averages, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import modules, unwrap
from layerline.training.model.split_tensors import local
from layerline.training.randomness.rng_snapshot import Apart


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


def report(lane: LaneState, forward: Callable[[], Any] | None = None) -> list[LayerMemory]:
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


def _unique(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for path, module in modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _by_parameter(lane: LaneState) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]]:
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
