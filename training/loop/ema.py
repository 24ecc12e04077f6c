"""Exponential moving average of the weights, in place: one foreach call a step, no second model. Averaged are the
parameters and the running statistics of normalisation layers; every other buffer (counters, masks) is the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerline.training.config.sections import Config, EmaConfig
from layerline.training.model.canonical_names import NamedTensors, Slots
from layerline.training.model.policy import Policy
from layerline.training.model.precision import HALF, Masters, wide
from layerline.training.model.split_tensors import local


def decay_at(config: EmaConfig, update: int) -> float:
    """The decay of update number `update` (1 is the first). Warm-up True is min(decay, (1+n)/(10+n)); a number tau is
    decay * (1 - exp(-n/tau)), 0.918 at n = 5001 for 0.9999 and tau = 2000."""
    decay = config.decay or 0.0
    if config.warmup is True:
        return min(decay, (1 + update) / (10 + update))
    if config.warmup is False:
        return decay
    return decay * -math.expm1(-update / config.warmup)


def averaged(model: NamedTensors, masters: Masters | None = None) -> dict[str, Tensor]:
    """What an average follows: trained parameters (their masters where there are any) and normalisation statistics."""
    sources: dict[str, Tensor] = {}
    for name, param in model.params.items():
        if param.requires_grad:
            sources[name] = param if masters is None else masters.stepped(param)
    return sources | statistics(model)


def statistics(model: NamedTensors) -> dict[str, Tensor]:
    """Running means and variances of the normalisation layers."""
    return {n: b for n, b in norm_buffers(model).items() if b.is_floating_point()}


def norm_buffers(model: NamedTensors) -> dict[str, Tensor]:
    """All that normalisation layers keep from batch to batch: their statistics, and how many batches they counted."""
    return {n: b for n, b in model.buffers.items() if isinstance(model.owners[n], nn.modules.batchnorm._NormBase)}


def average(model: NamedTensors, masters: Masters | None, config: Config) -> EmaPolicy | None:
    """What will ship in place of the weights: their moving average, their mean at the end, or None."""
    start = config.swa_start
    if not start and not config.ema.on:
        return None
    settings = config.ema
    if start:
        settings = EmaConfig(start_step=start)
    return EmaPolicy(averaged(model, masters), settings, Slots(model, statistics(model)), mean=start > 0)


class EmaPolicy(Policy):
    """The average of a set of tensors, which are read as they are at each update: `module.to()` may move them. `live`
    says where the model holds those that are buffers; a forward pass may replace them. `mean` takes the plain mean of
    the weights from `start_step` on; decay and warm-up say nothing then."""

    def __init__(
        self, sources: Mapping[str, Tensor], config: EmaConfig, live: Slots | None = None, *, mean: bool = False
    ) -> None:
        self.config, self.mean = config, mean
        self.names: list[str] = []
        self.shadow: list[Tensor] = []  # the averages, float32 or wider, in the order of `names`
        self._fixed: list[Tensor] = []
        self._backup: dict[int, Tensor] = {}  # half weights that the averages stand in for, by their place
        self._statistics: list[Tensor] = []
        self.updates = 0  # how often the average was updated
        self.swapped = False  # whether the sources hold the averages just now
        self.follow(sources, live)

    @property
    def sources(self) -> list[Tensor]:
        """What is followed, in the order of `names`: parameters, then buffers."""
        if self._live is None:
            return self._fixed
        return [*self._fixed, *self._live.now()]

    def follow(self, sources: Mapping[str, Tensor], live: Slots | None) -> None:
        """Takes over renamed, new and missing tensors of the model; averages of those that stayed go on."""
        # A parameter is the same tensor under another name; a buffer has the same name and may be another tensor.
        by_tensor = {id(source): average for source, average in zip(self._fixed, self.shadow, strict=False)}
        by_name = dict(zip(self.names, self.shadow, strict=True))
        self._live = live if live is not None and live.names else None
        buffers = [] if self._live is None else self._live.names
        fixed = {name: source for name, source in sources.items() if name not in buffers}
        self.names = [*fixed, *buffers]
        self._fixed = list(fixed.values())
        averages = [by_tensor.get(id(source)) for source in self._fixed] + [by_name.get(name) for name in buffers]
        self.shadow = []
        for source, average in zip(self.sources, averages, strict=True):
            if average is None or average.shape != source.shape:
                average = wide(source)
            self.shadow.append(average)
        # Each rank averages its own part of tensors that are split.
        self._here = list(map(local, self._fixed))
        self._averages = list(map(local, self.shadow))
        self._mixed = any(source.dtype in HALF for source in self.sources)

    @torch.no_grad()
    def begin(self, *, buffers: bool) -> None:
        """Before averaging begins: it starts from the weights that training starts from, which may have been written
        into the model since."""
        if self.updates == 0 and self.config.start_step <= 1:
            self._copy(None if buffers else len(self._fixed))

    def before_step(self) -> None:
        if not self.updates:
            self.begin(buffers=False)

    def after_accepted(self, step: int) -> None:
        """Follows the weights after accepted step number `step` (1 is the first); copies them until `start_step`.
        shadow += (1 - d) (weights - shadow), d = decay_at(config, n), or 1 - 1 / n for a plain mean."""
        if step < self.config.start_step:
            return
        if self.updates == 0 and self.config.start_step > 1:
            with torch.no_grad():
                self._copy()
            self.updates = 1
            return
        self.updates += 1
        sources = self._here
        if self._live is not None:
            sources = [*sources, *self._live.now()]
        if self._mixed:
            # Wider types stay as they are.
            sources = [source.to(average.dtype) for source, average in zip(sources, self._averages, strict=True)]
        share = 1.0 / self.updates
        if not self.mean:
            share = 1.0 - decay_at(self.config, self.updates)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes a third as long as averaging ten small tensors
        try:
            torch._foreach_lerp_(self._averages, sources, share)
        finally:
            torch._C._set_grad_enabled(enabled)

    def values(self) -> dict[str, Tensor]:
        """The averages by name; the weights themselves while averaging has not begun."""
        if not self.updates:
            return dict(zip(self.names, self.sources, strict=True))
        return dict(zip(self.names, self.shadow, strict=True))

    def _copy(self, count: int | None = None) -> None:
        """Takes over the first `count` sources as they are: parameters come before buffers."""
        torch._foreach_copy_(self._averages[:count], list(map(local, self.sources[:count])))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and averages in place, one tensor at a time."""
        averaged_statistics = self.shadow[len(self._fixed) :]
        if not self.swapped:
            if not self.updates:
                self._copy()
            self._statistics = list(map(torch.clone, averaged_statistics))
        for i, (source, average) in enumerate(zip(self.sources, self.shadow, strict=True)):
            if source.dtype == average.dtype:
                held = source.clone()
                source.copy_(average)
                average.copy_(held)
            elif self.swapped:
                source.copy_(self._backup[i])
            else:
                # A half-precision source cannot hold the average without loss: its own value is kept aside meanwhile.
                self._backup[i] = source.clone()
                source.copy_(average)
        self.swapped = not self.swapped
        if not self.swapped:
            # What a forward pass in training mode did to running statistics meanwhile is dropped.
            for average, kept in zip(averaged_statistics, self._statistics, strict=True):
                average.copy_(kept)
            self._backup.clear()

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Goes on from saved averages; what is not among them starts at the present weights."""
        self.updates = updates
        for name, shadow, source in zip(self.names, self.shadow, self.sources, strict=True):
            shadow.copy_(averages.get(name, source))
