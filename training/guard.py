"""Running statistics survive a bad batch: the forward pass has changed them before anyone could reject the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Guard:
    """Copies of the normalisation statistics as the last accepted step left them.

    Args:
        live: the statistics by name; usually few and small.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.names = list(live)
        self._live = list(live.values())
        self._kept = [t.clone() for t in self._live]

    def keep(self) -> None:
        """Takes the present values as good."""
        torch._foreach_copy_(self._kept, self._live)

    def restore(self) -> list[str]:
        """Puts back every statistic that is not finite; returns their names."""
        bad = [i for i, t in enumerate(self._live) if not torch.isfinite(t).all()]
        for i in bad:
            self._live[i].copy_(self._kept[i])
        return [self.names[i] for i in bad]

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self.names, self._kept, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(self._kept, [state[n] for n in self.names])
