"""The user's metric of the float and the converted model, and the gate on what it may lose."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerline.backends import evaluate
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.metric import accuracy, score
from layerline.pipeline.report import Gate, LayerDiff, Scalar

Scores = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The metrics of a conversion; empty where none could be measured.

    Attributes:
        metrics: by name, of the converted model, and of the float model under `NAME_float`.
        gates: one a metric, where there is a budget.
        notes: the reason why nothing was measured.
    """

    metrics: Mapping[str, Scalar] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()


def measure(
    converted: Converted, data: CalibrationData, records: Sequence[LayerDiff], max_drop: float | None
) -> Accuracy:
    """Measures both models on eval_data().

    Args:
        records: the layers' errors, from which a failed gate suggests layers to keep float.
        max_drop: greatest loss of any metric that passes, in the metric's units.
    """
    scores, why = _scores(converted, data)
    if scores is None:
        note = f"no metric was measured: {why}"
        if max_drop is None:
            return Accuracy(notes=(note,))
        gate = Gate("accuracy budget", False, "not measured", f"max_drop {max_drop}", why)
        return Accuracy(gates=(gate,), notes=(note,))
    before, after = scores
    metrics: dict[str, Scalar] = {}
    for name in after:
        metrics[name] = after[name]
        metrics[f"{name}_float"] = before[name]
    if max_drop is None:
        return Accuracy(metrics=metrics)
    return Accuracy(metrics=metrics, gates=_budget(before, after, records, max_drop))


def _scores(converted: Converted, data: CalibrationData) -> tuple[tuple[Scores, Scores] | None, str]:
    """The metrics of the float and the converted model, or None and the reason."""
    samples = data.evaluation()
    if samples is None:
        return None, "the task has no eval_data()"
    runtime = OnnxRuntime()
    sessions = {"float": runtime.open(converted.reference), "result": runtime.open(converted.measured)}
    predictions = evaluate.predict(sessions, data.evaluated.through(samples))
    if predictions.targets is None:
        return None, "eval_data() gives no targets"
    has_metric = data.task.has("metric")
    metric = data.task.get("metric") if has_metric else accuracy
    try:
        before = score(metric, predictions.outputs["float"], predictions.targets)
        after = score(metric, predictions.outputs["result"], predictions.targets)
    except TaskError as error:
        if has_metric:
            raise
        # The default metric fits classifiers alone. Other models lose nothing by its failure.
        return None, f"the task has no metric(), and {error.what}"
    return (before, after), ""


def _budget(before: Scores, after: Scores, records: Sequence[LayerDiff], max_drop: float) -> tuple[Gate, ...]:
    expected = f"a drop of at most {max_drop:g}"
    if not after:
        return (Gate("accuracy budget", False, "metric() gave no figure", expected),)
    # One part in 10^9 of slack: a drop of exactly max_drop passes however the subtraction rounds.
    limit = max_drop + 1e-9
    gates: list[Gate] = []
    for name in after:
        passed = before[name] - after[name] <= limit
        hint = "" if passed else _remedy(records)
        gates.append(Gate(f"{name} budget", passed, f"{before[name]:.6g} -> {after[name]:.6g}", expected, hint))
    return tuple(gates)


def _remedy(records: Sequence[LayerDiff]) -> str:
    """The change of pipe.yaml that keeps the layers float that lose most by themselves, fed with exact inputs."""
    decibels: dict[str, float] = {}
    for record in records:
        value = record.extra.get("isolated_sqnr_db")
        if isinstance(value, int | float) and math.isfinite(value):
            decibels[record.name] = float(value)
    worst = sorted(decibels, key=lambda name: decibels[name])[:3]
    if not worst:
        return "try another calibrator or more samples"
    layers = ", ".join(f"{name} ({decibels[name]:.1f} dB)" for name in worst)
    names = json.dumps(worst, ensure_ascii=False)
    return (
        f"the layers that lose most by themselves: {layers}; keep them float with `skip: {names}` under quantize, or "
        "see all: pipe diff quantize --sort own"
    )
