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


@dataclass
class LayerMemory:
    """Bytes that belong to one module itself, its children left out."""

    module: str  # canonical path; "" is the model
    parameters: int = 0  # of its own parameters and buffers, each tied tensor at the first module that has it
    gradients: int = 0  # at the end of a backward pass; float32 where there are masters
    optimizer: int = 0  # states and masters, as they are now (0 before the first step)
    ema: int = 0  # averages
    # kept for the backward pass of one micro-batch; None where no inputs were given to measure them
    activations: int | None = None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.ema + (self.activations or 0)


def report(lane: LaneState, forward: Callable[[], Any] | None = None) -> list[LayerMemory]:
    """Every module that holds anything, in the model's order; a rank of several reports its own part."""
    paths = first_paths(lane.model)
    rows = {path: LayerMemory(path) for path in paths.values()}
    if forward is not None:
        held = activations(lane.model, forward)
        for path, row in rows.items():
            row.activations = held[path]
    row_of = {name: rows[paths[module]] for name, module in lane.named.owners.items()}
    for name, tensor in lane.named.tensors.items():
        row_of[name].parameters += _bytes(tensor)
    states = getattr(lane.optimizer, "state", None)
    for name, param, stepped in zip(lane.names, lane.params, lane.stepped, strict=True):
        row = row_of[name]
        row.gradients += _bytes(stepped)
        if stepped is not param:
            row.optimizer += _bytes(stepped)
        if isinstance(states, Mapping):
            row.optimizer += sum(_bytes(v) for v in states.get(stepped, {}).values() if isinstance(v, Tensor))
    if lane.ema is not None:
        for name, average in zip(lane.ema.names, lane.ema.shadow, strict=True):
            row_of[name].ema += _bytes(average)
    return [row for row in rows.values() if row.total]


def report_all(lanes: Mapping[str, LaneState]) -> list[LayerMemory]:
    """The modules of several models, without activations; a path begins with its model's name."""
    rows = []
    for name, lane in lanes.items():
        rows += [replace(row, module=f"{name}.{row.module}".strip(".")) for row in report(lane)]
    return rows


def activations(model: nn.Module, forward: Callable[[], Any]) -> Counter[str]:
    """Bytes that autograd keeps for the backward pass, by the module whose forward saved them first. Parameters,
    buffers and the model's inputs are there anyway and not counted; memory shared by several saved tensors counts once.
    A checkpointed segment holds its inputs alone."""
    model = unwrap(model)
    stack = [""]  # paths of the modules whose forward passes are running
    counted: set[int] = set()
    sizes = Counter[str]()

    def keep(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            sizes[stack[-1]] += storage.nbytes()
        return tensor

    def inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor):
                counted.add(local(tensor).untyped_storage().data_ptr())

    def leave(*_: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(inputs, with_kwargs=True))
        for module, path in first_paths(model).items():
            hooks.enter_context(module.register_forward_pre_hook(lambda _m, _a, path=path: stack.append(path)))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        with Apart(model.modules()), torch.enable_grad(), saved_tensors_hooks(keep, lambda t: t):
            graph = forward()  # kept until the end: a freed address could come again
    del graph
    return sizes


def _bytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()
