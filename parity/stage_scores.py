"""The task's metric after each stage, on the same samples, with the interval of what each stage changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerline.backends.base import Feed, Session
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.samples import Batch
from layerline.export.signature import Signature
from layerline.graph.io import onnx_files
from layerline.graph.quantization import convert
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.parity import evaluate, nonfinite_outputs
from layerline.parity.paired_metric import MetricInterval, intervals
from layerline.pipeline.config.budgets import Budget, MaxDrop, by_metric, usual
from layerline.pipeline.diagnosis.evidence import NonFinite
from layerline.pipeline.errors import PipeError, TaskError
from layerline.pipeline.inputs.metric import Metric, accuracy, score
from layerline.pipeline.report import Scalar
from layerline.pipeline.stage import Work

# What one stage may lose of a metric where pipe.yaml has no quantize.max_drop; by its name a rise or a fall.
DEFAULT_DROP = "0.5%"
Opener = Callable[[], Session]


@dataclass(frozen=True)
class Scores:
    """What was measured."""

    rows: Sequence[Mapping[str, Scalar]]  # one a stage and metric, in the order of the stages
    losses: Mapping[str, str]  # by stage, what is beyond the budget: the figures in words
    notes: Sequence[str]  # what could not be measured, and why
    # By stage, the samples whose outputs it made NaN or Inf.
    nonfinite: Mapping[str, NonFinite] = field(default_factory=dict)
    feeds: Sequence[Feed] = ()  # some batches of eval_data(), those that made outputs NaN or Inf first
    skipped: Sequence[str] = ()  # a sentence for each stage whose model can't run


def measure(work: Work, folders: Mapping[str, Path], modules: Mapping[str, Opener], max_drop: MaxDrop | None) -> Scores:
    """Runs what each stage left on all of eval_data().

    A stage loses where its metric falls by more than the budget and, if the interval is known, all of it is a loss.

    Args:
        folders: the artifact of each stage, in order.
        modules: by stage, what opens its torch module; other stages leave an ONNX file.
        max_drop: the budget of one stage.
    """
    with_signature = [folder for folder in folders.values() if (folder / "signature.json").is_file()]
    if not with_signature:
        return Scores((), {}, ("no metric was measured: no stage has left a model to run yet",))
    inputs = Signature.load(with_signature[0]).inputs
    data = CalibrationData(work, inputs, batch_size=evaluate.BATCH)
    samples = data.evaluation()
    if samples is None:
        return Scores((), {}, ("no metric was measured: the task has no eval_data()",))
    batches = iter(samples)
    first = next(batches)
    sessions, skipped = _opened(folders, modules, first)
    watch = nonfinite_outputs.NonFiniteWatch(folders)
    batches = data.evaluated.through(itertools.chain([first], _counted(batches, work)))
    predictions = evaluate.predict(sessions, batches, watch)
    nonfinite = watch.by_stage()
    losses = {stage: outputs.text for stage, outputs in nonfinite.items()}
    feeds = [*watch.feeds.values(), *(batch.feed for batch in data.evaluated.batches())]
    if predictions.targets is None:
        note = "no metric was measured: eval_data() gives no targets"
        return Scores((), losses, (note,), nonfinite, feeds, skipped)
    # The metric may not see NaN: argmax takes it for a class.
    rows, notes = _judged(evaluate.own_metric(work.task), predictions, list(sessions), max_drop, losses)
    return Scores(rows, losses, notes, nonfinite, feeds, skipped)


def _judged(
    own_metric: Metric | None,
    predictions: evaluate.Predictions,
    stages: Sequence[str],
    max_drop: MaxDrop | None,
    losses: dict[str, str],
) -> tuple[list[Mapping[str, Scalar]], list[str]]:
    """The metric of each stage beside the one before it, and notes; losses by stage are added to `losses`."""
    metric = own_metric or accuracy
    outputs, targets = predictions.outputs, predictions.targets
    rows: list[Mapping[str, Scalar]] = []
    notes: list[str] = []
    earlier, then = "", dict[str, float]()
    no_interval = ""
    for stage in stages:
        try:
            now = score(metric, outputs[stage], targets)
            if earlier and now.keys() != then.keys():
                names = f"{', '.join(now)} for {stage}, {', '.join(then)} for {earlier}"
                raise TaskError(f"it gives other metrics for each model: {names}", where="metric")
        except TaskError as error:
            # The other figures stand without the metric.
            if own_metric is None:
                notes.append(f"no metric was measured: the task has no metric(), and {error.what}")
            else:
                notes.append(f"no metric was measured from {stage} on: {error.what}")
            if own_metric is not None and rows:
                losses.setdefault(stage, f"metric() fails on its outputs: {error.what}")
            break
        certainty: Mapping[str, MetricInterval] = {}
        budgets: Mapping[str, Budget] = {}
        if earlier:
            certainty, no_interval = intervals(metric, outputs[earlier], outputs[stage], targets, (then, now))
            budgets = {name: usual(name, DEFAULT_DROP) for name in now}
            if max_drop is not None:
                budgets = by_metric(max_drop, now)
        lost = []
        for name, value in now.items():
            rows.append(_row(stage, name, value, then.get(name), certainty.get(name)))
            if name in budgets and _lost(budgets[name], then[name], value, certainty.get(name)):
                lost.append(f"{name} {then[name]:.6g} -> {value:.6g}")
        if lost:
            losses[stage] = ", ".join(lost)
        earlier, then = stage, now
    if no_interval:
        notes.append(f"no interval of the changes: {no_interval}")
    return rows, notes


def _row(
    stage: str, name: str, value: float, before: float | None, interval: MetricInterval | None
) -> dict[str, Scalar]:
    row: dict[str, Scalar] = {"stage": stage, "metric": name, "value": value}
    if before is not None:
        row["change"] = value - before
    if interval is not None:
        row |= {"low_95": -interval.high, "high_95": -interval.low, "by": interval.method}
    return row


def _lost(budget: Budget, before: float, after: float, interval: MetricInterval | None) -> bool:
    """Whether the loss is beyond the budget, and more than noise."""
    if budget.passes(before, after) or math.isnan(before):
        return False
    if interval is None or math.isnan(after):
        return True
    # The interval is that of before - after.
    if budget.word == "drop":
        return interval.low > 0
    return interval.high < 0


def _opened(
    folders: Mapping[str, Path], modules: Mapping[str, Opener], first: Batch
) -> tuple[dict[str, Session], list[str]]:
    """A session of each stage that runs on the first batch, and a sentence about each other one."""
    sessions: dict[str, Session] = {}
    notes: list[str] = []
    for stage, folder in folders.items():
        path = folder / onnx_files.FILE
        try:
            if stage in modules:
                session = modules[stage]()
            elif path.is_file():
                model = onnx_files.read_model(path)
                reason = convert.not_emulated(model)
                if reason:
                    notes.append(f"{stage}: {reason}")
                session = OnnxRuntime().open(convert.runnable(model))
            else:
                continue
            session.run(first.feed)
        except PipeError as error:
            notes.append(f"{stage} was not evaluated: {error.what}")
        else:
            sessions[stage] = session
    return sessions, notes


def _counted(batches: Iterator[Batch], work: Work) -> Iterator[Batch]:
    for number, batch in enumerate(batches, 2):
        work.log.progress(number, number)
        yield batch
