"""How much of what is masked is masked."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def share_of_zeros(masks: Mapping[str, Tensor]) -> float:
    """Zeros of all masks over their elements; 0 where there are none."""
    elements = sum(mask.numel() for mask in masks.values())
    return sum(int((~mask).sum()) for mask in masks.values()) / max(elements, 1)
