"""Weights on their way out: canonical names, float32, golden answers, and what other weights would have given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task
from layerline.training.data import golden_outputs
from layerline.training.model import canonical_names
from layerline.training.state import safetensors_io

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of forward()."""


@dataclass(frozen=True)
class Pair:
    """One tensor under two sets of weights: a parameter, or what a module gave on the example."""

    name: str
    op: str
    module: str
    before: Tensor
    after: Tensor


def network(task: Task) -> nn.Module:
    """model() in float32 and eval mode: half precision is the quantize stage's decision, with a report of its cost.

    Raises:
        TaskError: it gives something else than a module.
    """
    model = task.call("model")
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() gave {type(model).__name__}, expected a torch.nn.Module", where="model")
    return model.float().eval()


def ship(model: nn.Module, example: Example, weights: Mapping[str, Tensor], out: Path) -> None:
    """Loads the weights and writes `model.safetensors` (tied tensors once, aliases recorded) and `golden.safetensors`.

    Raises:
        StageError: they do not fit the model.
        TaskError: the model can't run on its example.
    """
    canonical_names.load(model, weights)
    _stop_observers(model)
    known = canonical_names.named(model)
    safetensors_io.save(out / "model.safetensors", known.tensors, {"aliases": known.aliases})
    safetensors_io.save(out / "golden.safetensors", golden_outputs.record(model, *example))


def _stop_observers(model: nn.Module) -> None:
    """Fake quantisation keeps the scales it has: an observer that is on changes them at each call, in eval mode too."""
    for module in model.modules():
        switch = getattr(module, "observer_enabled", None)
        if isinstance(switch, Tensor):
            switch.zero_()


def compared(
    model: nn.Module, example: Example, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[Pair]:
    """Every parameter, then every module's output on the example, under both sets of weights; `after` stay loaded."""
    (old, was), (new, now) = (_state(model, example, weights) for weights in (before, after))
    weights = [Pair(n, "parameter", n.rpartition(".")[0], old[n], t) for n, t in new.items()]
    return weights + [Pair(p, op, p.partition(":")[0], was[p][1], t) for p, (op, t) in now.items() if p in was]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether every tensor of `a` is in `b`, equal."""
    return all(b[n] is t or torch.equal(b[n], t) for n, t in a.items())


def _state(
    model: nn.Module, example: Example, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, Tensor]]]:
    canonical_names.load(model, weights)
    params = {n: p.detach().clone() for n, p in canonical_names.named(model).params.items()}
    return params, golden_outputs.activations(model, *example)
