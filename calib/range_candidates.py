"""Candidate ranges of activations, and the choice of the one with the least error at the layers that read it.

No calibrator is best for every value: rare large numbers matter where a large weight multiplies them, and don't
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from layerline.calib.calibrators import Calibrator, threshold
from layerline.calib.histogram import Histogram
from layerline.calib.plan import Wanted

# Thresholds by value, and by the name of the calibrator they come from.
Candidates = Mapping[str, Mapping[str, float]]

CALIBRATORS: tuple[Calibrator, ...] = ("mse", "percentile", "minmax", "entropy")
BOUND = "bound"
# Thresholds closer than this, relative, are one candidate.
ALIKE = 0.02
# How much more the mean error of a channel counts than its spread. Rounding errors are independent and average out in
# the following layers; clipping shifts a channel as a whole, and such shifts add up. Measured in docs/benchmarks.md.
SHIFT_WEIGHT = 16.0


@dataclass(frozen=True)
class Error:
    """The error of one layer's output with one candidate range."""

    signal: float  # sum of squares of the layer's float output
    error: float  # sum of squares of the difference
    # mean difference of each output channel; empty where the layer has no channels.
    shift: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    count: float = 0.0  # elements of a channel

    @property
    def has_signal(self) -> bool:
        """Whether the float output can be compared with: it is finite and not only zeros."""
        return self.signal > 0 and math.isfinite(self.signal)

    @property
    def relative(self) -> float:
        """The error relative to the signal, with shifts weighted; inf where the signal is 0 or a number not finite."""
        weighted = self.error + SHIFT_WEIGHT * self.count * float(np.square(self.shift).sum())
        if not self.has_signal or not math.isfinite(weighted):
            return math.inf
        return weighted / self.signal

    def correction(self) -> npt.NDArray[np.float64]:
        """The amount to subtract from each output channel.

        The mean error is shrunk towards 0 by its own uncertainty, as estimated from few, scattered elements.
        """
        if not self.shift.size or self.count <= 0:
            return self.shift
        scatter = self.error / (self.count * self.shift.size)
        certain = np.square(self.shift) * self.count
        share = np.where(certain > scatter, 1 - scatter / np.where(certain > 0, certain, 1.0), 0.0)
        return self.shift * share


# By value, candidate and layer.
Errors = Mapping[tuple[str, str, str], Error]


def group_of(wanted: Wanted) -> tuple[str, ...]:
    """All values that share one scale with this one."""
    return tuple(sorted({wanted.name, *wanted.shared}))


def candidates(
    wanted: Sequence[Wanted], histograms: Mapping[str, Histogram], bounds: Mapping[str, float], *, percentile: float
) -> dict[str, dict[str, float]]:
    """The thresholds to try for each activation. One that is bounded by construction has only its bound to try."""
    by_group: dict[tuple[str, ...], dict[str, float]] = {}
    by_value: dict[str, dict[str, float]] = {}
    for item in wanted:
        group = group_of(item)
        if group not in by_group:
            by_group[group] = _of_group(group, histograms, bounds, percentile)
        by_value[item.name] = by_group[group]
    return by_value


def bound_of(group: Sequence[str], histograms: Mapping[str, Histogram], bounds: Mapping[str, float]) -> float | None:
    """The bound of a group of values; None where one has no bound, or where no value comes near it.

    A Clip at 1e9 bounds nothing in practice: a scale for 1e9 would round everything to 0.
    """
    if not all(name in bounds for name in group):
        return None
    bound = max(bounds[name] for name in group)
    amax = max(histograms[name].amax for name in group)
    if not 0 < bound <= max(1.0, 4 * amax):
        return None
    return bound


def best(wanted: Sequence[Wanted], tried: Candidates, errors: Errors) -> dict[str, str]:
    """The name of the best candidate of each value, one for all values that share a scale.

    Where no layer gives an error (its float output is 0 or not finite), the first candidate is taken.
    """
    groups = {item.name: group_of(item) for item in wanted}
    totals: dict[tuple[tuple[str, ...], str], float] = {}
    for (value, candidate, _), error in errors.items():
        # A layer without a signal says nothing about any candidate; one that a candidate breaks speaks against it.
        if error.has_signal:
            key = (groups[value], candidate)
            totals[key] = totals.get(key, 0) + error.relative
    chosen: dict[str, str] = {}
    for item in wanted:
        group = groups[item.name]
        names = list(tried[item.name])
        best_name = names[0]
        for name in names[1:]:
            if totals.get((group, name), math.inf) < totals.get((group, best_name), math.inf):
                best_name = name
        chosen[item.name] = best_name
    return chosen


def layer_sqnr(chosen: Mapping[str, str], errors: Errors) -> dict[str, float]:
    """SQNR in dB of each layer, fed with exact inputs in the chosen ranges; -inf where they make it NaN or Inf.

    Leaves out layers whose float output is 0 or not finite, and those without any error.
    """
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for (value, candidate, layer), error in errors.items():
        if chosen[value] == candidate:
            signal[layer] = error.signal
            noise[layer] = noise.get(layer, 0.0) + error.error
    decibels: dict[str, float] = {}
    for layer in signal:
        if not signal[layer] > 0 or not math.isfinite(signal[layer]):
            continue
        if not math.isfinite(noise[layer]):
            decibels[layer] = -math.inf
        elif noise[layer] > 0:
            decibels[layer] = 10 * math.log10(signal[layer] / noise[layer])
    return decibels


def _of_group(
    group: Sequence[str], histograms: Mapping[str, Histogram], bounds: Mapping[str, float], percentile: float
) -> dict[str, float]:
    bound = bound_of(group, histograms, bounds)
    if bound is not None:
        return {BOUND: bound}
    merged = Histogram()
    for name in group:
        merged = merged.merge(histograms[name])
    thresholds: dict[str, float] = {}
    for calibrator in CALIBRATORS:
        value = threshold(merged, calibrator, percentile=percentile)
        if all(abs(value - other) > ALIKE * other for other in thresholds.values()):
            thresholds[calibrator] = value
    return thresholds
