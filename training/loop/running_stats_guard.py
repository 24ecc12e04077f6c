"""Running statistics survive a bad batch: the forward pass has changed them before anyone could reject the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerline.training.model.canonical_names import Slots


class Guard:
    """Copies of what normalisation layers keep (means, variances, counters) as the last accepted step left it.

    Args:
        live: where these buffers are; usually few and small.
    """

    def __init__(self, live: Slots) -> None:
        self._live = live
        self._kept = [t.clone() for t in live.now()]
        self._aside: list[Tensor] = []

    def follow(self, live: Slots) -> None:
        """Takes over the buffers of a model whose layers were changed; values of those that stayed are kept."""
        kept = dict(zip(self._live.names, self._kept, strict=True))
        self._kept = [kept[n] if n in kept and kept[n].shape == t.shape else t.clone()
                      for n, t in zip(live.names, live.now(), strict=True)]  # fmt: skip
        self._live = live

    def keep(self) -> None:
        """Takes the present values as good."""
        torch._foreach_copy_(self._kept, self._live.now())

    def restore(self) -> None:
        """Puts the values of the last accepted step back."""
        torch._foreach_copy_(self._live.now(), self._kept)

    def hold(self) -> None:
        """Puts the counters aside, which are not averaged, while the model holds its averages."""
        self._aside = [t.clone() for t in self._counters()]

    def release(self) -> None:
        """Ends `hold`."""
        if self._aside:
            torch._foreach_copy_(self._counters(), self._aside)
            self._aside = []

    def _counters(self) -> list[Tensor]:
        return [t for t in self._live.now() if not t.is_floating_point()]

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self._live.names, self._kept, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What is not in `state` stays."""
        for name, kept in zip(self._live.names, self._kept, strict=True):
            if name in state:
                kept.copy_(state[name])
