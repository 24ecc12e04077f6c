"""Which range an activation gets, of several candidates: the one with the least error at the layers that read it.

No calibrator is best for every value: rare large numbers matter where a large weight meets them, and don't elsewhere.
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

Candidates = Mapping[str, Mapping[str, float]]
"""Thresholds by value, and by the name of the calibrator they come from."""

CALIBRATORS: tuple[Calibrator, ...] = ("mse", "percentile", "minmax", "entropy")
BOUND = "bound"
ALIKE = 0.02
"""Thresholds closer than this, relative, are one candidate."""
SHIFT_WEIGHT = 16.0
"""How much more the mean error of a channel counts than its spread. Rounding errors are independent and average out in
the layers behind; clipping moves a channel as a whole, and such shifts add up. Measured in docs/benchmarks.md."""


@dataclass(frozen=True)
class Error:
    """What one candidate does to the output of one layer.

    Attributes:
        signal: sum of squares of the layer's float output.
        error: sum of squares of the difference.
        shift: mean difference of each output channel; empty where the layer has no channels.
        count: elements of a channel.
    """

    signal: float
    error: float
    shift: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    count: float = 0.0

    @property
    def relative(self) -> float:
        """The error relative to the signal, with shifts weighted; inf where it can't be told."""
        weighted = self.error + SHIFT_WEIGHT * self.count * float(np.square(self.shift).sum())
        usable = self.signal > 0 and math.isfinite(self.signal) and math.isfinite(weighted)
        return weighted / self.signal if usable else math.inf

    def correction(self) -> npt.NDArray[np.float64]:
        """What to take off each output channel; the less the worse the mean is known, of few and scattered elements."""
        if not self.shift.size or self.count <= 0:
            return self.shift
        scatter = self.error / (self.count * self.shift.size)
        certain = np.square(self.shift) * self.count
        share = np.where(certain > scatter, 1 - scatter / np.where(certain > 0, certain, 1.0), 0.0)
        return self.shift * share


Errors = Mapping[tuple[str, str, str], Error]
"""By value, candidate and layer."""


def group_of(wanted: Wanted) -> tuple[str, ...]:
    """All values that share one scale with this one."""
    return tuple(sorted({wanted.name, *wanted.shared}))


def candidates(
    wanted: Sequence[Wanted], histograms: Mapping[str, Histogram], bounds: Mapping[str, float], *, percentile: float
) -> dict[str, dict[str, float]]:
    """The thresholds worth trying of each activation; of those that are bounded by construction, the bound alone."""
    made: dict[tuple[str, ...], dict[str, float]] = {}
    for item in wanted:
        group = group_of(item)
        if group not in made:
            made[group] = _of_group(group, histograms, bounds, percentile)
    return {item.name: made[group_of(item)] for item in wanted}


def bound_of(group: Sequence[str], histograms: Mapping[str, Histogram], bounds: Mapping[str, float]) -> float | None:
    """The bound of a group, where all of it is bounded and its numbers come near: a Clip at 1e9 bounds nothing."""
    if not all(name in bounds for name in group):
        return None
    greatest = max(bounds[name] for name in group)
    reached = max(histograms[name].amax for name in group)
    return greatest if 0 < greatest <= max(1.0, 4 * reached) else None


def choose(wanted: Sequence[Wanted], tried: Candidates, errors: Errors) -> dict[str, str]:
    """The name of the best candidate of each value, one for all that share a scale.

    Where no layer tells (its output is 0 or not finite), the first candidate is taken.
    """
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    groups = {item.name: group_of(item) for item in wanted}
    for (value, candidate, _), error in errors.items():
        if math.isfinite(error.relative):
            scores.setdefault(groups[value], {}).setdefault(candidate, []).append(error.relative)
    chosen = {}
    for item in wanted:
        names, group = tried[item.name], scores.get(groups[item.name], {})
        chosen[item.name] = min(names, key=lambda n, group=group: sum(group.get(n, [math.inf])))  # type: ignore[misc]
    return chosen


def own_db(chosen: Mapping[str, str], errors: Errors) -> dict[str, float]:
    """SQNR in dB of each layer fed with exact inputs in the chosen ranges; of none whose output is 0 or not finite."""
    signal, lost = dict[str, float](), dict[str, float]()
    for (value, candidate, layer), error in errors.items():
        if chosen[value] == candidate:
            signal[layer] = error.signal
            lost[layer] = lost.get(layer, 0.0) + error.error
    usable = [n for n in signal if signal[n] > 0 and lost[n] > 0 and math.isfinite(signal[n] + lost[n])]
    return {n: 10 * math.log10(signal[n] / lost[n]) for n in usable}


def _of_group(
    group: Sequence[str], histograms: Mapping[str, Histogram], bounds: Mapping[str, float], percentile: float
) -> dict[str, float]:
    bound = bound_of(group, histograms, bounds)
    if bound is not None:
        return {BOUND: bound}
    merged = Histogram()
    for name in group:
        merged = merged.merge(histograms[name])
    found: dict[str, float] = {}
    for calibrator in CALIBRATORS:
        value = threshold(merged, calibrator, percentile=percentile)
        if all(abs(value - other) > ALIKE * other for other in found.values()):
            found[calibrator] = value
    return found
