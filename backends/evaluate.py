"""The task's metric of loaded models over its evaluation data: one pass over the data for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from layerline.backends.base import Array, Session
from layerline.pipeline.errors import TaskError

Metric = Callable[[Any, Any], Any]


class Batch(Protocol):
    """What one run is fed with and what its outputs should be; `real` takes off the rows that are no samples."""

    @property
    def feed(self) -> Mapping[str, Array]: ...
    @property
    def target(self) -> Array | None: ...
    def real(self, array: Array, /) -> Array: ...


@dataclass(frozen=True, eq=False)
class Predictions:
    """What models gave for the same samples.

    Attributes:
        outputs: by the caller's name of the model: an array, or a tuple of arrays, joined along the first axis.
        targets: joined likewise; None where the data has none.
    """

    outputs: dict[str, Array | tuple[Array, ...]]
    targets: Array | None


def predict(sessions: Mapping[str, Session], batches: Iterable[Batch]) -> Predictions:
    """Runs every session on every batch.

    Raises:
        TaskError: outputs or targets that cannot be joined.
    """
    outputs: dict[str, list[list[Array]]] = {name: [] for name in sessions}
    targets: list[Array] = []
    for batch in batches:
        if batch.target is not None:
            targets.append(batch.target)
        for name, session in sessions.items():
            found = session.run(batch.feed)
            outputs[name].append([batch.real(found[o]) for o in session.outputs])
    joined = {name: tuple(_joined(list(p), "outputs") for p in zip(*o, strict=True)) for name, o in outputs.items()}
    return Predictions(
        outputs={name: parts[0] if len(parts) == 1 else parts for name, parts in joined.items()},
        targets=_joined(targets, "targets") if targets else None,
    )


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
        TaskError: targets that are no classes, or shapes that leave the class axis open.
    """
    scores = outputs[0] if isinstance(outputs, tuple) else outputs
    hint = "define metric(outputs, targets)"
    if not np.issubdtype(targets.dtype, np.integer):
        raise TaskError(f"targets of type {targets.dtype} are no classes, so there is no accuracy", hint=hint)
    for axis in (-1, 1):
        if scores.ndim == targets.ndim + 1 and np.delete(scores.shape, axis).tolist() == list(targets.shape):
            return {"accuracy": float((scores.argmax(axis) == targets).mean())}
    raise TaskError(f"outputs {scores.shape} and targets {targets.shape} do not make an accuracy", hint=hint)


def _joined(parts: list[Array], what: str) -> Array:
    try:
        return np.concatenate([np.atleast_1d(p) for p in parts])
    except ValueError as error:
        raise TaskError(
            f"the {what} of different batches cannot be joined: shapes {sorted({p.shape for p in parts})}",
            where="eval_data",
            hint="give batches that differ along the first axis alone",
        ) from error
