"""Writes the weights that ship, with golden inputs and outputs, and compares them with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task
from layerline.training.data import batches, golden_outputs
from layerline.training.model import canonical_names
from layerline.training.model.fake_quantization import stop_observers
from layerline.training.state import safetensors_io

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of forward()."""


class WeightEffect(NamedTuple):
    """One tensor under two sets of weights: a parameter, or a module's output on the example."""

    name: str
    op: str
    module: str
    before: Tensor
    after: Tensor


def module_of(task: Task, hook: str = "model") -> nn.Module:
    """The module that a hook returns. Raises TaskError if it returns something else."""
    module = task.call(hook)
    if not isinstance(module, nn.Module):
        raise TaskError(f"{hook}() gave {type(module).__name__}, expected a torch.nn.Module", where=hook,
                        hint="return the network itself")  # fmt: skip
    return module


def network(task: Task, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """model() in float32 and eval mode. Half precision is chosen by the quantize stage, which reports its cost."""
    model = module_of(task).float().eval()
    if weights is not None:
        canonical_names.load(model, weights)
        stop_observers(model)
    return model


def opened(task: Task, weights: Mapping[str, Tensor]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """model() with these weights, and the positional and keyword arguments of an example."""
    model = network(task, weights)
    return (model, *batches.example_inputs(task, forward=model.forward))


def shipped(task: Task, folder: Path) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """As `opened`, with the weights that `ship` left in a folder."""
    weights, _ = safetensors_io.load(folder / "model.safetensors")
    return opened(task, weights)


def ship(model: nn.Module, example: Example, weights: Mapping[str, Tensor], out: Path) -> None:
    """Loads the weights and writes `model.safetensors` (tied tensors once, with aliases) and `golden.safetensors`."""
    canonical_names.load(model, weights)
    stop_observers(model)
    # A tied tensor is stored once, under the first of its names.
    names = canonical_names.named(model)
    safetensors_io.save(out / "model.safetensors", names.tensors, {"aliases": names.aliases})
    safetensors_io.save(out / "golden.safetensors", golden_outputs.record(model, *example))


def compared(
    model: nn.Module, example: Example, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[WeightEffect]:
    """Every parameter, then every module's output on the example, under both sets of weights; `after` stay loaded."""
    old_params, old_outputs = _state(model, example, before)
    new_params, new_outputs = _state(model, example, after)
    effects = []
    for name, param in new_params.items():
        effects.append(WeightEffect(name, "parameter", name.rpartition(".")[0], old_params[name], param))
    for path, (op, output) in new_outputs.items():
        # A module whose call depends on the weights may have run under one set alone.
        if path in old_outputs:
            effects.append(WeightEffect(path, op, path.partition(":")[0], old_outputs[path][1], output))
    return effects


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether `b` has every tensor of `a`, with equal values."""
    return all(b[n] is t or torch.equal(b[n], t) for n, t in a.items())


def _state(
    model: nn.Module, example: Example, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, Tensor]]]:
    canonical_names.load(model, weights)
    params = {n: p.detach().clone() for n, p in canonical_names.named(model).params.items()}
    return params, golden_outputs.activations(model, *example)


def train_mode(model: nn.Module) -> list[str]:
    """Puts a model into training mode, except for parts that the task left in eval mode on purpose: where the model
    itself is in training mode, or none of the part's parameters is trained. Their running statistics and dropout stay
    as they were."""
    whole_in_eval = not model.training
    kept: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        trainable = [param.requires_grad for param in module.parameters()]
        frozen = bool(trainable) and not any(trainable)
        inside = any(name.startswith(f"{outer}.") for outer in kept)
        if name and not module.training and (frozen or not whole_in_eval) and not inside:  # the outermost parts alone
            kept[name] = module
    modes = [(part, part.training) for root in kept.values() for part in root.modules()]
    model.train()
    for part, training in modes:
        part.training = training
    if not whole_in_eval:
        return []
    text = "model() returned a model in eval mode: training puts it into training mode"
    if kept:
        text += f", except for what is frozen: {', '.join([*kept][:5])}"
    if len(kept) > 5:
        text += f" and {len(kept) - 5} more"
    return [text]
