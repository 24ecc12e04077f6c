"""Which module holds how many bytes of what: weights, gradients, optimizer state, averages, activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import first_paths, unwrap
from layerline.training.model.split_tensors import local
from layerline.training.randomness.rng_state import Apart


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that belong to one module itself, its children left out."""

    module: str  # canonical path; "" is the model
    parameters: int  # of its own parameters and buffers, each tied tensor at the first module that has it
    gradients: int  # at the end of a backward pass; float32 where there are masters
    optimizer: int  # states and masters, as they are now (0 before the first step)
    ema: int  # averages
    # kept for the backward pass of one micro-batch; None where no inputs were given to measure them
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.ema + (self.activations or 0)


def report(lane: LaneState, forward: Callable[[], Any] | None = None) -> list[LayerMemory]:
    """Every module that holds anything, in the model's order; a rank of several reports its own part."""
    held: Mapping[str, int] | None = None
    if forward is not None:
        held = activations(lane.model, forward)
    paths = first_paths(lane.model)
    totals = {path: Counter[str]() for path in paths.values()}
    path_of = {name: paths[module] for name, module in lane.named.owners.items()}
    for name, tensor in lane.named.tensors.items():
        totals[path_of[name]]["parameters"] += _bytes(tensor)
    states = getattr(lane.optimizer, "state", None)
    for name, param, stepped in zip(lane.names, lane.params, lane.stepped, strict=True):
        total = totals[path_of[name]]
        total["gradients"] += _bytes(stepped)
        state = states.get(stepped, {}) if isinstance(states, Mapping) else {}
        total["optimizer"] += sum(_bytes(value) for value in state.values() if isinstance(value, Tensor))
        if stepped is not param:
            total["optimizer"] += _bytes(stepped)
    if lane.ema is not None:
        for name, average in zip(lane.ema.names, lane.ema.shadow, strict=True):
            totals[path_of[name]]["ema"] += _bytes(average)
    rows = []
    for path, total in totals.items():
        kept = None if held is None else held.get(path, 0)
        row = LayerMemory(path, total["parameters"], total["gradients"], total["optimizer"], total["ema"], kept)
        if row.total:
            rows.append(row)
    return rows


def report_all(lanes: Mapping[str, LaneState]) -> list[LayerMemory]:
    """The modules of several models, without activations; a path begins with its model's name."""
    rows = []
    for name, lane in lanes.items():
        rows += [replace(row, module=f"{name}.{row.module}".strip(".")) for row in report(lane)]
    return rows


def activations(model: nn.Module, forward: Callable[[], Any]) -> dict[str, int]:
    """Bytes that autograd keeps for the backward pass, by the module whose forward saved them first. Parameters,
    buffers and the model's inputs are there anyway and not counted; memory shared by several saved tensors counts once.
    A checkpointed segment holds its inputs alone."""
    model = unwrap(model)
    stack = [""]
    not_counted: set[int] = set()
    held: dict[int, tuple[str, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in not_counted:
            held.setdefault(address, (stack[-1], local(tensor).untyped_storage().nbytes()))
        return tensor

    def inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor):
                not_counted.add(_address(tensor))

    def leave(*_: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(inputs, with_kwargs=True))
        for module, path in first_paths(model).items():
            hooks.enter_context(module.register_forward_pre_hook(lambda _m, _a, path=path: stack.append(path)))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        with Apart(model.modules()), torch.enable_grad(), saved_tensors_hooks(keep, lambda t: t):
            alive = forward()  # kept until the sums are taken: a freed address could come again
    sizes = Counter[str]()
    for path, size in held.values():
        sizes[path] += size
    del alive
    return dict(sizes)


def _bytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
