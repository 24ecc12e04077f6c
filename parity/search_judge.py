"""How a search for formats judges one model: by the task's metric or, where there is none, by the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerline.backends.base import Feed
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.parity import output_sqnr
from layerline.parity.accuracy_budget import FIRST_SHARE, Evaluation, MetricPair
from layerline.pipeline.config.budgets import MaxDrop, by_metric

# The first quarter of the samples may be worse than all of them, but hardly by more: twice the power of the error.
HOPELESS_DB = 3.0


@dataclass(frozen=True)
class Verdict:
    """How one model does on the budget."""

    passed: bool  # whether it holds
    lack: float  # how far it is from holding, to compare models; at most 0 where it holds
    seen: str  # the figures in words
    # the power of the outputs' error relative to the greatest that passes; None where a metric judges
    noise: float | None = None


JudgeConverted = Callable[[Converted], Verdict]


def judge(
    evaluation: Evaluation, data: CalibrationData, probes: Sequence[Feed], max_drop: MaxDrop, bounds: output_sqnr.Bounds
) -> JudgeConverted:
    """The judge of a task.

    Args:
        max_drop: the budget of the metrics.
        bounds: of the outputs, where the task has no metric.
    """

    def verdict(converted: Converted) -> Verdict:
        measured = evaluation.measure(converted)
        if measured is not None and measured.after:
            result = _by_metric(measured, max_drop)
        else:
            feeds = output_sqnr.samples(data, probes)
            result = _by_outputs(output_sqnr.outputs(converted.reference, converted.measured, feeds), bounds)
        if result.passed:
            evaluation.hold()
        return result

    return verdict


def first_samples_first(
    exact: JudgeConverted,
    evaluation: Evaluation,
    data: CalibrationData,
    probes: Sequence[Feed],
    max_drop: MaxDrop,
    bounds: output_sqnr.Bounds,
) -> JudgeConverted:
    """The same judge, which ends at the first samples where these leave no hope.

    Of a metric they alone lose more than the budget allows on all samples. Of outputs they lack more than HOPELESS_DB.
    """

    def verdict(converted: Converted) -> Verdict:
        if evaluation.why:
            feeds = output_sqnr.samples(data, probes)
            few = feeds[: len(feeds) // FIRST_SHARE]
            if few:
                by_few = _by_outputs(output_sqnr.outputs(converted.reference, converted.measured, few), bounds)
                if by_few.lack > HOPELESS_DB:
                    return Verdict(False, by_few.lack, f"{by_few.seen} on the first samples")
            return exact(converted)
        first = evaluation.hopeless(converted, max_drop)
        if first is None:
            return exact(converted)
        result = _by_metric(first, max_drop)
        return Verdict(False, max(result.lack, 0.0), f"{result.seen} on the first samples")

    return verdict


def _by_metric(measured: MetricPair, max_drop: MaxDrop) -> Verdict:
    lacks: list[float] = []
    texts: list[str] = []
    passed = True
    for name, budget in by_metric(max_drop, measured.after).items():
        before, after = measured.before[name], measured.after[name]
        passed = passed and budget.passes(before, after)
        allowed = budget.allowed(before)
        lacks.append((budget.loss(before, after) - allowed) / (allowed or abs(before) or 1.0))
        texts.append(f"{name} {after:.6g} (float {before:.6g})")
    return Verdict(passed, max(lacks, default=math.inf), ", ".join(texts))


def _by_outputs(outputs: output_sqnr.Outputs, bounds: output_sqnr.Bounds) -> Verdict:
    gates = output_sqnr.gates(outputs, bounds)
    worst = output_sqnr.least(outputs)
    if worst is None:
        return Verdict(False, math.inf, "no output could be measured")
    name, output = worst
    actual = f"{name} has {output.sqnr_db:.1f} dB, cosine {output.cosine:.6f}"
    lack = bounds.min_db - output.sqnr_db
    return Verdict(all(gate.passed for gate in gates), lack, actual, noise=10 ** (min(lack, 300.0) / 10))
