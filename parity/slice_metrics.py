"""Metrics by slice of the data or by class, before and after, and the samples whose answer flipped.

A mean that holds may hide a rare class that is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from layerline.parity.evaluate import Predictions
from layerline.parity.paired_metric import MetricInterval, rows_of
from layerline.pipeline.config.budgets import Budget, usual
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.metric import Metric, score
from layerline.pipeline.report import Row

# Of more slices, the metric is not computed for each.
MOST_SLICES = 1000
MOST_FLIPPED = 1000


def by_slice(metric: Metric, predictions: Predictions, budgets: Mapping[str, Budget]) -> tuple[list[Row], str]:
    """The metrics of both models on each slice, those that lost most first, and a sentence about what is left out.

    Args:
        budgets: say in which direction a metric is a loss; without one, its name does.
    """
    slices = _slices(predictions)
    if slices is None:
        return [], ""
    names = np.unique(slices)
    if len(names) > MOST_SLICES:
        return [], f"{len(names)} slices are too many for a metric of each"
    losses: list[tuple[float, Row]] = []
    left_out = 0
    for name in names.tolist():
        chosen = np.flatnonzero(slices == name)
        targets = rows_of(predictions.targets, chosen)
        try:
            before = score(metric, rows_of(predictions.outputs["float"], chosen), targets)
            after = score(metric, rows_of(predictions.outputs["result"], chosen), targets)
        except TaskError:  # such as an AUC of one class
            left_out += 1
            continue
        # A metric may leave figures out for a slice, such as the recall of a class that is not there.
        for each in [name for name in after if name in before]:
            loss = budgets.get(each, usual(each, 0.0)).loss(before[each], after[each])
            row: Row = {"slice": name, "samples": chosen.size, "metric": each}
            row |= {"float": before[each], "converted": after[each], "change": after[each] - before[each]}
            losses.append((loss, row))
    losses.sort(key=lambda item: (-item[0], str(item[1]["metric"])))
    sentence = ""
    if left_out:
        sentence = f"metric() gives nothing for {left_out} of {len(names)} slices"
    return [row for _, row in losses], sentence


def flipped(intervals: Mapping[str, MetricInterval], predictions: Predictions) -> tuple[list[Row], str]:
    """The samples that became wrong, then those that became right, by their number in eval_data().

    Of metrics that are 0 or 1 for each sample. The sentence says how many rows were left out.
    """
    slices = _slices(predictions)
    rows: list[Row] = []
    for name, interval in intervals.items():
        if interval.method != "McNemar":
            continue
        # -1 for a sample that became wrong, 1 for one that became right.
        change = interval.after - interval.before
        for index in sorted(np.flatnonzero(change).tolist(), key=lambda i: (change[i], i)):
            row: Row = {"sample": index, "metric": name, "became": "wrong"}
            if change[index] > 0:
                row["became"] = "right"
            if slices is not None:
                row["slice"] = slices[index].item()
            rows.append(row)
    if len(rows) > MOST_FLIPPED:
        return rows[:MOST_FLIPPED], f"{MOST_FLIPPED} of {len(rows)} flipped answers are listed"
    return rows, ""


def _slices(predictions: Predictions) -> Any:
    """One slice a sample: what the data says, else the class; None where there is neither."""
    slices = predictions.slices
    if slices is None:
        targets = predictions.targets
        if not isinstance(targets, np.ndarray) or not np.issubdtype(targets.dtype, np.integer):
            return None
        slices = targets
    outputs = predictions.outputs["result"]
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    if slices.shape != (len(outputs),):
        return None
    return slices
