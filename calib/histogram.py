"""What calibration remembers of a tensor: an exact, range-free histogram that needs one pass and constant memory.

The upper 16 bits of a float32 are its bfloat16 bucket. Counting them needs no first pass and no guess of the range,
whatever the values are; counts of two shards add up to the counts of their union, so the result does not depend on the
order or the grouping of the samples. A bucket is at most 1/128 of its magnitude wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Buckets of |x|: 8 exponent and 7 mantissa bits. Bucket 0 holds 0 (and |x| < 2^-133).
BUCKETS = 1 << 15
# From this bucket on, values are Inf or NaN.
INFINITE = 0x7F80
PROFILE_BINS = 64
_CHUNK = 1 << 18  # bounds the working memory; a megabyte of float32 stays in cache
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(eq=False)
class Histogram:
    """Counts of |x| by bfloat16 bucket, with the exact extremes of x."""

    # int64 of shape (BUCKETS,); Inf and NaN are counted apart.
    counts: Counts = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    low: float = math.inf  # least finite value, exact in float32; +inf while nothing was seen.
    high: float = -math.inf  # greatest finite value, exact in float32; -inf while nothing was seen.
    nan: int = 0  # NaN elements
    inf: int = 0  # infinite elements, of either sign

    def update(self, array: npt.NDArray[Any]) -> None:
        """Adds every element of an array of any real type and shape.

        float64 values beyond float32's range count at float32's greatest value.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        signed = np.zeros(2 * BUCKETS, np.int64)
        for start in range(0, flat.size, _CHUNK):
            part = _float32(flat[start : start + _CHUNK])
            signed += np.bincount(part.view(np.uint32) >> 16, minlength=2 * BUCKETS)
            self._extremes(part)
        both = signed[:BUCKETS] + signed[BUCKETS:]
        both[INFINITE:] = 0
        self.counts += both

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values together."""
        return Histogram(
            self.counts + other.counts,
            min(self.low, other.low),
            max(self.high, other.high),
            self.nan + other.nan,
            self.inf + other.inf,
        )

    @property
    def count(self) -> int:
        """Finite elements seen."""
        return int(self.counts.sum())

    @property
    def amax(self) -> float:
        """Greatest finite |x|, exact in float32; 0 while nothing was seen."""
        if self.low > self.high:
            return 0.0
        return max(abs(self.low), abs(self.high))

    def nonzero(self) -> tuple[Floats, Counts]:
        """The buckets from the first to the last that holds a non-zero magnitude.

        Returns:
            Edges in ascending order, shape (n + 1,), and counts, shape (n,). The last edge is `amax` itself: no
            calibrator may believe in values that were never seen. Empty when only zeros, or nothing, were seen.
        """
        used = np.flatnonzero(self.counts[1:]) + 1
        if used.size == 0:
            return np.zeros(1), np.zeros(0, np.int64)
        first, last = int(used[0]), int(used[-1])
        edges = bucket_floor(np.arange(first, last + 2))
        edges[-1] = self.amax
        return edges, self.counts[first : last + 1]

    def beyond(self, amax: float) -> float:
        """Share of the finite elements with |x| > amax, in 0..1; inside a bucket values are taken as evenly spread."""
        if amax >= self.amax or self.count == 0:
            return 0.0
        edges, counts = self.nonzero()
        below = np.concatenate(([0], np.cumsum(counts)))
        return float((below[-1] - np.interp(amax, edges, below)) / self.count)

    def drawn(self, amax: float) -> dict[str, float | str]:
        """The profile up to the end of a range or to the greatest value, whichever is greater; and both ends."""
        end = max(amax, self.amax)
        return {"range": shortest(amax), "end": shortest(end), "profile": self.profile(end)}

    def profile(self, end: float) -> str:
        """The shape of the histogram as PROFILE_BINS characters: bins of |x| of equal width from 0 to `end`.

        A character is a digit of base 36 on a logarithmic scale: `z` is all elements, `0` is none, and a step of 5.8 is
        a factor of ten. Shares of 1e-6 and less that are not 0 are `1`.
        """
        edges, counts = self.nonzero()
        below = np.concatenate(([0], np.cumsum(counts)))
        reached = np.interp(np.linspace(0.0, end, PROFILE_BINS + 1), edges, below) + self.count - below[-1]
        reached[0] = 0  # zeros are in the first bin
        shares = np.diff(reached) / max(self.count, 1)
        digits = np.zeros(PROFILE_BINS, int)
        some = shares > 0
        digits[some] = np.clip(np.rint(35 * (1 + np.log10(shares[some]) / 6)), 1, 35)
        return "".join(np.base_repr(digit, 36).lower() for digit in digits)

    def _extremes(self, part: npt.NDArray[np.float32]) -> None:
        low, high = float(part.min()), float(part.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            missing = int(np.isnan(part).sum())
            finite = part[np.isfinite(part)]
            self.nan += missing
            self.inf += part.size - finite.size - missing
            if finite.size == 0:
                return
            low, high = float(finite.min()), float(finite.max())
        self.low, self.high = min(self.low, low), max(self.high, high)


def bucket_floor(bucket: npt.NDArray[Any]) -> Floats:
    """Least magnitude of each bucket, as float64; bucket INFINITE has float32's greatest value as its floor."""
    floors = (np.asarray(bucket, np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.minimum(floors, _GREATEST)


def _float32(part: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if part.dtype == np.float32:
        return part.view(np.float32)
    with np.errstate(over="ignore"):
        single: npt.NDArray[np.float32] = part.astype(np.float32)
    if part.dtype == np.float64 and np.isinf(single).any():
        overflown = np.isinf(single) & np.isfinite(part)
        single[overflown] = np.copysign(np.float32(_GREATEST), single[overflown])
    return single


def shortest(value: float | np.floating[Any]) -> float:
    """The shortest decimal that is the same float32: readable, and the same text on every machine."""
    return float(str(np.float32(value)))
