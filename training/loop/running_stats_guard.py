"""Running statistics and ranges of fake quantisation survive a bad batch: the forward pass has changed them before
anyone could reject the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerline.training.loop.ema import norm_buffers
from layerline.training.model.canonical_names import NamedTensors, Slots
from layerline.training.model.fake_quantization import is_observer
from layerline.training.model.policy import Policy


def guarded(model: NamedTensors) -> dict[str, Tensor]:
    """The buffers that a forward pass in training mode changes: of normalisation layers, and of observers and fake
    quantisation."""
    observed = {n: b for n, b in model.buffers.items() if is_observer(model.owners[n])}
    # The switches (`observer_enabled`, `fake_quant_enabled`) are the user's: a rejected step leaves them alone.
    return norm_buffers(model) | {n: b for n, b in observed.items() if not n.endswith("_enabled")}


class RunningStatsGuard(Policy):
    """Copies of what such buffers hold (means, variances, counters, ranges) as the last accepted step left it."""

    name = "guard"

    def __init__(self, live: Slots) -> None:
        self._live = live
        self._kept = list(map(torch.clone, live.now()))
        self._aside: list[Tensor] = []

    def follow(self, live: Slots) -> None:
        """Takes over the buffers of a model whose layers were changed; values of those that stayed are kept."""
        kept = dict(zip(self._live.names, self._kept, strict=True))
        self._kept = []
        for name, tensor in zip(live.names, live.now(), strict=True):
            value = kept.get(name)
            if value is None or value.shape != tensor.shape:
                value = tensor.clone()
            self._kept.append(value)
        self._live = live

    def after_accepted(self, step: int) -> None:  # noqa: ARG002
        self.keep()

    def keep(self) -> None:
        """Takes the present values as good."""
        live = self._live.now()
        if self._grown(live):
            self._kept = list(map(torch.clone, live))
        else:
            torch._foreach_copy_(self._kept, live)

    def after_rejected(self, *, finite: bool) -> None:  # noqa: ARG002
        """Puts the values of the last accepted step back."""
        live = self._live.now()
        if self._grown(live):
            for tensor, kept in zip(live, self._kept, strict=True):
                tensor.resize_(kept.shape)
        torch._foreach_copy_(live, self._kept)

    def _grown(self, live: list[Tensor]) -> bool:
        """Whether a range of each channel has taken the place of one for all, as at the first forward pass."""
        return any(t.shape != k.shape for t, k in zip(live, self._kept, strict=True))

    def hold(self, *, swapped: bool) -> None:
        """Puts the counters aside while the model holds its averages, and back afterwards: they are not averaged."""
        names = self._live.names
        counters = [t for n, t in zip(names, self._live.now(), strict=True) if n.endswith("num_batches_tracked")]
        if swapped:
            self._aside = list(map(torch.clone, counters))
        elif self._aside:
            torch._foreach_copy_(counters, self._aside)
            self._aside = []

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self._live.names, self._kept, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor], step: int) -> None:  # noqa: ARG002
        """What is not in `state` is as the model holds it."""
        self.keep()
        for index, name in enumerate(self._live.names):
            if name in state:
                self._kept[index] = state[name].to(self._kept[index]).clone()
