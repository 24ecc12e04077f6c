"""BatchNorm under accumulation, the layer for which micro-batches are not the big batch: found, measured, converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.model.canonical_names import modules, unwrap
from layerline.training.randomness.rng_state import Apart, modes_kept

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Layers that normalise by the statistics of the batch they see, by canonical path. One in eval mode uses its
    running statistics and is not among them, unless it has none."""
    layers: dict[str, nn.modules.batchnorm._BatchNorm] = {}
    for path, module in modules(model):
        if not isinstance(module, _BATCH_NORM) or module in layers.values():  # a shared layer counts once
            continue
        if module.training or module.running_mean is None:
            layers[path] = module
    return layers


def warning(model: nn.Module, steps: int) -> str:
    """The sentence about BatchNorm for `steps` micro-batches a step; empty where there is nothing to say."""
    names = list(batch_norms(model))
    if steps < 2 or not names:
        return ""
    layers = names[0]
    if len(names) > 1:
        layers += f" and {len(names) - 1} more"
    return (
        f"{layers}: BatchNorm sees each micro-batch alone, so {steps} of them are not one big batch there; "
        "measure it with layerline.training.loop.batch_norm.deviation, or convert with to_group_norm"
    )


@dataclass(frozen=True)
class Deviation:
    """What micro-batches do to one BatchNorm layer."""

    name: str  # canonical path
    samples: int  # values behind one channel's statistics in a micro-batch (samples · positions)
    mean: float  # RMS over channels and micro-batches of (mean - full mean) / full standard deviation
    variance: float  # mean over channels and micro-batches of variance / full variance
    # ‖by micro-batch statistics - by full-batch statistics‖ / ‖by full-batch statistics‖ of the layer's output on the
    # same input
    output: float


@dataclass(frozen=True)
class Deviations:
    """Of a model and a split: each BatchNorm layer's own, and the relative L2 error of the model's output."""

    layers: tuple[Deviation, ...]
    output: float


def deviation(model: nn.Module, inputs: Sequence[Tensor], micro_batches: int,
              run: Callable[..., Any] | None = None) -> Deviations:  # fmt: skip
    """Runs a batch whole and in `micro_batches` parts of two samples at least, along axis 0 of each input, and
    compares: BatchNorm as in training, everything else (dropout) as in evaluation, so that nothing but the statistics
    makes a difference. Leaves no trace. `run` is called with the model and the arguments instead of the model alone."""
    from layerline.training.data.loss import first_output

    model = unwrap(model)
    layers = batch_norms(model)
    size = -(-len(inputs[0]) // micro_batches)
    if not layers:
        raise ConfigError("the model has no BatchNorm in training mode", where="model")
    if size < 2:
        hint = "a part needs two samples for its variance"
        raise ConfigError(f"{micro_batches} parts of {len(inputs[0])} samples", where="micro_batches", hint=hint)
    call = run or (lambda m, *args: first_output(m(*args)))
    inputs_of: dict[str, Tensor] = {}  # the first input of each layer

    def keep(path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs_of.setdefault(path, args[0])

    with modes_kept(model), torch.no_grad():
        model.eval()
        for layer in layers.values():
            layer.train()
        with Apart(model.modules()), ExitStack() as hooks:
            for path, layer in layers.items():
                hooks.enter_context(layer.register_forward_pre_hook(partial(keep, path)))
            whole: Tensor = call(model, *inputs)
        with Apart(model.modules()):
            parts = zip(*[torch.split(i, size) for i in inputs], strict=True)
            pieces = torch.cat([call(model, *part) for part in parts])
    share = size / len(inputs[0])
    rows = tuple(_compare(path, layers[path], x, share) for path, x in inputs_of.items())
    return Deviations(rows, _relative(pieces, whole))


def to_group_norm(model: nn.Module, groups: int = 32) -> list[str]:
    """Replaces every BatchNorm by GroupNorm (Wu & He 2018), in place; returns their paths. It normalises each sample
    by itself, so any split of a batch gives the same gradient. Scale and shift stay the same parameters; running
    statistics have no counterpart, so train on afterwards. The number of groups is the greatest divisor of the
    channels up to `groups`."""

    def group_norm(norm: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
        channels = norm.num_features
        count = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        new = nn.GroupNorm(count, channels, norm.eps, norm.affine)
        if norm.affine:
            new.weight, new.bias = norm.weight, norm.bias
        return new.train(norm.training)

    return _replaced(model, group_norm)


def to_sync_batch_norm(model: nn.Module) -> list[str]:
    """Replaces every BatchNorm by SyncBatchNorm, in place; returns their paths. Statistics are then those of all ranks'
    samples: what W ranks of b samples give is what one rank gives for W · b. It does nothing about micro-batches that
    come one after the other. On GPUs only; with the process group there."""
    return _replaced(model, nn.SyncBatchNorm.convert_sync_batchnorm)


def _replaced(model: nn.Module, make: Callable[[nn.modules.batchnorm._BatchNorm], nn.Module]) -> list[str]:
    model = unwrap(model)
    done: dict[int, nn.Module] = {}
    names = []
    for path, parent in list(modules(model)):
        for name, child in list(parent._modules.items()):  # a shared layer under each of its names
            if isinstance(child, _BATCH_NORM) and not isinstance(child, nn.SyncBatchNorm):
                done.setdefault(id(child), make(child))
                setattr(parent, name, done[id(child)])
                names.append(f"{path}.{name}".lstrip("."))
    return names


def _compare(name: str, norm: nn.modules.batchnorm._BatchNorm, x: Tensor, share: float) -> Deviation:
    """One layer on its input for the whole batch, of which a micro-batch is this share."""
    x = x.double()
    x = x.flatten(2) if x.ndim > 2 else x[:, :, None]
    size = max(round(len(x) * share), 1)
    scale, shift = torch.ones_like(x[0, :, :1]), torch.zeros_like(x[0, :, :1])
    if norm.affine:
        scale, shift = norm.weight.detach().double()[:, None], norm.bias.detach().double()[:, None]

    def normalised(part: Tensor) -> Tensor:
        var, mean = torch.var_mean(part, (0, 2), correction=0, keepdim=True)
        out: Tensor = (part - mean) / (var + norm.eps).sqrt() * scale + shift
        return out

    micro_batches = torch.split(x, size)
    variance, mean = torch.var_mean(x, (0, 2), correction=0)
    of_parts = [torch.var_mean(part, (0, 2), correction=0) for part in micro_batches]
    alive = variance > 0
    mean_error, variance_ratio = 0.0, 1.0
    if alive.any():
        variances, means = (torch.stack(values)[:, alive] for values in zip(*of_parts, strict=True))
        mean_error = float(((means - mean[alive]).square() / variance[alive]).mean().sqrt())
        variance_ratio = float((variances / variance[alive]).mean())
    output = _relative(torch.cat([normalised(part) for part in micro_batches]), normalised(x))
    return Deviation(name, size * x.shape[2], mean_error, variance_ratio, output)


def _relative(a: Tensor, b: Tensor) -> float:
    size = float(b.norm())
    if not size:
        return math.inf if a.any() else 0.0
    return float((a - b).norm()) / size
