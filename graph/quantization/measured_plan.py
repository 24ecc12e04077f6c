"""Compares whole plans at the model's outputs, where the errors of single layers add up or cancel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.calibrators import Calibrator
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.calib.range_candidates import CALIBRATORS
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import names
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.quantization import bias_correction, own_qdq, qdq, range_choice
from layerline.graph.quantization.qdq_placement import Placement, Rules
from layerline.pipeline.report import decibels

# Samples that single ranges are tried on: each sample costs some twelve runs of the model.
SAMPLES = 8
# How much better another plan must be at the outputs to replace the one chosen value by value.
CLEARLY_DB = 0.5
# Least gain of the worst output, on held-out samples and on the others, for which a repair or a bias correction stays.
# A smaller gain is less than what another choice of samples changes.
LEAST_GAIN_DB = 0.1

_SATURATING = ("Softmax", "LogSoftmax", "Sigmoid", "ArgMax", "ArgMin", "TopK")
_MOVES = ("Identity", "Cast", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Tuned:
    """A plan, the rules with the layers that stay float, and notes about these and about the calibrator."""

    plan: QuantPlan
    rules: Rules
    notes: tuple[str, ...]


def tuned(
    model: ir.Model,
    rules: Rules,
    placed: Placement,
    histograms: Mapping[str, Histogram],
    feeds: Sequence[Feed],
    held_out: Sequence[Feed] = (),
    *,
    calibrator: Literal["auto"] | Calibrator,
    percentile: float,
) -> Tuned:
    """The plan by one calibrator, or by the best for each value.

    auto chooses each range by itself. It keeps that plan or a single calibrator's, whichever serves the outputs better.

    Args:
        placed: the values that the rules quantise.
        feeds: samples by input name. Ranges are tried on about eight of them.
        held_out: other samples, on which plans are compared; on `feeds` where there are none.
    """
    rules, placed = range_choice.apart(model, rules, placed, histograms)
    if not placed.activations:
        calibrator = "minmax"  # weights have ranges of their own
    if calibrator != "auto":
        return Tuned(qdq.make_plan(model, placed, histograms, calibrator, percentile=percentile), rules, ())
    chosen = range_choice.choose_ranges(model, rules, placed, histograms, spread(feeds), percentile=percentile)
    floated = tuple(f"{layer} stays float: {chosen.rules.keep[layer]}" for layer in chosen.floated)
    plan = qdq.make_plan(model, chosen.placement, histograms, "mse", percentile=percentile, chosen=chosen.thresholds)
    trials = Trials(model, feeds, held_out)
    auto_db = least(trials.decibels(qdq.apply(model, plan)))
    if auto_db is None:
        return Tuned(plan, chosen.rules, floated)
    best_plan, best_db, notes = plan, auto_db + CLEARLY_DB, floated
    for single in CALIBRATORS:
        other = qdq.make_plan(model, chosen.placement, histograms, single, percentile=percentile)
        if [v.amax for v in other.values] == [v.amax for v in plan.values]:
            continue
        # The worse part of the samples decides: rare large numbers, which a range may cut off, are in one alone.
        other_db = least(trials.decibels(qdq.apply(model, other)))
        if other_db is not None and other_db >= best_db and other_db > auto_db:
            best_plan, best_db = other, other_db
            figures = f"{other_db:.1f} dB at {trials.place}, {auto_db:.1f} dB with each chosen by itself"
            notes = (*floated, f"auto took {single} for all ranges: {figures}")
    return Tuned(best_plan, chosen.rules, notes)


def spread(feeds: Sequence[Feed]) -> Sequence[Feed]:
    """Evenly spread feeds that hold about SAMPLES samples together, at least one feed."""
    if not feeds:
        return feeds
    rows = max((array.shape[0] for array in feeds[0].values() if array.ndim), default=1)
    count = max(1, SAMPLES // max(rows, 1))
    step = max(1, len(feeds) // count)
    return feeds[::step][:count]


class Trials:
    """Measures models on samples that a choice was fitted on, and on others.

    Few held-out samples may lack the rare large numbers that the others have, so a choice has to gain on both.

    Args:
        feeds: samples that choices are fitted on.
        held_out: others; there may be none.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Feed], held_out: Sequence[Feed]) -> None:
        self._references = [OutputReference(model, part) for part in (feeds, held_out) if part]

    @property
    def place(self) -> str:
        """What is measured, in words for notes."""
        operators = sorted({op for reference in self._references for op in reference.operators})
        if not operators:
            return "the outputs"
        return f"the outputs, of {' and '.join(operators)} at the scores in front of it"

    def decibels(self, model: ir.Model) -> list[float | None]:
        """SQNR in dB of the output that lost most, on each part. The held-out samples are the last."""
        return [reference.least_db(model) for reference in self._references]


def least(parts: Sequence[float | None]) -> float | None:
    """The figure of the worse part of the samples; None where nothing could be measured."""
    return min((db for db in parts if db is not None), default=None)


