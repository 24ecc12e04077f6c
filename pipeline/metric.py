"""The task's metric: what it is given and what it may give, the same while training and after every later stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError

Array = npt.NDArray[Any]
Metric = Callable[[Any, Any], Any]


def score(metric: Metric, outputs: Any, targets: Array) -> dict[str, float]:
    """The metric by name; one without a name is called "metric".

    Raises:
        TaskError: it is no number.
    """
    value = metric(outputs, targets)
    named = value if isinstance(value, Mapping) else {"metric": value}
    try:
        return {str(k): float(v) for k, v in named.items()}
    except (TypeError, ValueError) as error:
        raise TaskError(f"metric() gave {value!r}, expected a number or numbers by name", where="metric") from error


def accuracy(outputs: Any, targets: Array) -> dict[str, float]:
    """The default metric: the share of right classes, the greatest output along the class axis being the answer.

    Raises:
        TaskError: targets that are no classes or none of the model's, or shapes that leave the class axis open.
    """
    scores = outputs[0] if isinstance(outputs, tuple) else outputs
    hint = "define metric(outputs, targets)"
    if not np.issubdtype(targets.dtype, np.integer):
        raise TaskError(f"targets of type {targets.dtype} are no classes, so there is no accuracy", hint=hint)
    for axis in (-1, 1):
        if scores.ndim == targets.ndim + 1 and np.delete(scores.shape, axis).tolist() == list(targets.shape):
            if targets.size and (targets.min() < 0 or targets.max() >= scores.shape[axis]):
                raise TaskError(f"targets from {targets.min()} to {targets.max()} and {scores.shape[axis]} classes: "
                                "some target is none of them", hint=f"count classes from 0, or {hint}")  # fmt: skip
            return {"accuracy": float((scores.argmax(axis) == targets).mean())}
    raise TaskError(f"outputs {scores.shape} and targets {targets.shape} do not make an accuracy", hint=hint)


def joined(parts: list[Array], what: str) -> Array:
    """What several batches gave, along the first axis.

    Raises:
        TaskError: shapes that differ along another axis.
    """
    try:
        return np.concatenate([np.atleast_1d(p) for p in parts])
    except ValueError as error:
        raise TaskError(
            f"the {what} of different batches cannot be joined: shapes {sorted({p.shape for p in parts})}",
            where="eval_data",
            hint="give batches that differ along the first axis alone",
        ) from error
