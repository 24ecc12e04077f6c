"""The task's metric: what it is given and what it may give, the same while training and after every later stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import collate
from layerline.pipeline.outline import outlined

Array = npt.NDArray[Any]
Metric = Callable[[Any, Any], Any]


def score(metric: Metric, outputs: Any, targets: Any) -> dict[str, float]:
    """The metric by name; one without a name is called "metric". Raises TaskError: it is no number.

    `outputs` is an array, or a tuple of arrays where the model returns several; `targets` are as the data has them.
    """
    # The border to the user's code: anything may come back.
    value = metric(outputs, targets)
    named = value
    if not isinstance(value, Mapping):
        named = {"metric": value}
    try:
        return {str(k): float(v) for k, v in named.items()}
    except (TypeError, ValueError) as error:
        raise TaskError(f"metric() gave {value!r}, expected a number or numbers by name", where="metric") from error


def accuracy(outputs: Any, targets: Any) -> dict[str, float]:
    """The default metric: the share of right classes, the greatest output along the class axis being the answer."""
    scores = outputs[0] if isinstance(outputs, tuple) else outputs
    hint = "define metric(outputs, targets)"
    if not isinstance(targets, np.ndarray):
        raise TaskError(f"targets {outlined(targets)} are no array of classes, so there is no accuracy", hint=hint)
    if not np.issubdtype(targets.dtype, np.integer):
        raise TaskError(f"targets of type {targets.dtype} are no classes, so there is no accuracy", hint=hint)
    # Classes come last in most models, and behind the batch in segmentation: (n, classes, h, w).
    for axis in (-1, 1):
        if scores.ndim == targets.ndim + 1 and np.delete(scores.shape, axis).tolist() == list(targets.shape):
            if targets.size and (targets.min() < 0 or targets.max() >= scores.shape[axis]):
                raise TaskError(f"targets from {targets.min()} to {targets.max()} and {scores.shape[axis]} classes: "
                                "some target is none of them", hint=f"count classes from 0, or {hint}")  # fmt: skip
            return {"accuracy": float((scores.argmax(axis) == targets).mean())}
    raise TaskError(f"outputs {scores.shape} and targets {targets.shape} do not make an accuracy", hint=hint)


def scores(metric: Metric | None, outputs: Mapping[str, Any], targets: Any) -> tuple[dict[str, dict[str, float]], str]:
    """The metric of several models' outputs by model, and why there are none; empty where there are.

    A task without metric() has accuracy, which fits classifiers alone.
    """
    try:
        return {name: score(metric or accuracy, each, targets) for name, each in outputs.items()}, ""
    except TaskError as error:
        if metric is not None:
            raise
        return {}, f"the task has no metric(), and {error.what}"


def joined(parts: Sequence[Any], what: str) -> Any:
    """What several batches gave, joined along the first axis: arrays, also in tuples and dicts of one structure."""
    try:
        return collate(parts, lambda arrays: np.concatenate([np.atleast_1d(a) for a in arrays]))
    except (ValueError, KeyError, TypeError) as error:
        shapes = dict.fromkeys(str(p.shape) if isinstance(p, np.ndarray) else outlined(p) for p in parts)
        raise TaskError(
            f"the {what} of different batches cannot be joined: shapes {', '.join(sorted(shapes))}",
            where="eval_data",
            hint="give batches that differ along the first axis alone",
        ) from error