def least_gain(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    """The gain in dB on the held-out samples, or on average over both parts where that is less.

    A choice may not lose on samples that it was not fitted on. On the others it may lose less than it gains there.
    None where nothing could be measured; -inf where that holds for the held-out samples alone.
    """
    gains: list[float] = []
    for old, new in zip(before, after, strict=True):
        if old is not None and new is not None:
            # Equal covers two infinite figures.
            gains.append(0.0 if old == new else new - old)
    if not gains:
        return None
    if before[-1] is None or after[-1] is None:
        return -math.inf
    return min(gains[-1], sum(gains) / len(gains))


def gain_text(place: str, before: float | None, after: float | None) -> str:
    """The figures on the held-out samples, in words."""
    if before is None or after is None:
        return f"{place} hold only zeros on the held-out samples, so nothing could be judged"
    texts = [f"{db:.1f}" for db in (after, before)]
    if texts[0] == texts[1]:
        texts = [f"{db:.3f}" for db in (after, before)]
    if texts[0] == texts[1]:
        return f"{before:.1f} dB at {place} with and without it, on held-out samples: no change"
    return f"{texts[0]} dB at {place} with it, {texts[1]} dB without, on held-out samples"


class OutputReference:
    """Measures models against the outputs of one reference, which are computed once.

    An output behind a Softmax or the like is judged by the scores in front of it: half by all samples together, half by
    the mean of their dB. Probabilities near 0 or 1 hide the error, so that the few samples in between would decide.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Feed]) -> None:
        by_numbers = counted(model.graph)
        left_out = {*drawn(model), *by_numbers.outputs}
        outputs = [name for name in names(model.graph.outputs) if name not in left_out]
        outputs += [name for name in by_numbers.sources if name not in outputs]
        scores: dict[str, str] = {}
        operators = set[str]()  # the last operators, of which the scores are compared
        for node in model.graph:
            for output in set(names(node.outputs)).intersection(outputs):
                score, operator = _score(node)
                if score:
                    scores[output] = score
                    operators.add(operator)
        self.operators = frozenset(operators)
        self._by_sample = frozenset(scores.values())
        self.names = list(dict.fromkeys(scores.get(name, name) for name in outputs))
        self.feeds = feeds
        self.exact = self._run(model)

    def least_db(self, model: ir.Model) -> float | None:
        """SQNR in dB of the output that lost most; None where no output holds numbers other than 0."""
        outputs = self._run(model)
        measured: list[float] = []
        for name in self.names:
            db = self._decibels(name, outputs)
            if db is not None:
                measured.append(db)
        return min(measured, default=None)

    def _decibels(self, name: str, outputs: Sequence[Mapping[str, Array]]) -> float | None:
        """SQNR of one output in dB; None where it holds no numbers, or only zeros.

        Elements that are NaN or Inf in the reference say nothing of a plan and are left out. One that is so in the
        other model alone makes it -inf: such a plan must not look better than another.
        """
        signals, errors = [np.zeros(0)], [np.zeros(0)]
        for exact, other in zip(self.exact, outputs, strict=True):
            a, b = np.atleast_1d(exact[name]), np.atleast_1d(other[name])
            if a.dtype.kind not in "fiu" or a.shape != b.shape:
                return None
            usable = np.isfinite(a)
            if not np.isfinite(b[usable]).all():
                return -math.inf
            wide = np.where(usable, a, 0).astype(np.float64)
            inner_axes = tuple(range(1, a.ndim))
            signals.append(np.square(wide).sum(inner_axes))
            errors.append(np.square(wide - np.where(usable, b, 0)).sum(inner_axes))
        signal, error = np.concatenate(signals), np.concatenate(errors)
        if not signal.any():
            return None
        together = decibels(float(signal.sum()), float(error.sum()))
        if name not in self._by_sample:
            return together
        relative = error[signal > 0] / signal[signal > 0]
        # float32 rounds at about 140 dB: a sample that is exact must not decide alone either.
        by_sample = float(-10 * np.log10(np.maximum(relative, 1e-14)).mean())
        # The mean over samples alone would clip rare large numbers, as few samples have them.
        return (together + by_sample) / 2

    def _run(self, model: ir.Model) -> list[dict[str, Array]]:
        session = OnnxRuntime(few_runs=True).open(own_qdq.emulate(model), self.names)
        return [session.run(feed) for feed in self.feeds]


def _score(node: ir.Node | None) -> tuple[str, str]:
    """The computed value that a Softmax, a Sigmoid or a choice at the end of the graph reads, and the operator."""
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type not in _SATURATING or node.inputs[0] is None:
        return "", ""
    if node.inputs[0].producer() is None:
        return "", ""
    return node.inputs[0].name or "", node.op_type


def corrected(
    model: ir.Model,
    quantized: ir.Model,
    shifts: Mapping[str, npt.NDArray[np.float64]],
    feeds: Sequence[Feed],
    held_out: Sequence[Feed],
) -> tuple[bool, str]:
    """Corrects the biases of a quantised model.

    Args:
        feeds: samples that the shifts were measured on.
        held_out: others.

    Returns:
        Whether the outputs gain by it, and a note with their SQNR before and after.
    """
    candidate, layers = bias_correction.correct(quantized, shifts)
    if not layers:
        return False, "bias correction changed no layer: none with a quantised input has a mean error to take off"
    trials = Trials(model, feeds, held_out)
    before, after = trials.decibels(quantized), trials.decibels(candidate)
    gain = least_gain(before, after)
    if gain is None:
        return True, f"bias correction changed {layers} layers; no output could be measured"
    figures = gain_text(trials.place, before[-1], after[-1])
    if gain < LEAST_GAIN_DB:
        return False, f"bias correction was left out, the outputs gain less than {LEAST_GAIN_DB} dB by it: {figures}"
    return True, f"bias correction of {layers} layers: {figures}"
