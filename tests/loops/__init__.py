"""Training loops as public examples write them, each beside the version that adopts ModelOptimizer.

Every module has pairs of functions: `plain_…` is the loop as examples of its kind have it, `adopted_…` differs by the
lines that docs/training.md lists. Both return the loss of each step. Nets and data are tiny; the losses must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

Losses = list[float]


def images(count: int, size: int, channels: int = 1, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Noise with a bright square whose place says the class, so that there is something to learn."""
    y = torch.arange(count) % classes
    x = 0.3 * torch.randn(count, channels, size, size)
    half = size // 2
    for image, label in zip(x, y.tolist(), strict=True):
        row, column = half * (label // 2), half * (label % 2)
        image[:, row : row + half, column : column + half] += 1.0
    return x, y


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def run(loop: Callable[[], Losses]) -> Losses:
    """A loop from the same seed as its counterpart."""
    torch.manual_seed(7)
    return loop()


def agree(plain: Callable[[], Losses], adopted: Callable[[], Losses], *, exact: bool, falls: bool = True) -> None:
    """Both loops give the same losses: bit for bit, or up to the rounding of sums in another order."""
    expected, got = run(plain), run(adopted)
    if falls:
        third = len(expected) // 3
        assert mean(expected[-third:]) < mean(expected[:third])
    if exact:
        assert got == expected
    else:
        assert got == pytest.approx(expected, rel=2e-5)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
