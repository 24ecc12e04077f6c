"""Accumulation that equals the big batch: sums of gradients and sums of weights, divided once, at the end.

Nothing is divided beforehand, so ragged tails and unequal micro-batches need no case of their own: the gradient of a
window is Σ grad(loss_i) / Σ weight_i whatever the split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerline.pipeline.errors import ConfigError


def loss_factor(scale: float, weight: float | None) -> float:
    """What the losses of a window are multiplied by before the backward pass.

    A loss that is a sum over many samples would overflow fp16 where their mean does not: it is brought to a mean's size
    by a power of two, which costs no precision.
    """
    return scale if not weight else scale * 2.0 ** -round(math.log2(weight))


@dataclass
class Window:
    """The micro-batches since the last optimizer step.

    A loss without weight is a mean and counts 1; a loss with weight is a sum over that many samples or tokens. Several
    backward calls before one step() belong to one micro-batch: without weights their losses add up.

    Attributes:
        micro: micro-batches closed by step().
        weight: Σ weight of the closed ones.
        losses: detached loss of every backward call.
        weighted: whether weights are given in this window; None before the first loss.
        factor: what every loss of the window was multiplied by (the loss scale); the gradients still carry it.
    """

    micro: int = 0
    weight: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    weighted: bool | None = None
    factor: float = 1.0
    carried_loss: float = 0.0

    def add(self, loss: Tensor, weight: float | None) -> None:
        """Takes in one backward call.

        Raises:
            ConfigError: a weight that is not positive, or weights for some losses of a window only.
        """
        weighted = weight is not None
        if self.weighted is not None and weighted is not self.weighted:
            raise ConfigError(
                "some losses of one accumulation window have a weight and some have none",
                where="weight",
                hint="give the number of samples (or tokens) with each, or with none",
            )
        if weight is not None:
            if not weight >= 0:
                raise ConfigError(f"a weight counts samples or tokens, got {weight}", where="weight")
            self.weight += weight
        self.weighted = weighted
        self.losses.append(loss)

    def close(self) -> int:
        """Ends a micro-batch; returns how many the window holds."""
        if not self.weighted:
            self.weight += 1.0
        self.micro += 1
        return self.micro

    def total_loss(self) -> float:
        """Σ loss of the window (one synchronisation)."""
        total = self.carried_loss  # added in order, so that a window resumed half-way gives the same sum
        for loss in self.losses:
            total += loss.item()
        return total

    def clear(self) -> None:
        self.micro, self.weight, self.weighted, self.factor, self.carried_loss = 0, 0.0, None, 1.0, 0.0
        self.losses.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"micro": self.micro, "weight": self.weight, "weighted": self.weighted, "factor": self.factor,
                "loss": self.total_loss()}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses.clear()
        self.micro, self.weight, self.weighted = state["micro"], state["weight"], state["weighted"]
        self.factor, self.carried_loss = state["factor"], state["loss"]
