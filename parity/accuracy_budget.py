"""The user's metric of the float and the converted model on the same samples, and the gate on what it may lose.

The loss is judged by its point estimate on eval_data(): it must be at most the budget. Its 95 % interval stands beside
it, so that a loss within the noise can be recognised as such.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.samples import Batch
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.parity import evaluate, flipped_samples
from layerline.parity.evaluate import Predictions, own_metric
from layerline.parity.paired_metric import MetricInterval, intervals
from layerline.parity.slice_metrics import by_slice, flipped
from layerline.pipeline.config.budgets import Budget, MaxDrop, by_metric, refuse_unmeasured
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import leaves, mapped
from layerline.pipeline.inputs.metric import Metric, accuracy, score, scores
from layerline.pipeline.report import FLIPPED, GAIN, NO_METRIC, OWN, UNMEASURED, Gate, LayerDiff, Order, Report, Scalar

MetricValues = Mapping[str, float]
# Fewer dB than this are not worth a layer in float where accuracy was lost.
LITTLE = 1.0
# A search evaluates a quarter of the samples before all of them, if that is at least so many.
FIRST_SHARE, LEAST_FIRST = 4, 16
# A budget above this part of the metric is worth a note: it may be meant in per cent.
LARGE = 0.2


@dataclass(frozen=True, eq=False)
class MetricPair:
    """The metric of both models, and what it was computed from."""

    before: MetricValues
    after: MetricValues
    predictions: Predictions


class Evaluation:
    """Measures converted models on eval_data(). The float model runs once.

    Attributes:
        runs: how many converted models ran over all of eval_data().
        why: why there is no metric; empty where there is one.
    """

    def __init__(self, data: CalibrationData) -> None:
        self.runs = 0
        self.why = ""
        self._data = data
        self._float: Predictions | None = None
        self._samples = b""
        self._own_metric = own_metric(data.task)
        self.metric: Metric = self._own_metric or accuracy
        self._last: tuple[ir.Model, MetricPair] | None = None
        self._held: tuple[ir.Model, MetricPair] | None = None

    def measure(self, converted: Converted) -> MetricPair | None:
        """The metric of the float and of the converted model; None where there is none, and `why` says the reason.

        Raises:
            TaskError: metric() failed, or eval_data() gives other samples than before.
        """
        # A search judges the same model more than once: before, as the best so far, and at the end.
        for earlier in (self._last, self._held):
            if earlier is not None and earlier[0] is converted.measured:
                return earlier[1]
        predictions = self._predict(converted)
        if predictions is None:
            return None
        by_model, self.why = scores(self._own_metric, predictions.outputs, predictions.targets)
        if self.why:
            return None
        before, after = by_model["float"], by_model["result"]
        # A metric that names its figures by what it sees cannot be compared.
        if before.keys() != after.keys():
            differing = ", ".join(sorted(before.keys() ^ after.keys()))
            raise TaskError(
                f"it gives {differing} for one of the float and the converted model alone",
                where="metric",
                hint="give the same names whatever the outputs are",
            )
        measured = MetricPair(before, after, predictions)
        self._last = converted.measured, measured
        return measured

    def hopeless(self, converted: Converted, max_drop: MaxDrop) -> MetricPair | None:
        """The metric on the first samples, if these alone lose more than the budget allows on all.

        For a metric that is a mean over samples, the others can't make up for it: they lose nothing at best. None where
        the first samples say nothing, or where the float model was not measured yet.
        """
        samples = self._data.evaluation()
        if self._float is None or self.why or samples is None:
            return None
        total = _count(self._float.targets)
        first: list[Batch] = []
        rows = 0
        for batch in samples:
            first.append(batch)
            rows += _count(batch.target)
            if FIRST_SHARE * rows >= total:
                break
        # Few samples say little, and of half of them the other half costs no more.
        if rows < LEAST_FIRST or 2 * rows > total:
            return None
        exact = self._float.outputs["float"]
        if any(len(array) != total for array in leaves(exact)):
            return None
        # The float model's answers for these samples are known already.
        predictions = evaluate.predict({"result": OnnxRuntime().open(converted.measured)}, first)
        outputs = {"float": mapped(exact, lambda array: array[:rows]), **predictions.outputs}
        try:
            by_model, why = scores(self._own_metric, outputs, predictions.targets)
        except TaskError:  # a metric over classes may take more samples
            return None
        if why or by_model["float"].keys() != by_model["result"].keys():
            return None
        measured = MetricPair(by_model["float"], by_model["result"], predictions)
        for name, budget in by_metric(max_drop, measured.after).items():
            lost = budget.loss(measured.before[name], measured.after[name]) * rows / total
            if lost > budget.allowed(measured.before[name]):
                return measured
        return None

    def refuse_unknown(self, model: ir.Model, max_drop: MaxDrop | None) -> None:
        """Refuses a budget without eval_data(), or for a metric that metric() does not give for its first batch."""
        refuse_unmeasured(max_drop, has_data=self._data.task.has("eval_data"))
        if not isinstance(max_drop, Mapping):
            return
        samples = self._data.evaluation()
        if samples is None:
            return
        few = evaluate.predict({"float": OnnxRuntime().open(model)}, [next(iter(samples))])
        with suppress(TaskError):  # a metric over classes may take more samples
            names = score(self.metric, few.outputs["float"], few.targets)
            by_metric(max_drop, names)

    def shown(self, flips: Sequence[Mapping[str, Scalar]], measured: MetricPair) -> tuple[list[dict[str, Scalar]], str]:
        """Some of the flipped samples as a page can show them, and a sentence where that fails."""
        if not flips:
            return [], ""
        digest = hashlib.blake2b()
        try:
            samples = _hashed(self._data.evaluation() or (), digest)
            rows = flipped_samples.shown(flips, measured.predictions, samples, self._data.task)
        except TaskError as error:  # they only illustrate a result that stands
            return [], f"no flipped sample is shown: {error}".splitlines()[0]
        if digest.digest() != self._samples:
            return [], "no flipped sample is shown: eval_data() gives other samples at each call"
        return rows, ""

    def hold(self) -> None:
        """Keeps what was measured last, so that measuring that model again costs nothing."""
        self._held = self._last

    def _predict(self, converted: Converted) -> Predictions | None:
        if self.why:
            return None
        samples = self._data.evaluation()
        if samples is None:
            self.why = "the task has no eval_data()"
            return None
        runtime = OnnxRuntime()
        sessions = {"result": runtime.open(converted.measured)}
        batches: Iterable[Batch] = samples
        if self._float is None:
            sessions = {"float": runtime.open(converted.reference), **sessions}
            # The first pass also keeps what reports need of the samples: magnitudes, and a few batches.
            batches = self._data.evaluated.through(samples)
        digest = hashlib.blake2b()
        predictions = evaluate.predict(sessions, _hashed(batches, digest))
        self.runs += 1
        if predictions.targets is None:
            self.why = "eval_data() gives no targets"
            return None
        if self._float is None:
            self._float, self._samples = predictions, digest.digest()
            return predictions
        if digest.digest() != self._samples:
            raise TaskError(
                "it gives other samples than at its first call, so that models can't be compared on the same ones",
                where="eval_data",
                hint="give the same samples in the same order at each call: seed what is random, and don't shuffle",
            )
        outputs = {"float": self._float.outputs["float"], **predictions.outputs}
        return Predictions(outputs=outputs, targets=predictions.targets, slices=predictions.slices)


def _count(targets: Any) -> int:
    """The number of samples that targets belong to."""
    return len(next(leaves(targets)))


def _hashed(batches: Iterable[Batch], digest: hashlib.blake2b) -> Iterator[Batch]:
    """Passes the batches on; their inputs and targets go into the digest."""
    for batch in batches:
        # Sorted, because a dict of inputs may come in another order at each call.
        for array in leaves([dict(sorted(batch.feed.items())), batch.target]):
            if array is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
        yield batch


def measure(
    converted: Converted, evaluation: Evaluation, records: Sequence[LayerDiff], max_drop: MaxDrop | None
) -> Report:
    """Measures both models on eval_data(): a part of a report, without metrics where none could be measured.

    The tables are "metrics": the loss of each, with its interval; "slices": the same by slice or class; "flipped
    answers": the samples whose answer changed; FLIPPED: some of these as pictures or texts.

    Args:
        records: the layers' errors, from which a failed gate suggests layers to keep float.
        max_drop: greatest loss that passes: of any metric, or by metric.

    Raises:
        ConfigError: a budget for a metric that metric() does not give.
    """
    measured = evaluation.measure(converted)
    if measured is None:
        note = f"{NO_METRIC}: {evaluation.why}"
        if max_drop is None:
            return Report(stage="", notes=(note,))
        gate = Gate("accuracy budget", False, UNMEASURED, f"max_drop {max_drop}", evaluation.why)
        return Report(stage="", gates=(gate,), notes=(note,))
    before, after = measured.before, measured.after
    budgets = by_metric(max_drop, after)
    outputs = measured.predictions.outputs
    certainty, why = intervals(
        evaluation.metric, outputs["float"], outputs["result"], measured.predictions.targets, (before, after)
    )
    metrics: dict[str, Scalar] = {}
    rows: list[dict[str, Scalar]] = []
    gates: list[Gate] = []
    notes: list[str] = []
    if why:
        notes.append(f"no interval for the metrics: {why}")
    for name in after:
        metrics[name] = after[name]
        metrics[f"{name}_float"] = before[name]
        interval = certainty.get(name)
        rows.append(_row(name, before[name], after[name], interval, budgets.get(name)))
        if name in budgets:
            gates.append(_gate(name, before[name], after[name], interval, budgets[name], records))
            notes += _remarks(name, before[name], interval, budgets[name])
            rise = after[name] - before[name]
            if not isinstance(max_drop, Mapping) and rise > budgets[name].allowed(before[name]):
                change = f"{name} rose from {before[name]:.4g} to {after[name]:.4g}, which counts as a gain"
                notes.append(f"{change}; if less is better, write max_drop: {{{name}: {{rise: 5%}}}}")
    # A metric() that returns an empty dict passes nothing.
    if max_drop is not None and not after:
        gates.append(Gate("accuracy budget", False, UNMEASURED, f"max_drop {max_drop}", "metric() gave no figure"))
    slices, about_slices = by_slice(evaluation.metric, measured.predictions, budgets)
    flips, about_flips = flipped(certainty, measured.predictions)
    flipped_rows, about_shown = evaluation.shown(flips, measured)
    notes += [sentence for sentence in (about_slices, about_flips, about_shown) if sentence]
    tables = {"metrics": rows, "slices": slices, "flipped answers": flips, FLIPPED: flipped_rows}
    return Report(stage="", metrics=metrics, gates=tuple(gates), notes=tuple(notes), tables=tables)


def _row(
    name: str, before: float, after: float, interval: MetricInterval | None, budget: Budget | None
) -> dict[str, Scalar]:
    row: dict[str, Scalar] = {"metric": name, "float": before, "converted": after, "change": after - before}
    if interval is not None:
        row |= {"low_95": -interval.high, "high_95": -interval.low, "by": interval.method, "p": interval.p_value}
    if budget is not None:
        row |= {"budget": f"{budget.word} {budget.shown}", "passed": budget.passes(before, after)}
    return row


def _gate(
    name: str,
    before: float,
    after: float,
    interval: MetricInterval | None,
    budget: Budget,
    records: Sequence[LayerDiff],
) -> Gate:
    expected = f"a {budget.word} of at most {budget.shown}"
    if isinstance(budget.amount, str):
        expected += f", {budget.allowed(before):.3g}"
    # Six digits: with fewer, a loss of a tenth of a per cent reads as none.
    change = f"{before:.6g} -> {after:.6g}"
    if interval is not None:
        ends = (interval.low, interval.high)
        if budget.word != "drop":
            ends = (-interval.high, -interval.low)
        change += f", a {budget.word} of {budget.loss(before, after):.3g} (95 % interval {ends[0]:.3g} to {ends[1]:.3g}"
        if interval.p_value is not None:
            change += f", McNemar's p {interval.p_value:.2g}"
        change += ")"
    passed = budget.passes(before, after)
    hint = ""
    if math.isnan(before):
        hint = "metric() gives NaN for the float model itself, so that there is nothing to compare with: mend metric()"
    elif not passed:
        hint = _remedy(records)
    return Gate(f"{name} budget", passed, change, expected, hint)


def _remarks(name: str, before: float, interval: MetricInterval | None, budget: Budget) -> list[str]:
    """What a reader should know of a budget: one sample is worth more, or it may be meant in per cent."""
    allowed = budget.allowed(before)
    if interval is not None and interval.method == "McNemar" and allowed < 1 / interval.before.size:
        worth = f"{1 / interval.before.size:.2g}"
        samples = f"one of the {interval.before.size} samples of eval_data()"
        advice = f"allow at least {worth}, or evaluate on more samples"
        return [f"max_drop {budget.shown} is less than {samples} is worth in {name} ({worth}); {advice}"]
    if isinstance(budget.amount, float) and 0 < LARGE * abs(before) < allowed and math.isfinite(allowed):
        part = f"{100 * allowed / abs(before):.3g} % of {before:.4g}"
        return [f"max_drop {budget.shown} lets {name} lose {part}; for a percentage write the sign"]
    return []


def _remedy(records: Sequence[LayerDiff]) -> str:
    """The change of pipe.yaml that keeps the layers float by which the outputs gain most."""
    order: Order = "own"  # Models that can't share a graph have own errors alone.
    column, what = OWN, "these layers lose most by themselves"
    if any(GAIN in record.extra for record in records):
        order, column, what = "gain", GAIN, "the outputs gain most with one of these layers in float"
    worst: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record.severity_by(order)):
        figure = record.extra.get(column)
        if not isinstance(figure, int | float):
            continue
        # Without an error there is nothing to keep float, nor where the outputs lose by it. NaN fails both conditions.
        helps = figure < math.inf
        if order == "gain":
            helps = figure > 0
        if not helps:
            continue
        if not worst and order == "gain" and figure < LITTLE:
            return f"the outputs gain at most {figure:.1f} dB by one layer in float: pipe why looks for another cause"
        worst[record.name] = f"{record.name} in {record.where} ({figure:.1f} dB)"
        if figure == math.inf:
            worst[record.name] = f"{record.name} in {record.where} (no error is left)"
        if len(worst) == 3:
            break
    if not worst:
        return "try another calibrator or more samples"
    names = json.dumps(list(worst), ensure_ascii=False)
    keep = f"keep them float with `skip: {names}` under quantize, or see all: pipe diff quantize --sort {order}"
    return f"{what}: {', '.join(worst.values())}; {keep}"
