"""The task's metric of a model over its evaluation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task
from layerline.training.data import Batches, split, to_device
from layerline.training.loss import default_metric, first_output


def metric_of(task: Task, model: nn.Module, *, batch_size: int, device: torch.device) -> dict[str, float]:
    """The metric by name (`metric`, where the hook returns one number); `model` is used in the mode it is in.

    Raises:
        TaskError: no evaluation data, or the metric is no number.
    """
    batches = Batches(task.call("eval_data"), batch_size=batch_size, seed=None, hook="eval_data")
    outputs: list[Any] = []
    targets: list[Any] = []
    with torch.no_grad():
        for batch in batches.one_epoch():
            args, kwargs, target = split(to_device(batch, device))
            outputs.append(_arrays(model(*args, **kwargs)))
            targets.append(target.cpu().numpy())
    joined = tuple(np.concatenate(parts) for parts in zip(*outputs, strict=True))
    measure = task.get("metric") if task.has("metric") else default_metric
    value = measure(joined[0] if len(joined) == 1 else joined, np.concatenate(targets))
    named = value if isinstance(value, Mapping) else {"metric": value}
    try:
        return {str(k): float(v) for k, v in named.items()}
    except (TypeError, ValueError) as error:
        raise TaskError(f"metric() gave {value!r}, expected a number or numbers by name", where="metric") from error


def _arrays(out: Any) -> tuple[np.ndarray[Any, Any], ...]:
    values = out if isinstance(out, tuple | list) and all(isinstance(o, Tensor) for o in out) else (first_output(out),)
    return tuple(v.float().cpu().numpy() if v.is_floating_point() else v.cpu().numpy() for v in values)
