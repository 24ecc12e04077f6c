"""A hand-written training loop in which ModelOptimizer replaces two lines.

    python train.py            trains, and goes on from where it stopped if it was interrupted
    python train.py --prove    shows that going on is bit-exact

The model, the loss and the loop are ordinary PyTorch. The lines that say `mo` are all there is of Layerline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from layerline import ModelOptimizer

HERE = Path(__file__).parent
STEPS, BATCH, WIDTH = 300, 32, 16


def model() -> nn.Module:
    """Reads which of two frequencies is in a noisy signal."""
    return nn.Sequential(
        nn.Conv1d(1, WIDTH, 5, padding=2), nn.BatchNorm1d(WIDTH), nn.ReLU(),
        nn.Conv1d(WIDTH, WIDTH, 5, stride=2, padding=2), nn.BatchNorm1d(WIDTH), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(WIDTH, 2),
    )  # fmt: skip


def batch(size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Signals of 64 points and their class."""
    label = torch.randint(0, 2, (size,))
    time = torch.arange(64) / 64 * 2 * torch.pi
    frequency = torch.where(label == 0, 4.0, 6.0)[:, None]
    clean = torch.sin(frequency * time + 2 * torch.pi * torch.rand(size, 1))
    return (clean + torch.randn(size, 64))[:, None], label


def build() -> tuple[ModelOptimizer, Callable[[], bool]]:
    """Everything the loop needs, from scratch: (ModelOptimizer, one step of the loop)."""
    torch.manual_seed(0)
    net, criterion = model(), nn.CrossEntropyLoss()
    mo = ModelOptimizer(net, HERE / "config.yaml")

    def step() -> bool:
        x, y = batch()
        with mo.autocast():
            loss = criterion(net(x), y)
        return mo.step(loss)

    return mo, step


def accuracy(net: nn.Module) -> float:
    """Share of right answers on fresh signals that are the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x, y = batch(512)
    return (net(x).argmax(1) == y).float().mean().item()


def main() -> None:
    """Trains to the end, from the newest checkpoint where there is one."""
    mo, step = build()
    if "--prove" in sys.argv:
        proof = mo.prove_resume(20, f"{__file__}:build")
        print(proof)
        sys.exit(0 if proof.passed else proof.hint)
    if any((HERE / "checkpoints").glob("*")):
        print(f"going on from {mo.load_ckpt(HERE / 'checkpoints').name}")
    print(mo.plan())
    while mo.global_step < STEPS:
        if step() and mo.global_step % 100 == 0:
            scores = mo.validate(accuracy)
            mo.save_ckpt(HERE / "checkpoints")
            print(f"step {mo.global_step}: online {scores['online']:.3f}, average {scores['deploy']:.3f}")
    mo.export_metrics(HERE / "metrics.csv")
    print(f"accuracy of what would ship: {mo.validate(accuracy)['deploy']:.3f}")


if __name__ == "__main__":
    main()
