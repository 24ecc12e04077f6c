"""The run of the `train` stage in the form that `prove` needs: built from plain data, one optimizer step per call.

It runs the stage's own code, so that the proof holds for `pipe run train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from layerline.pipeline.task import Task
from layerline.training.config.sections import Config
from layerline.training.distributed import rendezvous
from layerline.training.model_optimizer import ModelOptimizer
from layerline.training.run import train_loop

Step = Callable[[], dict[str, Tensor]]


def make(*, task: str, config: Mapping[str, Any], device: str, **fields: Any) -> tuple[ModelOptimizer, Step,
                                                                                       Callable[[], int]]:  # fmt: skip
    """(ModelOptimizer, a function that makes one optimizer step, one that returns how many are left).

    A step returns the batches it used. It ends in the middle of the next accumulation window, so that the proof's
    checkpoint lies in an open window, as the stage's own checkpoints may.

    Args:
        task: path of the task file.
        config: ModelOptimizer's configuration.
        device: "cpu" or "cuda".
        fields: the stage's epochs, steps, batch_size, seed and workers.
    """
    with train_loop.deterministic():
        run = train_loop.prepare(
            Task(Path(task)), Config.model_validate(config), device=rendezvous.device(device), **fields
        )
    stream = run.batches.forever()
    half = run.mo.config.accumulate.steps // 2

    def left() -> int:
        return run.total - run.attempted

    def step() -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        before = run.attempted
        with train_loop.deterministic():
            while run.attempted == before or (run.lane.window.micro < half and left() and not _ends_epoch(run)):
                place = f"data/epoch {run.batches.epoch}/batch {run.batches.position}"
                inputs |= dict(_tensors(train_loop.one_batch(run, stream), place))
        return inputs

    return run.mo, step, left


def _ends_epoch(run: train_loop.Run) -> bool:
    """Whether the next batch may be the epoch's last one, which ends a window early."""
    return run.batches.per_epoch is None or run.batches.position + 1 == run.batches.per_epoch


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{name}/{key}")
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{name}/{i}")
