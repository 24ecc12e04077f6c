"""Checks on demand that accumulation equals the big batch, on the user's own model, loss and batch."""

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
from layerline.training.loop.loop_mistakes import refuse_averages
from layerline.training.loop.step_engine import Lane
from layerline.training.model import precision
from layerline.training.randomness import rng_state

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class AccumulationCheck:
    """How far the accumulated gradient is from the big batch's.

    Attributes:
        deviation: ‖g_split - g_whole‖ / ‖g_whole‖ over all parameters.
        bound: the greatest deviation that rounding explains: 16 eps sqrt(samples * micro-batches).
        worst: the parameter that deviates most.
        batch_norm: the same deviation with batch normalisation held at its running statistics, where the model has
            any: what is left when the layers that depend on the split do not.
    """

    deviation: float
    bound: float
    worst: str
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
    """Compares the gradient of `batch` with that of `micro` ragged parts of it, both through the lane's own backward.

    Dropout layers are off meanwhile: their draws depend on the split as a matter of course. Weights, statistics and
    random state are left as they were.

    Args:
        lane: at the start of a window.
        batch: (inputs…, target) or a dict by name, all of one first dimension.
        loss: mean loss of a batch.
        micro: parts; the last ones are the shorter ones.

    Raises:
        ConfigError: fewer samples than parts, or a window has begun.
    """
    samples = size(batch)
    refuse_averages(lane, "verify_accumulation")
    if not lane.window.untouched:
        raise ConfigError("a window has begun", where="verify_accumulation", hint="call flush() first")
    if samples < micro or micro < 2:
        raise ConfigError(f"{samples} samples cannot be split into {micro} parts", where="verify_accumulation",
                          hint="give a batch of at least two samples per micro-batch")  # fmt: skip
    with _held(lane.model, nn.modules.dropout._DropoutNd):
        deviation, worst = _deviation(lane, batch, loss, micro)
        frozen = None
        if batch_norms(lane.model):
            with _held(lane.model, nn.modules.batchnorm._BatchNorm):
                frozen, _ = _deviation(lane, batch, loss, micro)
    eps = max(torch.finfo(precision.HALF_TYPES.get(lane.config.precision.amp, p.dtype)).eps for p in lane.params)
    return AccumulationCheck(deviation, 16 * eps * math.sqrt(samples * micro), worst, frozen)


@contextmanager
def _held(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    held = [m for m in model.modules() if isinstance(m, kind) and m.training]
    for module in held:
        module.training = False
    try:
        yield
    finally:
        for module in held:
            module.training = True


def _deviation(lane: Lane, batch: Any, loss: Loss, micro: int) -> tuple[float, str]:
    samples, buffers = size(batch), {n: b.clone() for n, b in lane.model.named_buffers()}
    draws = rng_state.capture()
    whole = _gradient(lane, [batch], loss)
    rng_state.restore(draws)
    # Ragged on purpose: equal parts would hide a division by the count of parts.
    larger = samples // micro + 1
    edges = sorted({0, samples, *(min(larger * i, samples - micro + i) for i in range(1, micro))})
    split = _gradient(lane, [each_tensor(batch, itemgetter(slice(a, b))) for a, b in itertools.pairwise(edges)], loss)
    rng_state.restore(draws)
    with torch.no_grad():
        for name, buffer in lane.model.named_buffers():
            buffer.copy_(buffers[name])
    apart = {n: float((split[n] - whole[n]).norm()) for n in lane.names}
    total = math.hypot(*(float(g.norm()) for g in whole.values()))
    return (math.hypot(*apart.values()) / total if total else math.inf), max(apart, key=lambda n: apart[n])


def _gradient(lane: Lane, parts: Sequence[Any], loss: Loss) -> dict[str, Tensor]:
    for part in parts:
        with precision.autocast(lane.config.precision, lane.device)():
            value = loss(lane.model, part)
        lane.backward(value * size(part), weight=size(part))
    unscale = 1.0 / (lane.window.weight * lane.window.factor)
    held = zip(lane.names, lane.stepped, strict=True)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.double() * unscale for n, p in held}
    lane.forget()
    return grads
