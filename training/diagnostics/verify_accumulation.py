"""Checks that accumulated gradients equal those of the whole batch, on the user's model, loss and batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.data.batches import each_tensor, size
from layerline.training.loop.batch_norm import batch_norms
from layerline.training.loop.step_engine import Lane
from layerline.training.model import precision
from layerline.training.randomness.rng_state import Apart

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class AccumulationCheck:
    """The difference between the accumulated gradient and that of the whole batch."""

    deviation: float  # ‖g_split - g_whole‖ / ‖g_whole‖ over all parameters
    bound: float  # the greatest deviation that rounding explains: 16 eps sqrt(samples * micro-batches)
    worst: str  # the parameter that deviates most
    # the deviation with BatchNorm in eval mode, where the model has any. BatchNorm in training mode depends on how
    # the batch is split
    batch_norm: float | None = None

    @property
    def passed(self) -> bool:
        return self.deviation <= self.bound

    def __str__(self) -> str:
        text = f"accumulated and whole gradients differ by {self.deviation:.2e} (bound {self.bound:.2e})"
        if self.passed:
            return text
        text += f", most in {self.worst}"
        if self.batch_norm is not None and self.batch_norm <= self.bound:
            return f"{text}; batch normalisation is the cause: without it they differ by {self.batch_norm:.2e}"
        return text


def verify(lane: Lane, batch: Any, loss: Loss, micro: int) -> AccumulationCheck:
    """Compares the gradient of `batch` with that of `micro` ragged parts of it, both through the lane's backward.
    Dropout is off during the check, since its draws depend on the split. Weights, statistics and random state are
    restored."""
    samples = size(batch)
    lane.refuse_averages("verify_accumulation")
    if not lane.window.untouched:
        raise ConfigError("a window has begun", where="verify_accumulation", hint="call flush() first")
    if samples < micro or micro < 2:
        raise ConfigError(f"{samples} samples cannot be split into {micro} parts", where="verify_accumulation",
                          hint="give a batch of at least two samples per micro-batch")  # fmt: skip
    with _in_eval_mode(lane.model, nn.modules.dropout._DropoutNd):
        deviation, worst = _deviation(lane, batch, loss, micro)
        frozen = None
        if batch_norms(lane.model):
            with _in_eval_mode(lane.model, nn.modules.batchnorm._BatchNorm):
                frozen, _ = _deviation(lane, batch, loss, micro)
    half_type = precision.HALF_TYPES.get(lane.config.precision.amp)
    eps = max(torch.finfo(half_type or p.dtype).eps for p in lane.params)
    return AccumulationCheck(deviation, 16 * eps * math.sqrt(samples * micro), worst, frozen)


@contextmanager
def _in_eval_mode(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    changed = [m for m in model.modules() if isinstance(m, kind) and m.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


def _deviation(lane: Lane, batch: Any, loss: Loss, micro: int) -> tuple[float, str]:
    samples = size(batch)
    # The parts are ragged on purpose: equal parts would hide a division by the number of parts.
    larger = samples // micro + 1
    edges = {0, samples}
    for index in range(1, micro):
        edges.add(min(larger * index, samples - micro + index))
    parts = []
    for start, end in itertools.pairwise(sorted(edges)):
        parts.append(each_tensor(batch, itemgetter(slice(start, end))))
    with Apart(lane.model.modules()):
        whole = _gradient(lane, [batch], loss)
    with Apart(lane.model.modules()):
        split = _gradient(lane, parts, loss)
    differences = {n: float((split[n] - whole[n]).norm()) for n in lane.names}
    total = math.hypot(*[float(g.norm()) for g in whole.values()])
    worst = max(differences, key=lambda n: differences[n])
    if not total:
        return math.inf, worst
    return math.hypot(*differences.values()) / total, worst


def _gradient(lane: Lane, parts: Sequence[Any], loss: Loss) -> dict[str, Tensor]:
    for part in parts:
        with precision.autocast(lane.config.precision, lane.device)():
            value = loss(lane.model, part)
        lane.backward(value * size(part), weight=size(part))
    unscale = 1.0 / (lane.window.weight * lane.window.factor)
    grads: dict[str, Tensor] = {}
    for name, param in zip(lane.names, lane.stepped, strict=True):
        grads[name] = torch.zeros_like(param) if param.grad is None else param.grad.double() * unscale
    lane.forget()
    return grads
