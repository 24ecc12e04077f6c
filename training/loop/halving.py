"""A micro-batch that does not fit into memory is halved: its parts run one after the other and give the same gradient.
What depends on the samples that are in a pass together, such as BatchNorm's statistics, is then that of a part."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, ran_out_of_memory
from layerline.training.data.batches import each_tensor, size
from layerline.training.loop import batch_norm
from layerline.training.loop.accumulation import witness
from layerline.training.loop.lane_state import LaneState
from layerline.training.randomness.rng_state import past, redraw

Forward = Callable[[Any], Tensor | tuple[Tensor, float]]
Autocast = Callable[[], AbstractContextManager[Any]]


def check(lane: LaneState) -> None:
    """Refuses what cannot go with `accumulate.on_oom: halve`."""
    reason = ""
    if lane.peers is not None:
        reason = "one rank alone would halve its batch, and the others would wait for it"
    elif lane.config.nonfinite.triage:
        reason = "triage runs whole micro-batches again"
    if reason:
        raise ConfigError(f"halve does not go with this training: {reason}", where="accumulate.on_oom",
                          hint="leave it out, and accumulate smaller batches: accumulate.steps")  # fmt: skip


def accumulate(
    lane: LaneState, batch: Any, forward: Forward, autocast: Autocast, models: Sequence[nn.Module]
) -> tuple[Tensor, float | None, int]:
    """Adds the gradients of one micro-batch to the window, in as few parts as have fitted so far. A part that runs out
    of memory is taken back and halved; later micro-batches have parts of that size at once. A micro-batch that fails in
    another way leaves the window as it was."""
    while True:
        before = _Before(lane, models)
        count = 1
        if lane.largest_part is not None:
            count = max(1, -(-size(batch) // lane.largest_part))
        try:
            loss, weight = _run(lane, batch, forward, autocast, count)
        except Exception as error:
            before.restore()
            if not _is_of_memory(error) or count >= size(batch):
                raise
        else:
            before.merge()
            return loss, weight, count
        # Outside of the handler: the traceback holds what the failed pass has computed.
        _halve(lane, size(batch), count)


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None and not ran_out_of_memory(error):
        error = error.__cause__  # another error may have been made of it
    return error is not None


def _run(lane: LaneState, batch: Any, forward: Forward, autocast: Autocast, count: int) -> tuple[Tensor, float | None]:
    """Loss and weight of a micro-batch in `count` parts, after their backward passes."""
    losses: list[Tensor] = []
    weights: list[float] = []
    for part, share in _parts(batch, count):
        with autocast():
            result = forward(part)
        if isinstance(result, tuple):
            loss, weight = result
            lane.backward(loss, weight)
            weights.append(float(weight))
        else:
            # The mean over the micro-batch is the mean of its parts' means, weighed by their samples.
            loss = result
            lane.backward(loss, share=share)
            loss = loss * share
        losses.append(loss.detach())
    if count == 1:
        return losses[0], weights[0] if weights else None
    return torch.stack(losses).sum(), sum(weights) if weights else None


def _parts(batch: Any, count: int) -> Iterator[tuple[Any, float]]:
    """Parts whose sizes differ by one sample at most, each with its share of the samples."""
    if count == 1:
        yield batch, 1.0
        return
    samples = size(batch)
    for index in range(count):
        start, end = samples * index // count, samples * (index + 1) // count

        def rows(tensor: Tensor, part: slice = slice(start, end)) -> Tensor:
            return tensor[part] if tensor.ndim and len(tensor) == samples else tensor

        yield each_tensor(batch, rows), (end - start) / samples


def _halve(lane: LaneState, samples: int, count: int) -> None:
    """Halves the parts of this and all later micro-batches, with a warning."""
    largest = -(-samples // count)
    lane.largest_part = -(-largest // 2)
    # The failed pass may be alive in cycles of objects.
    gc.collect()
    if lane.device.type == "cuda":
        torch.cuda.empty_cache()  # pieces of another size are of no use to smaller parts
    text = (
        f"{largest} samples do not fit into memory at step {lane.steps + 1}: from here on a pass holds at most "
        f"{lane.largest_part}, and micro-batches accumulate to the gradient they would have as a whole"
    )
    lane.monitor.warn(f"halved to {lane.largest_part}", text)
    dependence = batch_norm.warning(lane.model, -(-samples // lane.largest_part))
    if dependence:
        lane.monitor.warn("batch_norm", dependence)


class _Before:
    """The window, the buffers and the random state before a micro-batch. Gradients of earlier micro-batches are set
    aside meanwhile: a backward pass that fails has added to some of them."""

    def __init__(self, lane: LaneState, models: Sequence[nn.Module]) -> None:
        lane.window.check_gradients(lane.stepped)
        # Its gradient is set aside below, and that is no mistake of the loop.
        lane.window.witness = None
        self._lane = lane
        self._window = replace(lane.window, losses=list(lane.window.losses))
        self._grads = [p.grad for p in lane.stepped]
        self._past = past(itertools.chain(*[model.modules() for model in models]))
        for param in lane.stepped:
            param.grad = None

    def restore(self) -> None:
        """Takes the micro-batch back."""
        lane = self._lane
        lane.forget()
        lane.window = self._window
        for param, grad in zip(lane.stepped, self._grads, strict=True):
            param.grad = grad
        # The failed pass may have written to buffers in place: the copies take their place.
        for module, name, buffer in self._past.buffers:
            module._buffers[name] = buffer
        redraw(self._past.draws)

    def merge(self) -> None:
        """Adds the earlier gradients to those of the micro-batch."""
        for param, grad in zip(self._lane.stepped, self._grads, strict=True):
            if grad is None:
                continue
            if param.grad is not None:
                grad.add_(param.grad)
            param.grad = grad
        self._lane.window.witness = witness(self._lane.stepped)
