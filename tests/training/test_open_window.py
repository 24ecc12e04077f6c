"""Several ranks resume in the middle of an accumulation window."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from tests.training.group import good
from tests.training.group import ranks as run


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def _straight_and_resumed(rank: int, path: str) -> list[dict[str, Tensor]]:
    """Two windows of two micro-batches, straight and resumed in the middle of the second one."""
    config = {
        "optimizer": {"name": "sgd", "lr": 0.1}, "training": {"accumulate_steps": 2},
        "distributed": {"backend": "gloo", "timeout_s": 30},
    }  # fmt: skip
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(24, 5, generator=draws) + 3 * rank  # the ranks' statistics differ
    y = torch.randn(24, 3, generator=draws)
    results = []
    for resumed in (False, True):
        mo = ModelOptimizer(_model(0), config)
        for step in range(4):
            part = slice(8 * step % 24 + rank, 8 * step % 24 + 8, 2)
            mo.step((mo.model(x[part]) - y[part]).square().mean())
            if resumed and step == 2:
                mo.save_ckpt(path)
                mo = ModelOptimizer(_model(1), config)
                mo.load_ckpt(path)
        results.append(mo.export())
    return results


def test_a_window_with_batch_norm_is_resumed_with_the_statistics_of_all_ranks(tmp_path: Path) -> None:
    for straight, resumed in good(run(_straight_and_resumed, str(tmp_path / "open.safetensors"))):
        assert resumed["1.running_mean"].max() > 0.5
        for name, value in straight.items():
            assert torch.allclose(resumed[name], value, rtol=0, atol=2e-6), name
