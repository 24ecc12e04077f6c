"""Kill -9 in mid-epoch and in mid-window, then go on: the first step whose loss differs from an undisturbed run.

    python benchmarks/resume.py

The data is a Dataset with random augmentation, read by 0 and by 2 workers; the model has dropout and BatchNorm, and
gradients are accumulated over 4 micro-batches. Each contender saves after every micro-batch, by its own means, is
killed by itself at a given one, and started again. `by_hand` is the script people write: weights, optimizer, torch's
generator, epoch and position, skipping the batches it has seen; Accelerate uses save_state, load_state,
skip_first_batches and its seedable sampler. Ends in one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, ACCUMULATE, SAMPLES = 2, 4, 4, 72
KILLS = {"mid_epoch": 12, "mid_window": 14}  # micro-batches of 18 an epoch


class Augmented(Dataset[Any]):
    """Sines with noise from python's, numpy's and torch's generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        clean = torch.sin(torch.arange(16) * (1 + i % 3))[None]
        return clean + random.random() * 0.1 + float(np.random.rand()) * 0.1 + torch.rand(1, 16) * 0.1, i % 3  # noqa: NPY002


def model() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                         nn.Linear(112, 3))  # fmt: skip


class Recorder:
    """Writes the loss of every micro-batch as it happens, and kills the process at one of them."""

    def __init__(self, path: Path, kill_at: int) -> None:
        self.path, self.kill_at, self.calls = path, kill_at, 0

    def __call__(self, number: int, loss: Tensor) -> None:
        with self.path.open("a") as file:
            file.write(f"{number} {loss.item().hex()}\n")
        self.calls += 1
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def layerline(folder: Path, workers: int, record: Recorder) -> None:
    from layerline import ModelOptimizer
    from layerline.training.data.batches import Batches
    from layerline.training.randomness import rng_state
    from layerline.training.state import checkpoint

    rng_state.seed_all(0)
    net = model()
    mo = ModelOptimizer(net, {"optimizer": {"lr": 1e-3}, "training": {"accumulate_steps": ACCUMULATE}})
    batches = Batches(Augmented(), batch_size=BATCH, seed=0, workers=workers)
    mo.register("data", batches)
    if checkpoint.rotation(folder / "c"):
        mo.load_ckpt(folder / "c")
    stream = batches.forever()
    while batches.epoch < EPOCHS:
        number = batches.epoch * -(-SAMPLES // BATCH) + batches.position
        x, y = next(stream)
        loss = F.cross_entropy(net(x), y)
        mo.step(loss * len(x), weight=len(x))
        if batches.position == 0:
            mo.flush()
        mo.save_ckpt(folder / "c")
        record(number, loss)


def by_hand(folder: Path, workers: int, record: Recorder) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    path, start_epoch, start = folder / "c.pt", 0, 0
    if path.is_file():
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start_epoch, start = state["epoch"], state["position"]
    per_epoch = -(-SAMPLES // BATCH)
    for epoch in range(start_epoch, EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for i, (x, y) in enumerate(DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers, generator=order)):
            if epoch == start_epoch and i < start:
                continue
            loss = F.cross_entropy(net(x), y)
            (loss / ACCUMULATE).backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == per_epoch:
                optimizer.step()
                optimizer.zero_grad()
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
                     "epoch": epoch, "position": i + 1}  # fmt: skip
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
            record(epoch * per_epoch + i, loss)


def accelerate(folder: Path, workers: int, record: Recorder) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dataloader_config=loading)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers, generator=generator)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)
    place, start_epoch, start = folder / "place", 0, 0
    if place.is_file():
        name, start_epoch, start = (int(v) for v in place.read_text().split())
        accelerator.load_state(str(folder / f"s{name}"))
    per_epoch = -(-SAMPLES // BATCH)
    for epoch in range(start_epoch, EPOCHS):
        loader.set_epoch(epoch)
        skip = start if epoch == start_epoch else 0
        for i, (x, y) in enumerate(accelerator.skip_first_batches(loader, skip) if skip else loader, skip):
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            number = epoch * per_epoch + i
            accelerator.save_state(str(folder / f"s{number}"))
            place.with_suffix(".tmp").write_text(f"{number} {epoch} {i + 1}")
            place.with_suffix(".tmp").replace(place)
            record(number, loss)


CONTENDERS = {"layerline": layerline, "by_hand": by_hand} | (
    {"accelerate": accelerate} if find_spec("accelerate") else {}
)


def losses(who: str, folder: Path, workers: int, kill_at: int) -> dict[int, str]:
    """The loss of every micro-batch; started again after the kill, where there is one."""
    for strike in (kill_at, 0) if kill_at else (0,):
        command = [sys.executable, __file__, who, str(folder), str(workers), str(strike)]
        code = subprocess.run(command, check=False, capture_output=True).returncode
        assert code == (-signal.SIGKILL if strike else 0), f"{who} ended with {code}"
    return {int(n): v for n, v in (line.split() for line in (folder / "losses").read_text().splitlines())}


def first_difference(who: str, workers: int, kill_at: int, straight: dict[int, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        resumed = losses(who, Path(folder), workers, kill_at)
    return next((f"micro-batch {n}" for n in straight if resumed.get(n) != straight[n]), "none")


def main() -> None:
    if len(sys.argv) > 1:
        who, folder, workers, strike = sys.argv[1:]
        torch.set_num_threads(1)
        CONTENDERS[who](Path(folder), int(workers), Recorder(Path(folder) / "losses", int(strike)))
        return
    result: dict[str, dict[str, str]] = {}
    for who in CONTENDERS:
        result[who] = {}
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                straight = losses(who, Path(folder), workers, 0)
            for where, kill_at in KILLS.items():
                result[who][f"{where}_{workers}_workers"] = first_difference(who, workers, kill_at, straight)
                print(who, where, workers, result[who][f"{where}_{workers}_workers"])
    print(json.dumps({"benchmark": "resume", "first_differing": result}))


if __name__ == "__main__":
    main()
