"""Saving and loading everything a run needs: Layerline's one file against torch.save of the same state.

    python benchmarks/checkpoint.py [--mib 256]

The state is a model, its AdamW moments and its EMA. Layerline writes atomically with a checksum and fsync; torch.save
is measured as it is, and once more with the fsync and rename that make it as safe. Both load a file that is on disk by
then (what an unsynced save still has to write is otherwise charged to whoever comes next), once from the page cache and
once with it emptied of the file. Rounds are interleaved; figures are medians. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerline import ModelOptimizer

ROUNDS = 7


def trained(mib: int) -> tuple[nn.Module, ModelOptimizer]:
    """A model whose weights, moments and average take about `mib` MiB together."""
    torch.manual_seed(0)
    layers = max(round(mib / 4), 1)  # a 512x512 layer is 1 MiB, four times over
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.999}})
    mo.step(model(torch.randn(4, 512)).square().mean())
    return model, mo


def torch_state(mo: ModelOptimizer) -> dict[str, Any]:
    lane = mo.lanes[""]
    assert lane.ema is not None
    return {"model": lane.model.state_dict(), "optimizer": lane.optimizer.state_dict(), "ema": lane.ema.values(),
            "rng": torch.get_rng_state(), "step": lane.steps}  # fmt: skip


def save_safely(state: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_torch(mo: ModelOptimizer, path: Path) -> None:
    lane = mo.lanes[""]
    state = torch.load(path, weights_only=True)
    lane.model.load_state_dict(state["model"])
    lane.optimizer.load_state_dict(state["optimizer"])
    assert lane.ema is not None
    lane.ema.load(state["ema"], 1)


def forget(*paths: Path) -> None:
    """Puts files on disk and out of the page cache."""
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(calls: dict[str, Callable[[], object]], before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Median seconds of each call; `before` runs ahead of each and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            before()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {f"{n}_s": round(statistics.median(v), 4) for n, v in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    _, mo = trained(parser.parse_args().mib)
    parameters = sum(p.numel() for p in mo.lanes[""].params)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, safe = (Path(folder) / n for n in ("a.safetensors", "a.pt", "b.pt"))
        saves: dict[str, Callable[[], object]] = {
            "save": lambda: mo.save_ckpt(ours),
            "torch_save": lambda: torch.save(torch_state(mo), theirs),
            "torch_save_fsync": lambda: save_safely(torch_state(mo), safe),
        }
        loads: dict[str, Callable[[], object]] = {
            "load": lambda: mo.load_ckpt(ours),
            "torch_load": lambda: load_torch(mo, safe),
        }
        seconds = measure(saves)
        theirs.unlink()
        seconds |= measure(loads)
        seconds |= {f"cold_{n}": s for n, s in measure(loads, lambda: forget(ours, safe)).items()}
        sizes = {"bytes_per_parameter": ours.stat().st_size / parameters,
                 "torch_bytes_per_parameter": safe.stat().st_size / parameters}  # fmt: skip
    result = {"benchmark": "checkpoint", "parameters": parameters, **{n: round(v, 3) for n, v in sizes.items()},
              **seconds, "save_ratio": round(seconds["save_s"] / seconds["torch_save_fsync_s"], 3),
              "load_ratio": round(seconds["load_s"] / seconds["torch_load_s"], 3),
              "cold_load_ratio": round(seconds["cold_load_s"] / seconds["cold_torch_load_s"], 3)}  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
