"""Whether the weights are still finite: a finite gradient does not make a finite update.

Too great a rate, or a number that no longer fits half precision, writes Inf or NaN into a weight. Looking at all
weights costs a pass over them: it is done every so often, before a checkpoint is written, and after a rejected step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerline.training.model.split_tensors import local
from layerline.training.optimizers.gradient_norm import numbers


class FiniteWeights:
    """The weights of one model that were finite at first; what holds an Inf on purpose is left alone."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._watched = [
            (name, param) for name, param, finite in zip(names, params, _finite(params), strict=True) if finite
        ]

    def first_spoilt(self) -> str | None:
        """The name of the first weight with an Inf or NaN (one pass over all weights, one read of the device)."""
        finite = _finite([param for _, param in self._watched])
        for (name, _), is_finite in zip(self._watched, finite, strict=True):
            if not is_finite:
                return name
        return None


@torch.no_grad()
def _finite(params: Sequence[Tensor]) -> list[bool]:
    parts = [local(p.detach()) for p in params]
    # The greatest magnitude is NaN or Inf where any element is; a rank may hold no element of a split parameter.
    there = [p for p in parts if p.numel()]
    norms = iter(numbers(torch._foreach_norm(there, math.inf)) if there else [])
    return [math.isfinite(next(norms)) if part.numel() else True for part in parts]
