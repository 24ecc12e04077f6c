"""Exponential moving average of the weights, in place: one foreach call a step, no second model.

Averaged are the parameters and the running statistics of normalisation layers. Every other buffer (counters, masks,
position tables) is the model's own: copying it would change nothing, averaging it could not be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerline.training.config import EmaConfig
from layerline.training.names import Named
from layerline.training.parts import local
from layerline.training.precision import HALF, Masters


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
    return {
        n: b for n, b in model.buffers.items()
        if isinstance(model.owners[n], nn.modules.batchnorm._NormBase) and b.is_floating_point()
    }  # fmt: skip


class Ema:
    """The average of a set of tensors.

    Args:
        sources: tensors by canonical name; they are read at each update and never replaced.
        config: decay, start step, warm-up.

    Attributes:
        sources: what is followed.
        shadow: the averages, float32 or wider, in the order of `sources`.
        updates: how often the average was updated.
        swapped: whether the sources hold the averages just now.
    """

    def __init__(self, sources: Mapping[str, Tensor], config: EmaConfig) -> None:
        self.config = config
        self.names = list(sources)
        self.sources = [s.detach() for s in sources.values()]
        # Copied at once, so that the first average counts the weights that training started from.
        self.shadow = [s.float().clone() if s.dtype in HALF else s.clone() for s in self.sources]
        # Each rank averages its own part of tensors that are split.
        self._here, self._averages = [local(s) for s in self.sources], [local(s) for s in self.shadow]
        self._mixed = any(s.dtype in HALF for s in self.sources)
        self._backup: list[Tensor | None] = []
        self.updates = 0
        self.swapped = False

    def update(self, step: int) -> None:
        """Follows the weights after accepted step number `step` (1 is the first); copies them until `start_step`.

        shadow += (1 - d) (weights - shadow), d = decay_at(config, n).
        """
        if step < self.config.start_step:
            return
        if self.updates == 0 and self.config.start_step > 1:
            self._copy()
            self.updates = 1
            return
        self.updates += 1
        sources = [s.float() if s.dtype in HALF else s for s in self._here] if self._mixed else self._here
        torch._foreach_lerp_(self._averages, sources, 1.0 - decay_at(self.config, self.updates))

    def add(self, name: str, source: Tensor) -> None:
        """Follows one more tensor, from its present value on."""
        self.names.append(name)
        self.sources.append(source.detach())
        self.shadow.append(source.detach().float().clone() if source.dtype in HALF else source.detach().clone())
        self._here.append(local(self.sources[-1]))
        self._averages.append(local(self.shadow[-1]))
        self._mixed = self._mixed or source.dtype in HALF

    def values(self) -> dict[str, Tensor]:
        """The averages by name; the weights themselves while averaging has not begun."""
        tensors = self.shadow if self.updates or not self.config.start_step else self.sources
        return dict(zip(self.names, tensors, strict=True))

    def _copy(self) -> None:
        torch._foreach_copy_(self._averages, self._here)

    def swap(self) -> None:
        """Exchanges weights and averages in place, one tensor at a time.

        A half-precision source cannot carry the average without loss, so its own value is kept aside meanwhile.
        """
        if not self.updates and self.config.start_step:
            self._copy()
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
            self._backup.clear()

    def load(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Goes on from saved averages; what is not among them starts at the present weights."""
        self.updates = updates
        for name, shadow, source in zip(self.names, self.shadow, self.sources, strict=True):
            shadow.copy_(averages.get(name, source))
