"""The task's metric after each stage, on the same samples, with the interval of what each stage changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerline.backends.base import Session
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.export.signature import Signature
from layerline.graph.io import onnx_files
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.parity import evaluate, nonfinite_outputs
from layerline.parity.nonfinite_outputs import NonFinite
from layerline.parity.paired_metric import Interval, intervals
from layerline.pipeline.config.budgets import Budget, MaxDrop, by_metric
from layerline.pipeline.errors import PipeError, TaskError
from layerline.pipeline.inputs.metric import Metric, accuracy, score
from layerline.pipeline.report import Scalar
from layerline.pipeline.stage import Work

BATCH = 16
"""Samples a run, where eval_data() does not come in batches."""
DEFAULT_DROP = "0.5%"
"""What one stage may lose of a metric where pipe.yaml has no quantize.max_drop."""
Opener = Callable[[], Session]


@dataclass(frozen=True)
class Scores:
    """What was measured.

    Attributes:
        rows: one a stage and metric, in the order of the stages.
        losses: by stage, what is beyond the budget: the figures in words.
        nonfinite: by stage, the samples whose outputs it made NaN or Inf.
        notes: what could not be measured, and why.
    """

    rows: Sequence[Mapping[str, Scalar]]
    losses: Mapping[str, str]
    notes: Sequence[str]
    nonfinite: Mapping[str, NonFinite] = field(default_factory=dict)


def measure(work: Work, folders: Mapping[str, Path], modules: Mapping[str, Opener], max_drop: MaxDrop | None) -> Scores:
    """Runs what each stage left on all of eval_data().

    A stage loses where its metric falls by more than the budget and, if the interval is known, all of it is a loss.

    Args:
        folders: the artifact of each stage, in order.
        modules: by stage, what opens its torch module; other stages leave an ONNX file.
        max_drop: the budget of one stage.

    Raises:
        TaskError: metric() failed.
    """
    with_signature = [folder for folder in folders.values() if (folder / "signature.json").is_file()]
    if not with_signature:
        return Scores((), {}, ("no metric was measured: no stage has left a model to run yet",))
    data = CalibrationData(work, Signature.load(with_signature[0]).inputs, hooks=(), samples=1, batch_size=BATCH)
    samples = data.evaluation()
    if samples is None:
        return Scores((), {}, ("no metric was measured: the task has no eval_data()",))
    batches = iter(samples)
    first = next(batches)
    sessions, notes = _opened(folders, modules, first)
    predictions = evaluate.predict(sessions, itertools.chain([first], _counted(batches, work)))
    if predictions.targets is None:
        return Scores((), {}, (*notes, "no metric was measured: eval_data() gives no targets"))
    has_metric = work.task.has("metric")
    nonfinite = nonfinite_outputs.by_stage(predictions.outputs, folders, samples)
    losses = {stage: outputs.text for stage, outputs in nonfinite.items()}
    judge = _Judge(work.task.get("metric") if has_metric else accuracy, predictions, max_drop)
    try:
        for stage in sessions:
            judge.add(stage)
    except TaskError as error:
        if has_metric:
            raise
        notes.append(f"no metric was measured: the task has no metric(), and {error.what}")
        return Scores((), losses, notes, nonfinite)
    # The metric may not see it: argmax takes NaN for a class.
    return Scores(judge.rows, {**losses, **judge.losses}, notes, nonfinite)


class _Judge:
    """Computes the metric stage by stage, each beside the one before it."""

    def __init__(self, metric: Metric, predictions: evaluate.Predictions, max_drop: MaxDrop | None) -> None:
        self.rows: list[Mapping[str, Scalar]] = []
        self.losses: dict[str, str] = {}
        self._metric = metric
        self._predictions = predictions
        self._max_drop: MaxDrop = DEFAULT_DROP if max_drop is None else max_drop
        self._before: tuple[str, Mapping[str, float]] | None = None

    def add(self, stage: str) -> None:
        """Computes the metric of one more stage.

        Raises:
            TaskError: metric() failed, or gives other names than for the stage before.
        """
        now = score(self._metric, self._predictions.outputs[stage], self._predictions.targets)
        if self._before is None:
            self.rows += [{"stage": stage, "metric": name, "value": value} for name, value in now.items()]
        else:
            earlier, then = self._before
            if now.keys() != then.keys():
                names = f"{', '.join(now)} for {stage}, {', '.join(then)} for {earlier}"
                raise TaskError(f"it gives other metrics for each model: {names}", where="metric")
            self._compare(stage, now, earlier, then)
        self._before = stage, now

    def _compare(self, stage: str, now: Mapping[str, float], earlier: str, then: Mapping[str, float]) -> None:
        outputs = self._predictions.outputs
        certainty, _ = intervals(self._metric, outputs[earlier], outputs[stage], self._predictions.targets, (then, now))
        budgets = by_metric(self._max_drop, now)
        for name, value in now.items():
            row: dict[str, Scalar] = {"stage": stage, "metric": name, "value": value, "change": value - then[name]}
            interval = certainty.get(name)
            if interval is not None:
                row |= {"low_95": -interval.high, "high_95": -interval.low, "by": interval.method}
            self.rows.append(row)
            if name in budgets and _lost(budgets[name], then[name], value, interval):
                lost = f"{name} {then[name]:.6g} -> {value:.6g}"
                self.losses[stage] = f"{self.losses[stage]}, {lost}" if stage in self.losses else lost


def _lost(budget: Budget, before: float, after: float, interval: Interval | None) -> bool:
    """Whether the loss is beyond the budget, and more than noise."""
    if budget.passes(before, after) or math.isnan(before):
        return False
    if interval is None or math.isnan(after):
        return True
    # The interval is that of before - after.
    return interval.low > 0 if budget.word == "drop" else interval.high < 0


def _opened(
    folders: Mapping[str, Path], modules: Mapping[str, Opener], first: evaluate.Batch
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
                session = OnnxRuntime().open(path)
            else:
                continue
            session.run(first.feed)
        except PipeError as error:
            notes.append(f"{stage} was not evaluated: {error.what}")
        else:
            sessions[stage] = session
    return sessions, notes


def _counted(batches: Iterator[evaluate.Batch], work: Work) -> Iterator[evaluate.Batch]:
    for number, batch in enumerate(batches, 2):
        work.log.progress(number, number)
        yield batch
