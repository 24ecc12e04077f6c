"""Exponential moving average of the weights, in place: one foreach call a step, no second model.

Averaged are the parameters and the running statistics of normalisation layers. Every other buffer (counters, masks,
position tables) is the model's own: copying it would change nothing, averaging it could not be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerline.training.config.sections import Config, EmaConfig
from layerline.training.model.canonical_names import Named, Slots
from layerline.training.model.precision import HALF, Masters, wide
from layerline.training.model.split_tensors import local
from layerline.training.policy import Policy


def decay_at(config: EmaConfig, update: int) -> float:
    """The decay of update number `update` (1 is the first).

    Warm-up True is min(decay, (1+n)/(10+n)); a number tau is decay * (1 - exp(-n/tau)), 0.918 at n = 5001 for 0.9999
    and tau = 2000.
    """
    decay = config.decay or 0.0
    if config.warmup is True:
        return min(decay, (1 + update) / (10 + update))
    if config.warmup is False:
        return decay
    return decay * -math.expm1(-update / config.warmup)


def averaged(model: Named, masters: Masters | None = None) -> dict[str, Tensor]:
    """What an average follows: trained parameters (their masters where there are any) and normalisation statistics."""
    out: dict[str, Tensor] = {
        n: masters.stepped(p) if masters else p for n, p in model.params.items() if p.requires_grad
    }
    return out | statistics(model)


def statistics(model: Named) -> dict[str, Tensor]:
    """Running means and variances of the normalisation layers."""
    return {n: b for n, b in norm_buffers(model).items() if b.is_floating_point()}


def norm_buffers(model: Named) -> dict[str, Tensor]:
    """All that normalisation layers keep from batch to batch: their statistics, and how many batches they counted."""
    return {n: b for n, b in model.buffers.items() if isinstance(model.owners[n], nn.modules.batchnorm._NormBase)}


def average(model: Named, masters: Masters | None, config: Config) -> Ema | None:
    """What will ship in place of the weights: their moving average, their mean at the end, or None."""
    start = config.swa_start
    settings = EmaConfig(start_step=start) if start else config.ema
    if not start and not config.ema.on:
        return None
    return Ema(averaged(model, masters), settings, Slots(model, statistics(model)), mean=start > 0)


class Ema(Policy):
    """The average of a set of tensors.

    Args:
        sources: tensors by canonical name. They are read as they are at each update, and so may be moved by
            `tensor.data = …`, as `module.to()` does.
        config: decay, start step, warm-up.
        live: where the model holds those of `sources` that are buffers; a forward pass may replace them.
        mean: takes the plain mean of the weights from `start_step` on; decay and warm-up say nothing then.

    Attributes:
        shadow: the averages, float32 or wider, in the order of `names`.
        updates: how often the average was updated.
        swapped: whether the sources hold the averages just now.
    """

    def __init__(
        self, sources: Mapping[str, Tensor], config: EmaConfig, live: Slots | None = None, *, mean: bool = False
    ) -> None:
        self.config, self.mean = config, mean
        buffers = live.names if live is not None else []
        fixed = {n: s for n, s in sources.items() if n not in buffers}
        self.names, self._fixed = [*fixed, *buffers], list(fixed.values())
        self._live = live if buffers else None
        self.shadow = [wide(s) for s in self.sources]
        self._backup: list[Tensor | None] = []
        self._statistics: list[Tensor] = []
        self._arrange()
        self.updates = 0
        self.swapped = False

    @property
    def sources(self) -> list[Tensor]:
        """What is followed, in the order of `names`."""
        return [*self._fixed, *self._live.now()] if self._live is not None else self._fixed

    def _arrange(self) -> None:
        # Each rank averages its own part of tensors that are split.
        self._here, self._averages = [local(s) for s in self._fixed], [local(s) for s in self.shadow]
        self._mixed = any(s.dtype in HALF for s in self.sources)

    def follow(self, sources: Mapping[str, Tensor], live: Slots) -> None:
        """Takes over renamed, new and missing tensors of the model; averages of those that stayed go on."""
        old = {id(s): a for s, a in zip(self.sources, self.shadow, strict=True)}
        named = dict(zip(self.names, self.shadow, strict=True))
        fixed = {n: s for n, s in sources.items() if n not in live.names}
        averages = [old[id(s)] if id(s) in old else wide(s) for s in fixed.values()]
        averages += [named[n] if n in named and named[n].shape == s.shape else wide(s)
                     for n, s in zip(live.names, live.now(), strict=True)]  # fmt: skip
        self.names, self._fixed, self.shadow = [*fixed, *live.names], list(fixed.values()), averages
        self._live = live if live.names else None
        self._arrange()

    @torch.no_grad()
    def begin(self, *, buffers: bool) -> None:
        """Before averaging begins: it starts from the weights that training starts from, which may have been written
        into the model since.

        Args:
            buffers: whether running statistics are still those that training starts from; the first forward pass
                changes them.
        """
        if self.updates == 0 and self.config.start_step <= 1:
            self._copy(None if buffers else len(self._fixed))

    def before_step(self) -> None:
        if not self.updates:
            self.begin(buffers=False)

    def after_accepted(self, step: int) -> None:
        """Follows the weights after accepted step number `step` (1 is the first); copies them until `start_step`.

        shadow += (1 - d) (weights - shadow), d = decay_at(config, n), or 1 - 1 / n for a plain mean.
        """
        if step < self.config.start_step:
            return
        if self.updates == 0 and self.config.start_step > 1:
            with torch.no_grad():
                self._copy()
            self.updates = 1
            return
        self.updates += 1
        sources = self._here if self._live is None else [*self._here, *self._live.now()]
        if self._mixed:
            sources = [s.float() if s.dtype in HALF else s for s in sources]
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes a third as long as averaging ten small tensors
        try:
            share = 1.0 / self.updates if self.mean else 1.0 - decay_at(self.config, self.updates)
            torch._foreach_lerp_(self._averages, sources, share)
        finally:
            torch._C._set_grad_enabled(enabled)

    def values(self) -> dict[str, Tensor]:
        """The averages by name; the weights themselves while averaging has not begun."""
        tensors = self.shadow if self.updates else self.sources
        return dict(zip(self.names, tensors, strict=True))

    def _copy(self, count: int | None = None) -> None:
        """Takes over the first `count` sources as they are: parameters come before buffers."""
        torch._foreach_copy_(self._averages[:count], [local(s) for s in self.sources[:count]])

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and averages in place, one tensor at a time.

        A half-precision source cannot hold the average without loss, so its own value is kept aside meanwhile. What a
        forward pass in training mode does to running statistics meanwhile is dropped: neither average nor model keeps
        it.
        """
        first = len(self._fixed)
        if not self.updates and not self.swapped:
            self._copy()
        if not self.swapped:
            self._statistics = [s.clone() for s in self.shadow[first:]]
        for i, (source, shadow) in enumerate(zip(self.sources, self.shadow, strict=True)):
            if source.dtype == shadow.dtype:
                held = source.clone()
                source.copy_(shadow)
                shadow.copy_(held)
            elif self.swapped:
                kept = self._backup[i]
                assert kept is not None
                source.copy_(kept)
            else:
                self._backup.extend([None] * (i + 1 - len(self._backup)))
                self._backup[i] = source.clone()
                source.copy_(shadow)
        self.swapped = not self.swapped
        if not self.swapped:
            for shadow, kept in zip(self.shadow[first:], self._statistics, strict=True):
                shadow.copy_(kept)
            self._backup.clear()
            self._statistics.clear()

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Goes on from saved averages; what is not among them starts at the present weights."""
        self.updates = updates
        for name, shadow, source in zip(self.names, self.shadow, self.sources, strict=True):
            shadow.copy_(averages.get(name, source))
