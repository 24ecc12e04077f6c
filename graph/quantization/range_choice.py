"""Chooses the range of each activation by the error that it causes at the layers that read it.

A layer that no range serves (large channels that cancel, inputs of very different size behind a Concat) has a large
error even with exact inputs. It stays float, and its reason says the figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.calib import range_candidates
from layerline.calib.histogram import Histogram
from layerline.calib.plan import Wanted
from layerline.graph.quantization import qdq, range_trials
from layerline.graph.quantization.qdq_placement import Placement, Rules, place

# A layer whose own SQNR would be below this stays float: at 10 dB its error is a third of its output.
FLOOR_DB = 10.0


@dataclass(frozen=True)
class RangeChoice:
    """The outcome of the trials."""

    rules: Rules  # with the layers that stay float
    placement: Placement  # without them
    # by value and type, the name of the calibrator, or "bound", and its threshold
    thresholds: Mapping[tuple[str, str], tuple[str, float]]
    floated: Mapping[str, float]  # layers that stay float, with the SQNR in dB that their format would leave them
    errors: range_candidates.Errors  # what was measured, by value, candidate and layer


def apart(
    model: ir.Model, rules: Rules, placed: Placement, histograms: Mapping[str, Histogram]
) -> tuple[Rules, Placement]:
    """Repeats the placement with measured sizes, so that inputs of a Concat that differ much share no scale."""
    if not any(w.shared for w in placed.wanted):
        return rules, placed
    rules = dataclasses.replace(rules, amax={name: h.amax for name, h in histograms.items()})
    return rules, place(model, rules)


def choose_ranges(
    model: ir.Model,
    rules: Rules,
    placed: Placement,
    histograms: Mapping[str, Histogram],
    feeds: Sequence[Feed],
    *,
    percentile: float,
) -> RangeChoice:
    """Tries the thresholds of all calibrators on a few samples."""
    bounds = qdq.bounds(model.graph)
    best: dict[tuple[str, str], tuple[str, float]] = {}
    groups: dict[tuple[str, str], tuple[str, ...]] = {}
    floated: dict[str, float] = {}
    reasons: dict[str, str] = {}
    all_errors: dict[tuple[str, str, str], range_candidates.Error] = {}
    # A value may be quantised to two types, each for layers of its own.
    for kind, name in (("int", "int8"), ("float8", "fp8")):
        wanted = [w for w in placed.wanted if kind in w.dtype]
        activations = [w for w in wanted if w.role == "activation"]
        if not activations:
            continue
        weights = Placement(tuple(w for w in wanted if w.role == "weight"), ())
        candidates = range_candidates.candidates(activations, histograms, bounds, percentile=percentile)
        if kind == "float8":
            # Floats have fine steps near 0 whatever their range. Smaller ones, chosen value by value, cost 1 to 3 dB at
            # the outputs of two small networks on samples that they were not chosen on: only the floor holds.
            candidates = {item.name: _greatest(item, candidates, histograms) for item in activations}
        stored = qdq.apply(model, qdq.make_plan(model, weights, histograms, "minmax"))
        ends: dict[str, tuple[float, float]] = {}
        for item in activations:
            group = range_candidates.group_of(item)
            groups[item.name, item.dtype] = group
            ends[item.name] = min(histograms[n].low for n in group), max(histograms[n].high for n in group)
        errors = range_trials.measure(model, stored, activations, candidates, feeds, ends)
        all_errors |= errors
        chosen = range_candidates.best(activations, candidates, errors)
        for item in activations:
            best[item.name, item.dtype] = chosen[item.name], candidates[item.name][chosen[item.name]]
        for layer, db in range_candidates.layer_sqnr(chosen, errors).items():
            if db < FLOOR_DB and layer not in rules.forced:
                floated[layer] = db
                reasons[layer] = f"{name} would leave it {db:.1f} dB by itself"
    if floated:
        rules = dataclasses.replace(rules, keep={**rules.keep, **reasons})
        placed = place(model, rules)
    thresholds: dict[tuple[str, str], tuple[str, float]] = {}
    for item in placed.wanted:
        # A value whose group changed with the placement was tried with other values beside it.
        key = item.name, item.dtype
        if item.role == "activation" and groups.get(key) == range_candidates.group_of(item):
            thresholds[key] = best[key]
    return RangeChoice(rules, placed, thresholds, floated, all_errors)


def _greatest(
    item: Wanted, candidates: range_candidates.Candidates, histograms: Mapping[str, Histogram]
) -> dict[str, float]:
    """The bound of a value, or its greatest number."""
    if range_candidates.BOUND in candidates[item.name]:
        return dict(candidates[item.name])
    return {"minmax": max(histograms[name].amax for name in range_candidates.group_of(item))}
