"""How certain the loss of a metric is: an interval from the same samples, seen by the float and the converted model.

- A metric that is the mean of its values on single samples: the paired bootstrap of these values.
- The same where every value is 0 or 1, as in an accuracy: McNemar's exact test, and the interval of D. Bonett and
  R. Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data" (2012),
  which has a width where no sample changed, too.
- Any other metric (F1, AUC, a median): the jackknife over 20 groups of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import leaves, mapped
from layerline.pipeline.inputs.metric import Metric, score

# Up to this many samples the metric is called on each; of more samples, on as many groups.
SINGLE = 2000
GROUPS = 20
DRAWS = 2000
NORMAL_95 = 1.959964
STUDENT_95 = 2.093024  # 19 degrees of freedom
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MetricInterval:
    """The 95 % interval of before - after, for one metric."""

    # Its ends, in the metric's units.
    low: float
    high: float
    method: str  # "McNemar", "bootstrap" or "jackknife"
    p_value: float | None = None  # of the hypothesis that neither model is better; of McNemar's test alone
    # The metric of each sample, or of each group of samples; empty for the jackknife.
    before: Numbers
    after: Numbers
    single: bool = False  # whether `before` and `after` are of single samples


def intervals(
    metric: Metric, before: Any, after: Any, targets: Any, totals: tuple[Mapping[str, float], Mapping[str, float]]
) -> tuple[dict[str, MetricInterval], str]:
    """The interval of every metric, and a sentence where there are none."""
    lengths = {np.shape(array)[:1] for array in leaves([before, after, targets])}
    if len(lengths) != 1 or lengths == {()}:
        return {}, "outputs and targets do not have one row a sample"
    samples = lengths.pop()[0]
    try:
        again = score(metric, after, targets)
        if not all(math.isfinite(value) for scores in (*totals, again) for value in scores.values()):
            return {}, "metric() gives NaN or Inf"
        # A metric that draws at random has no interval.
        if again != totals[1]:
            return {}, "metric() gives other numbers each time"
    except TaskError as error:
        return {}, error.what
    # Every SINGLE-th sample is a group, so that data in order of class is spread over all groups.
    groups = [np.arange(start, samples, SINGLE) for start in range(min(samples, SINGLE))]
    rows = _on_each(metric, (before, after), targets, groups)
    sizes = np.array([len(group) for group in groups], np.float64)
    result: dict[str, MetricInterval] = {}
    others: list[str] = []
    for name in totals[0]:
        if name in rows and _is_mean(rows[name], sizes, (totals[0][name], totals[1][name])):
            result[name] = _of_rows(*rows[name], sizes)
        else:
            others.append(name)
    if not others:
        return result, ""
    if samples < GROUPS:
        return result, f"{', '.join(others)} is no mean over samples, and {samples} samples are too few to resample"
    everything = np.arange(samples)
    all_but_one = [everything[everything % GROUPS != group] for group in range(GROUPS)]
    without_one = _on_each(metric, (before, after), targets, all_but_one)
    for name in others:
        if name in without_one:
            result[name] = _jackknife(*without_one[name], totals[0][name] - totals[1][name])
    missing = ", ".join(name for name in others if name not in result)
    if missing:
        return result, f"metric() gives no {missing} for a part of the samples"
    return result, ""


def _on_each(
    metric: Metric, outputs: tuple[Any, Any], targets: Any, groups: list[npt.NDArray[np.int64]]
) -> dict[str, tuple[Numbers, Numbers]]:
    """The metrics of both models on each group of samples; empty where the metric does not take such groups."""
    sides: list[list[dict[str, float]]] = [[], []]
    for group in groups:
        part_of_targets = rows_of(targets, group)
        for side, output in zip(sides, outputs, strict=True):
            try:
                side.append(score(metric, rows_of(output, group), part_of_targets))
            except TaskError:
                return {}
    columns: dict[str, tuple[Numbers, Numbers]] = {}
    for name in sides[0][0]:
        if all(name in scores for scores in (*sides[0], *sides[1])):
            before = np.array([scores[name] for scores in sides[0]])
            after = np.array([scores[name] for scores in sides[1]])
            columns[name] = (before, after)
    return columns


def rows_of(tree: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Some samples of outputs or targets."""
    return mapped(tree, lambda array: array[rows])


def _is_mean(rows: tuple[Numbers, Numbers], sizes: Numbers, totals: tuple[float, float]) -> bool:
    """Whether both totals are the mean of the values on the groups."""
    for values, total in zip(rows, totals, strict=True):
        if not math.isclose(float(values @ sizes / sizes.sum()), total, rel_tol=1e-5, abs_tol=1e-9):
            return False
    return True


def _of_rows(before: Numbers, after: Numbers, sizes: Numbers) -> MetricInterval:
    single = bool((sizes == 1).all())
    if single and np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all():
        return _mcnemar(before, after)
    # The same samples give the same interval.
    rng = np.random.default_rng(0)
    losses = before - after
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        chosen = rng.integers(0, sizes.size, sizes.size)
        means[draw] = losses[chosen] @ sizes[chosen] / sizes[chosen].sum()
    low, high = np.percentile(means, (2.5, 97.5))
    return MetricInterval(
        low=float(low), high=float(high), method="bootstrap", before=before, after=after, single=single
    )


def _mcnemar(before: Numbers, after: Numbers) -> MetricInterval:
    worse = int(np.sum((before == 1) & (after == 0)))
    better = int(np.sum((before == 0) & (after == 1)))
    changed = worse + better
    tail = sum(math.comb(changed, k) for k in range(min(worse, better) + 1))
    p_value = min(1.0, 2 * tail / 2**changed)
    # Two pseudo-observations: the adjustment of the paper.
    samples = before.size + 2
    share_worse, share_better = (worse + 1) / samples, (better + 1) / samples
    centre = share_worse - share_better
    width = NORMAL_95 * math.sqrt((share_worse + share_better - centre**2) / samples)
    return MetricInterval(
        low=max(-1.0, centre - width),
        high=min(1.0, centre + width),
        method="McNemar",
        p_value=p_value,
        before=before,
        after=after,
        single=True,
    )


def _jackknife(before: Numbers, after: Numbers, loss: float) -> MetricInterval:
    """Of the values without one group each."""
    losses = before - after
    spread = losses - losses.mean()
    error = math.sqrt((GROUPS - 1) / GROUPS * float(spread @ spread))
    none = np.zeros(0)
    width = STUDENT_95 * error
    return MetricInterval(low=loss - width, high=loss + width, method="jackknife", before=none, after=none)
