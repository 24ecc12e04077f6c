"""From a histogram to a threshold: the |x| beyond which values are clipped.

Each calibrator is a pure function of the histogram. Zeros say nothing about clipping (a symmetric scale represents 0
exactly, whatever it is), so all of them look at the non-zero values only; the threshold of a tensor of zeros is 0.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from layerline.calib.histogram import Counts, Floats, Histogram
from layerline.calib.scales import LEVELS
from layerline.pipeline.errors import ConfigError

Calibrator = Literal["entropy", "percentile", "minmax", "mse"]

_KL_BINS, _KL_LEVELS = 2048, 128
_KL_CLIPPED = 0.01  # see entropy()
# The MSE search looks at 24 octaves of 128 buckets, and first tries every 16th bucket of the top 12 octaves.
_MSE_BUCKETS = 24 * 128
_COARSE_OCTAVES, _COARSE_STEP = 12, 16


def threshold(histogram: Histogram, calibrator: Calibrator, *, percentile: float = 99.99) -> float:
    """The threshold of one calibrator, by name.

    Raises:
        ConfigError: no such calibrator.
    """
    if calibrator == "percentile":
        return percentile_of(histogram, percentile)
    if calibrator not in get_args(Calibrator):
        raise ConfigError(f"unknown calibrator {calibrator!r}; known: {', '.join(get_args(Calibrator))}")
    return {"minmax": minmax, "entropy": entropy, "mse": mse}[calibrator](histogram)


def minmax(histogram: Histogram) -> float:
    """The greatest |x| seen: nothing is clipped."""
    return histogram.amax


def percentile_of(histogram: Histogram, percentile: float) -> float:
    """The |x| that `percentile` per cent (0..100] of the non-zero values do not exceed.

    Exact to the bucket; inside it, values are taken as evenly spread. Grows with `percentile`.
    """
    if not 0 < percentile <= 100:
        raise ConfigError(f"percentile must be in (0, 100], not {percentile}")
    edges, counts = histogram.nonzero()
    if counts.size == 0:
        return histogram.amax
    below = np.concatenate(([0.0], np.cumsum(counts)))
    return float(np.interp(percentile / 100 * below[-1], below, edges))


def entropy(histogram: Histogram) -> float:
    """The threshold with the least Kullback-Leibler divergence between the values and their 8-bit version.

    After S. Migacz, "8-bit Inference with TensorRT" (GTC 2017): 2,048 equal bins over [0, amax]; the candidate with i
    bins compares P, the first i bins with all outliers added to the last non-empty one, with Q, the same bins without
    outliers averaged over 128 levels. Both are normalised. With S_l the mass of level l and n_l its non-empty bins,
    sum p log(p / q) needs only cumulative sums, so every candidate is evaluated at once.

    The divergence does not see how far a clipped value is from its new place: it is 0 when everything is clipped into
    one bin. So candidates that clip more than 1 % of the values are out, and of equal ones the widest wins.
    """
    edges, counts = histogram.nonzero()
    if counts.size == 0:
        return histogram.amax
    candidates = np.arange(_KL_BINS, _KL_LEVELS - 1, -1)
    best = int(candidates[np.argmin(_divergences(_equal_bins(edges, counts), candidates))])
    return float(edges[-1] * best / _KL_BINS)


def mse(histogram: Histogram) -> float:
    """The threshold with the least mean squared error of rounding to int8 and clipping.

    Inside a bucket values are taken as evenly spread, and the error is integrated exactly over it. Bucket edges are the
    candidates: every sixteenth of the top 12 octaves, then each one around the best.
    """
    edges, counts = histogram.nonzero()
    if counts.size == 0:
        return histogram.amax
    # What lies further down rounds to 0 at every candidate, with an error that decides nothing.
    edges, counts = edges[-_MSE_BUCKETS - 1 :], counts[-_MSE_BUCKETS:]
    top = edges.size - 1
    coarse = np.arange(top, max(0, top - 128 * _COARSE_OCTAVES), -_COARSE_STEP)
    best = int(coarse[np.argmin(_squared_errors(edges, counts, edges[coarse]))])
    fine = np.arange(max(1, best - _COARSE_STEP + 1), min(top, best + _COARSE_STEP - 1) + 1)
    return float(edges[fine[np.argmin(_squared_errors(edges, counts, edges[fine]))]])


def _equal_bins(edges: Floats, counts: Counts) -> Floats:
    """The same mass in 2,048 equal bins over [0, amax]."""
    below = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    ends = np.linspace(0.0, edges[-1], _KL_BINS + 1)
    at = np.interp(ends, edges, below, left=0.0)
    at[-1] = below[-1]
    return np.diff(at)


def _divergences(bins: Floats, candidates: Counts) -> Floats:
    """KL(P || Q) of each candidate; inf for those that clip too much."""
    mass, filled = _before(bins), _before(bins > 0)
    inside, outside = mass[candidates], mass[-1] - mass[candidates]
    level_ends = candidates[:, None] * np.arange(_KL_LEVELS + 1) // _KL_LEVELS
    level_mass, level_filled = np.diff(mass[level_ends], axis=1), np.diff(filled[level_ends], axis=1)
    log_q = _log(level_mass) - _log(level_filled)
    # P differs from the raw bins in the last non-empty one alone, which carries the outliers.
    last = np.maximum.accumulate(np.where(bins > 0, np.arange(_KL_BINS), 0))[candidates - 1]
    last_level = (level_ends[:, 1:] > last[:, None]).argmax(axis=1)
    swollen = bins[last] + outside
    self_term = _before(bins * _log(bins))[candidates] - bins[last] * _log(bins[last]) + swollen * _log(swollen)
    cross_term = (level_mass * log_q).sum(axis=1) + outside * log_q[np.arange(candidates.size), last_level]
    divergence = (self_term - cross_term) / mass[-1] - np.log(mass[-1]) + _log(inside)
    return np.where(outside > _KL_CLIPPED * mass[-1], np.inf, divergence)


def _log(values: Floats) -> Floats:
    """log(x), and 0 for 0: x log x is 0 there."""
    return np.log(np.where(values > 0, values, 1.0))


def _before(values: npt.NDArray[Any]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))


def _squared_errors(edges: Floats, counts: Counts, thresholds: Floats) -> Floats:
    """Total squared error per threshold. Shapes: (n + 1,), (n,), (m,) -> (m,)."""
    step = thresholds[:, None] / LEVELS
    u = edges / step
    nearest = np.minimum(np.floor(u + 0.5), LEVELS)
    # G(u) = integral of (v - round(v))^2 dv from 0: 1/12 for each whole step, r^3/3 within one, and beyond the last
    # step, where rounding saturates, r goes on growing: clipping is the same formula.
    integral = nearest / 12 + (u - nearest) ** 3 / 3
    width = np.diff(u, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(width > 0, np.diff(integral, axis=1) / width, (u - nearest)[:, 1:] ** 2)
    return (mean * step**2) @ counts.astype(np.float64)
