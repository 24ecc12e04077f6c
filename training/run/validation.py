"""Computes the task's metric of a model on its evaluation data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import LABELS, described, mapped, split
from layerline.pipeline.inputs.metric import Array, accuracy, joined, score
from layerline.pipeline.task import Task
from layerline.training.data.batches import Batches, to_device
from layerline.training.data.golden_outputs import named_outputs


def evaluation_batches(task: Task, batch_size: int) -> Batches:
    """The batches of eval_data(), which is called once and iterated anew at each validation."""
    return Batches(task.call("eval_data"), batch_size=batch_size, seed=None, hook="eval_data")


def metric_of(task: Task, model: nn.Module, batches: Batches, *, device: torch.device) -> dict[str, float]:
    """The metric by name (`metric`, where the hook returns one number). The model stays in its present mode. The hook
    gets an array where the model returns one tensor, and otherwise a tuple of arrays, as for a built model."""
    batches.load_state_dict({"epoch": 0, "position": 0})
    outputs: list[Any] = []
    targets: list[Any] = []
    with torch.no_grad():
        for batch in _drawn(task, batches):
            args, kwargs, target = split(to_device(batch, device), model.forward)
            targets.append(_target(target))
            with task.blaming("the model", on=lambda batch=batch: described(batch)):  # type: ignore[misc]
                out = model(*args, **kwargs)
            outputs.append([_array(v) for v in named_outputs(out).values()])
    # One list a model output, over all batches.
    parts = [joined(list(of_batches), "outputs") for of_batches in zip(*outputs, strict=True)]
    metric = accuracy
    if task.has("metric"):
        metric = task.get("metric")
    predictions: Any = tuple(parts)
    if len(parts) == 1:
        (predictions,) = parts
    return score(metric, predictions, joined(targets, "targets"))


def _drawn(task: Task, batches: Batches) -> Iterator[Any]:
    stream = batches.one_epoch()
    while True:
        with task.blaming("drawing a batch of eval_data()"):
            batch = next(stream, None)
        if batch is None:
            return
        yield batch


def _target(target: Any) -> Any:
    """The target as arrays, in its tuples and dicts."""
    hint = f"give batches (x, y), or a dict with one of {', '.join(LABELS)}"
    if target is None:
        raise TaskError("a batch has no label", where="eval_data", hint=hint)

    def array(leaf: Any) -> Array:
        if not isinstance(leaf, Tensor):
            raise TaskError(f"the label of a batch is no tensor, but {type(leaf).__name__}", where="eval_data",
                            hint=hint)  # fmt: skip
        return _array(leaf)

    return mapped(target, array)


def _array(value: Tensor) -> Array:
    if value.is_floating_point():
        value = value.float()  # numpy has no bfloat16
    return np.atleast_1d(value.cpu().numpy())
