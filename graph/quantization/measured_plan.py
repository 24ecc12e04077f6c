"""From ranges to a plan that was measured at the outputs: what errors of single layers come to is seen there alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.calib.range_candidates import CALIBRATORS
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.quantization import bias_correction, qdq, range_choice
from layerline.graph.quantization.qdq_placement import Placement, Rules

SAMPLES = 8
"""Samples that ranges and plans are tried on: each costs some twelve runs of the model."""
CLEARLY_DB = 0.5
"""By how much another plan has to be better at the outputs, over few samples, to be taken."""


def tuned(
    model: Light,
    rules: Rules,
    placed: Placement,
    histograms: Mapping[str, Histogram],
    feeds: Sequence[Feed],
    *,
    percentile: float,
) -> tuple[QuantPlan, tuple[str, ...]]:
    """The plan of the ranges chosen one by one, or that of a single calibrator where the outputs keep more with it.

    Args:
        model: the float model, at an opset that has Q/DQ.
        placed: what the rules want.
        feeds: samples by input name, of which some eight are taken, evenly spread.

    Returns:
        The plan, and sentences about layers that stay float and a calibrator that was taken for all.
    """
    few = _few(feeds)
    chosen = range_choice.choose(model, rules, placed, histograms, few, percentile=percentile)
    notes = tuple(
        f"{layer} stays float: int8 would leave it {db:.1f} dB by itself" for layer, db in chosen.floated.items()
    )
    planned = functools.partial(qdq.plan, model, chosen.placement, histograms, percentile=percentile)
    plan = planned("mse", chosen=chosen.thresholds)
    plans = {"auto": plan} | {c: planned(c) for c in CALIBRATORS}
    judge, kept = _Judge(model, few), dict[str, float]()
    for name, each in plans.items():
        same = name != "auto" and [v.amax for v in each.values] == [v.amax for v in plan.values]
        worst = None if same else judge.least_db(qdq.apply(model, each))
        if worst is not None:
            kept[name] = worst
    best = max(kept, key=lambda n: kept[n], default="auto")
    if "auto" not in kept or best == "auto" or kept[best] < kept["auto"] + CLEARLY_DB:
        return plan, notes
    gain = f"{kept[best]:.1f} dB at the outputs, {kept['auto']:.1f} dB with each chosen by itself"
    return plans[best], (*notes, f"auto took {best} for all ranges: {gain}")


def _few(feeds: Sequence[Feed]) -> Sequence[Feed]:
    """As many feeds as hold SAMPLES samples, or a single larger one, evenly spread."""
    rows = max((a.shape[0] for a in feeds[0].values() if a.ndim), default=1) if feeds else 1
    count = max(1, SAMPLES // max(rows, 1))
    return feeds[:: max(1, len(feeds) // count)][:count]


class _Judge:
    """The outputs of one model on a few samples, kept, to measure others against."""

    def __init__(self, model: Light, feeds: Sequence[Feed]) -> None:
        random = drawn(model.model)
        self.names = [o.name for o in model.model.graph.output if o.name not in random]
        self.feeds, self.exact = feeds, self._run(model, feeds)

    def least_db(self, model: Light) -> float | None:
        """SQNR of the output that lost most, in dB; None where none can be measured."""
        found = self._run(model, self.feeds)
        measured = [self._decibels(name, found) for name in self.names]
        return min((db for db in measured if db is not None), default=None)

    def _decibels(self, name: str, found: Sequence[Mapping[str, Array]]) -> float | None:
        """SQNR of one output in dB; None where it holds no numbers, or zeros alone."""
        signal, lost = 0.0, 0.0
        for exact, other in zip(self.exact, found, strict=True):
            a, b = exact[name], other[name]
            if a.dtype.kind not in "fiu" or a.shape != b.shape:
                return None
            usable = np.isfinite(a) & np.isfinite(b)
            signal += float(np.square(a[usable].astype(np.float64)).sum())
            lost += float(np.square(a[usable].astype(np.float64) - b[usable]).sum())
        if not signal:
            return None
        return 10 * math.log10(signal / lost) if lost else math.inf

    @staticmethod
    def _run(model: Light, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        session = OnnxRuntime(few_runs=True).open(model)
        return [session.run(feed) for feed in feeds]


def corrected(model: Light, plan: QuantPlan, quantized: Light, feeds: Sequence[Feed]) -> tuple[Light, str]:
    """The quantised model with corrected biases, where the outputs gain by them, and what they gain in a sentence."""
    candidate, layers = bias_correction.correct(quantized, range_choice.shifts(model, plan, feeds))
    judge = _Judge(model, feeds)
    before, after = judge.least_db(quantized), judge.least_db(candidate)
    if before is None or after is None:
        return candidate, f"bias correction changed {layers} layers; no output could be measured"
    gain = f"{after:.1f} dB at the outputs with it, {before:.1f} dB without"
    if after <= before:
        return quantized, f"bias correction was left out, the outputs lose by it: {gain}"
    return candidate, f"bias correction of {layers} layers: {gain}"
