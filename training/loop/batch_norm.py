"""BatchNorm under accumulation, the layer for which micro-batches are not the big batch: found, measured, converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.model.canonical_names import modules, unwrap
from layerline.training.randomness.rng_snapshot import Apart, modes_kept

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Layers that normalise by the statistics of the batch they see, by canonical path.

    One in eval mode uses its running statistics and is not among them, unless it has none.
    """
    layers: dict[str, nn.modules.batchnorm._BatchNorm] = {}
    for path, module in modules(model):
        if not isinstance(module, _BATCH_NORM) or module in layers.values():  # a shared layer counts once
            continue
        if module.training or module.running_mean is None:
            layers[path] = module
    return layers


def warning(model: nn.Module, steps: int) -> str:
    """The sentence about BatchNorm for `steps` micro-batches a step; empty where there is nothing to say."""
    found = list(batch_norms(model)) if steps > 1 else []
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"{found[0]}{more}: BatchNorm sees each micro-batch alone, so {steps} of them are not one big batch there; "
            "measure it with layerline.training.loop.batch_norm.deviation, or convert with to_group_norm")  # fmt: skip


@dataclass(frozen=True)
class Deviation:
    """What micro-batches do to one BatchNorm layer.

    Attributes:
        name: canonical path.
        samples: values behind one channel's statistics in a micro-batch (samples · positions).
        mean: RMS over channels and micro-batches of (mean - full mean) / full standard deviation.
        variance: mean over channels and micro-batches of variance / full variance.
        output: ‖by micro-batch statistics - by full-batch statistics‖ / ‖by full-batch statistics‖ of the layer's
            output on the same input.
    """

    name: str
    samples: int
    mean: float
    variance: float
    output: float


@dataclass(frozen=True)
class Deviations:
    """Of a model and a split: each BatchNorm layer's own, and the relative L2 error of the model's output."""

    layers: tuple[Deviation, ...]
    output: float


def deviation(model: nn.Module, inputs: Sequence[Tensor], micro_batches: int,
              run: Callable[..., Any] | None = None) -> Deviations:  # fmt: skip
    """Runs a batch whole and in `micro_batches` parts and compares: BatchNorm as in training, everything else (dropout)
    as in evaluation, so that nothing but the statistics makes a difference. Leaves no trace.

    Args:
        model: wrapped or not.
        inputs: positional arguments of forward; each is split along axis 0.
        micro_batches: parts, of equal size but for the last.
        run: called with the model and the arguments instead of the model alone (to pick an output, for example).

    Raises:
        ConfigError: no BatchNorm, or parts of less than two samples.
    """
    from layerline.training.data.loss import first_output

    model = unwrap(model)
    layers = batch_norms(model)
    size = -(-len(inputs[0]) // micro_batches)
    if not layers:
        raise ConfigError("the model has no BatchNorm in training mode", where="model")
    if size < 2:
        raise ConfigError(
            f"{micro_batches} parts of {len(inputs[0])} samples",
            where="micro_batches",
            hint="a part needs two samples for its variance",
        )
    call = run or (lambda m, *args: first_output(m(*args)))
    parts = list(zip(*[torch.split(i, size) for i in inputs], strict=True))
    with _training_only(model, layers), torch.no_grad():
        with Apart(model.modules()), _inputs(layers) as seen:
            whole: Tensor = call(model, *inputs)
        with Apart(model.modules()):
            pieces = torch.cat([call(model, *part) for part in parts])
    rows = tuple(_compare(n, layers[n], x, size / len(inputs[0])) for n, x in seen.items())
    return Deviations(rows, _relative(pieces, whole))


def to_group_norm(model: nn.Module, groups: int = 32) -> list[str]:
    """Replaces every BatchNorm by GroupNorm, in place; returns their paths.

    GroupNorm (Wu & He 2018) normalises each sample by itself, so any split of a batch gives the same gradient. Scale
    and shift stay the same parameters; running statistics have no counterpart, so train on afterwards. The number of
    groups is the greatest divisor of the channels up to `groups`.
    """
    return _replaced(model, lambda norm: _group_norm(norm, groups))


def to_sync_batch_norm(model: nn.Module) -> list[str]:
    """Replaces every BatchNorm by SyncBatchNorm, in place; returns their paths.

    Statistics are then those of all ranks' samples: what W ranks of b samples give is what one rank gives for W · b. It
    does nothing about micro-batches that come one after the other. On GPUs only; with the process group there.
    """
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


def _group_norm(norm: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    count = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
    new = nn.GroupNorm(count, channels, norm.eps, norm.affine)
    if norm.affine:
        new.weight, new.bias = norm.weight, norm.bias
    return new.train(norm.training)


@contextmanager
def _training_only(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    with modes_kept(model):
        model.eval()
        for layer in layers.values():
            layer.train()
        yield


@contextmanager
def _inputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each layer is given inside the block."""
    seen: dict[str, Tensor] = {}

    def keep(path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(path, args[0])

    handles = [layer.register_forward_pre_hook(partial(keep, path)) for path, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _compare(name: str, norm: nn.modules.batchnorm._BatchNorm, x: Tensor, share: float) -> Deviation:
    """One layer on the input it had for the whole batch; `share` of it is a micro-batch."""
    x = x.double().flatten(2) if x.ndim > 2 else x.double()[:, :, None]
    size = max(round(len(x) * share), 1)
    mean, variance = _statistics(x)
    stats = [_statistics(part) for part in torch.split(x, size)]
    means, variances = torch.stack([m for m, _ in stats]), torch.stack([v for _, v in stats])
    scale = norm.weight.detach().double() if norm.affine else torch.ones_like(mean)
    whole = (x - mean[:, None]) / (variance + norm.eps).sqrt()[:, None] * scale[:, None]
    parts = torch.cat([
        (part - m[:, None]) / (v + norm.eps).sqrt()[:, None] * scale[:, None]
        for part, (m, v) in zip(torch.split(x, size), stats, strict=True)
    ])  # fmt: skip
    shift = norm.bias.detach().double()[:, None] if norm.affine else 0.0
    alive = variance > 0
    return Deviation(
        name=name, samples=size * x.shape[2],
        mean=float(((means - mean)[:, alive].square() / variance[alive]).mean().sqrt()) if alive.any() else 0.0,
        variance=float((variances[:, alive] / variance[alive]).mean()) if alive.any() else 1.0,
        output=_relative(parts + shift, whole + shift),
    )  # fmt: skip


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of (N, C, positions)."""
    variance, mean = torch.var_mean(x, (0, 2), correction=0)
    return mean, variance


def _relative(a: Tensor, b: Tensor) -> float:
    size = float(b.norm())
    if size:
        return float((a - b).norm()) / size
    return math.inf if a.any() else 0.0
