"""Several update rules in one training: each steps the parameters that `optimizer.groups` give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Several:
    """Optimizers over parts of one model, stepped as one."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in their order."""
        groups: list[dict[str, Any]] = []
        for part in self.parts.values():
            groups += part.param_groups
        return groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter, whichever part steps it."""
        state: dict[Tensor, dict[str, Any]] = {}
        for part in self.parts.values():
            state |= part.state
        return state

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()
