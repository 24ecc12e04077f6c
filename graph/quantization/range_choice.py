"""Ranges for a placement: those that do least harm at the layers that read them, and the layers that no range serves.

Such a layer (large channels that cancel, inputs of very different size behind a Concat) is found by its own error, fed
with exact inputs, and stays float with that figure as its reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.calib import range_candidates
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.graph.io.ir_convert import to_ir
from layerline.graph.quantization import qdq, range_trials
from layerline.graph.quantization.qdq_placement import Placement, Rules, place

FLOOR_DB = 10.0
"""A layer whose own SQNR would be below this stays float: its error is a third of its output, before any other's."""


@dataclass(frozen=True)
class Chosen:
    """What trials decided.

    Attributes:
        placement: without the layers that stay float.
        thresholds: by value, with the name of the calibrator, or "bound".
        floated: layers that stay float, with the SQNR in dB that int8 would leave them.
        errors: what was measured, by value, candidate and layer.
    """

    placement: Placement
    thresholds: Mapping[str, tuple[str, float]]
    floated: Mapping[str, float]
    errors: range_candidates.Errors


def apart(
    model: Light, rules: Rules, placed: Placement, histograms: Mapping[str, Histogram]
) -> tuple[Rules, Placement]:
    """The placement in which a Concat of inputs that differ much in size makes them share no scale."""
    if not any(w.shared for w in placed.wanted):
        return rules, placed
    rules = dataclasses.replace(rules, amax={name: h.amax for name, h in histograms.items()})
    return rules, place(model, rules)


def choose(
    model: Light,
    rules: Rules,
    placed: Placement,
    histograms: Mapping[str, Histogram],
    feeds: Sequence[Feed],
    *,
    percentile: float,
) -> Chosen:
    """Tries the thresholds of all calibrators on a few samples.

    Args:
        model: the float model, at an opset that has Q/DQ.
        feeds: samples by input name.
    """
    wanted = [w for w in placed.wanted if w.role == "activation"]
    tried = range_candidates.candidates(wanted, histograms, qdq.bounds(to_ir(model).graph), percentile=percentile)
    weights = Placement(tuple(w for w in placed.wanted if w.role == "weight"), ())
    plan: QuantPlan = qdq.plan(model, weights, histograms, "minmax")
    errors = range_trials.measure(model, plan, wanted, tried, feeds)
    best = range_candidates.choose(wanted, tried, errors)
    own = range_candidates.own_db(best, errors)
    floated = {layer: db for layer, db in own.items() if db < FLOOR_DB}
    groups = {w.name: range_candidates.group_of(w) for w in wanted}
    if floated:
        reasons = {layer: f"int8 would leave it {db:.1f} dB by itself" for layer, db in floated.items()}
        placed = place(model, dataclasses.replace(rules, keep=reasons))
    thresholds = {
        w.name: (best[w.name], tried[w.name][best[w.name]])
        for w in placed.wanted
        if w.role == "activation" and groups.get(w.name) == range_candidates.group_of(w)
    }
    return Chosen(placed, thresholds, floated, errors)


def shifts(model: Light, plan: QuantPlan, feeds: Sequence[Feed]) -> dict[str, npt.NDArray[np.float64]]:
    """The mean error that a plan adds to each output channel of each layer with weights, fed with exact inputs."""
    activations = [v for v in plan.values if v.role == "activation"]
    weights = QuantPlan(values=tuple(v for v in plan.values if v.role == "weight"), kept=())
    tried = {v.name: {"plan": v.amax} for v in activations}
    errors = range_trials.measure(model, weights, activations, tried, feeds)
    return {layer: e.correction() for (_, _, layer), e in errors.items() if e.shift.size and math.isfinite(e.relative)}
