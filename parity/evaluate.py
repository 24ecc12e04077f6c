"""Runs several models over evaluation data in one pass, and joins their outputs for the task's metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerline.backends.base import Array, Session
from layerline.calib.samples import Batch
from layerline.pipeline.inputs.metric import Metric, joined
from layerline.pipeline.task import Task

# Samples a run, where eval_data() does not come in batches.
BATCH = 16


def own_metric(task: Task) -> Metric | None:
    """The task's metric(); None where it has none."""
    if not task.has("metric"):
        return None
    return task.get("metric")


@dataclass(frozen=True, eq=False)
class Predictions:
    """The outputs of models for the same samples."""

    # By the caller's name of the model: an array, or a tuple of arrays, joined along the first axis.
    outputs: dict[str, Array | tuple[Array, ...]]
    targets: Any  # joined likewise, in the tuples and dicts that the data has them in; None where it has none
    slices: Array | None = None  # the part of the data that each sample belongs to; None where the data does not say


def predict(
    sessions: Mapping[str, Session],
    batches: Iterable[Batch],
    watch: Callable[[Batch, Mapping[str, Sequence[Array]]], None] | None = None,
) -> Predictions:
    """Runs every session on every batch.

    Args:
        watch: called with each batch and the outputs of every session for it.

    Raises:
        TaskError: outputs or targets that cannot be joined.
    """
    # By model and batch, one array an output.
    outputs: dict[str, list[list[Array]]] = {name: [] for name in sessions}
    targets: list[Any] = []
    slices: list[Array] = []
    for batch in batches:
        if batch.target is not None:
            targets.append(batch.target)
        if batch.slices is not None:
            slices.append(batch.slices)
        for name, session in sessions.items():
            results = session.run(batch.feed)
            outputs[name].append([batch.real(results[output]) for output in session.outputs])
        if watch is not None:
            watch(batch, {name: by_batch[-1] for name, by_batch in outputs.items()})
    all_outputs = {name: _joined_outputs(by_batch) for name, by_batch in outputs.items()}
    all_targets: Any = None
    if targets:
        all_targets = joined(targets, "targets")
    all_slices = None
    if slices:
        all_slices = joined(slices, "slices")
    return Predictions(outputs=all_outputs, targets=all_targets, slices=all_slices)


def _joined_outputs(by_batch: list[list[Array]]) -> Array | tuple[Array, ...]:
    """Each output joined over the batches; a single output comes without a tuple."""
    parts: list[Array] = [joined(list(arrays), "outputs") for arrays in zip(*by_batch, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return tuple(parts)
