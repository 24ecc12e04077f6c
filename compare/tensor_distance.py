"""How far apart two tensors are, as sums that add up over samples: what is kept does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.pipeline.report import Scalar, decibels

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Sums over one or more pairs of tensors; the measures are properties, the definitions are those of `LayerDiff`.

    The first six are over the elements that both sides have finite and no mask hides.
    """

    count: int = 0  # number of those elements
    aa: float = 0.0  # sum of a²
    bb: float = 0.0  # sum of b²
    ee: float = 0.0  # sum of (a - b)²
    l1: float = 0.0  # sum of |a - b|
    peak: float = 0.0  # max |a - b|
    nonfinite_a: int = 0  # NaN and Inf elements of a
    nonfinite_b: int = 0  # NaN and Inf elements of b
    one_sided: int = 0  # elements non-finite on one side only, or NaN against Inf, or Inf of the other sign
    masked: int = 0  # elements that a mask hides on both sides (see `hidden`)
    mismatch: str = ""  # what keeps the two from being compared at all ("shape (3, 1) against (3, 3)")

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            count=self.count + other.count,
            aa=self.aa + other.aa,
            bb=self.bb + other.bb,
            ee=self.ee + other.ee,
            l1=self.l1 + other.l1,
            peak=max(self.peak, other.peak),
            nonfinite_a=self.nonfinite_a + other.nonfinite_a,
            nonfinite_b=self.nonfinite_b + other.nonfinite_b,
            one_sided=self.one_sided + other.one_sided,
            masked=self.masked + other.masked,
            mismatch=self.mismatch or other.mismatch,
        )

    @property
    def max_abs(self) -> float:
        if self.mismatch:
            return math.inf
        return self.peak

    @property
    def mean_abs(self) -> float:
        if self.mismatch:
            return math.inf
        return self.l1 / max(self.count, 1)

    @property
    def rel_l2(self) -> float:
        """‖a - b‖ / ‖a‖, or ‖a - b‖ where ‖a‖ is 0."""
        if self.mismatch:
            return math.inf
        # Roots before the quotient: the quotient of the squares may overflow where that of the norms does not.
        return math.sqrt(self.ee) / (math.sqrt(self.aa) or 1.0)

    @property
    def cosine(self) -> float | None:
        """From the three sums without cancellation: 1 - cos = (‖a-b‖² - (‖a‖-‖b‖)²) / (2‖a‖‖b‖)."""
        if self.mismatch:
            return None
        na, nb = math.sqrt(self.aa), math.sqrt(self.bb)
        if not na or not nb:
            return 1.0 if na == nb else 0.0
        return 1.0 - max(self.ee - (na - nb) ** 2, 0.0) / (2.0 * na * nb)

    @property
    def sqnr_db(self) -> float | None:
        if self.mismatch:
            return None
        return decibels(self.aa, self.ee)

    @property
    def flags(self) -> dict[str, Scalar]:
        """Remarks beside the numbers: why there are none, or which elements they leave out."""
        if self.mismatch:
            return {"mismatch": self.mismatch}
        flags: dict[str, Scalar] = {}
        if self.masked:
            flags["masked"] = self.masked
        if self.nonfinite_a and not self.one_sided:
            flags["flag"] = "NaN or Inf on both sides"
        return flags

    def measures(self) -> dict[str, Any]:
        """The fields of a LayerDiff that this determines."""
        names = ("max_abs", "mean_abs", "rel_l2", "cosine", "sqnr_db", "nonfinite_a", "nonfinite_b", "one_sided")
        return {name: getattr(self, name) for name in names}


def diff_arrays(a: Any, b: Any) -> Distance:
    """The distance of `b` from its reference `a`: arrays of any element type, sequences of them, or None.

    Differences are taken in float64, so that neither float32 sums nor values near 1e38 lose anything.
    Different shapes are a mismatch, never broadcast.
    """
    if a is None and b is None:
        return Distance()
    if a is None or b is None:
        return Distance(mismatch="absent on one side")
    if isinstance(a, Sequence) and not isinstance(a, str):
        if not isinstance(b, Sequence) or len(a) != len(b):
            other = type(b).__name__
            if isinstance(b, Sequence):
                other = f"a sequence of {len(b)}"
            return Distance(mismatch=f"a sequence of {len(a)} against {other}")
        return sum((diff_arrays(x, y) for x, y in zip(a, b, strict=True)), Distance())
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype.kind == "c" or y.dtype.kind == "c":
        # ONNX holds complex numbers as pairs along a new last axis. A real side of the same shape has imaginary part 0.
        same_shape = x.shape == y.shape
        if x.dtype.kind == "c" or same_shape:
            x = _pairs(x)
        if y.dtype.kind == "c" or same_shape:
            y = _pairs(y)
    if x.shape != y.shape:
        return Distance(mismatch=f"shape {x.shape} against {y.shape}")
    if x.dtype.kind in "OSU" or y.dtype.kind in "OSU":
        return _numeric(np.zeros(x.shape), np.asarray(x != y, np.float64))
    return _numeric(x, y)


def _pairs(v: Array) -> Array:
    """(real, imaginary) along one axis more."""
    return np.stack([v.real, v.imag], -1).astype(np.float64)


# Elements taken at a time. Their float64 copies stay in the processor's cache, and sums of so few elements don't start
# the threads of the linear algebra library, which are slow on a busy machine.
_BLOCK = 1 << 13


# Additive masks: what frameworks and models add to scores to hide some (-1e4, -65504, -1e9, the lowest float, …).
LEAST_MASK = 9e3
GREAT_MASK = 1e15  # anything as large is no score; below it, only powers of ten and half's lowest number are masks
HALF_LOWEST = 65504.0
HALF_MASK = 6e4  # both sides this low: one of them may be clamped to half's range
GAP = 10.0  # times the greatest number that is not masked
NEAR = 1e-3  # relative; half precision rounds a mask no further
# Mean square from which on a tensor is looked at for masked elements: one in 10,000 at -1e4 gives as much.
LARGE = 1e4


def hidden(x: Array, y: Array) -> npt.NDArray[np.bool_]:
    """Elements that a mask hides on both sides. They are so large that errors of the others would not show.

    An element of `x` is masked where it is a mask's number, within twice the greatest other number, and far beyond all
    others. It is left out only where `y` is masked there too.
    """
    a, b = x.astype(np.float64), y.astype(np.float64)
    size = np.abs(a)
    finite = np.isfinite(a) & np.isfinite(b)
    far = (a <= -LEAST_MASK) | (size >= GREAT_MASK)
    rest = size[finite & ~far]
    if not rest.size:
        return np.zeros(a.shape, np.bool_)
    peak = float(rest.max())
    with np.errstate(all="ignore"):
        ten = 10.0 ** np.round(np.log10(size))
        slack = 2.0 * peak + NEAR * size
        is_mask = (size >= GREAT_MASK) | (np.abs(size - ten) <= slack) | (np.abs(size - HALF_LOWEST) <= slack)
        clamped = (size >= HALF_MASK) & (np.sign(a) * b >= HALF_MASK)
        alike = (np.abs(a - b) <= NEAR * size) | clamped
    masked: npt.NDArray[np.bool_] = finite & far & is_mask & (size >= GAP * peak) & alike
    return masked


def _numeric(x: Array, y: Array) -> Distance:
    exact = {x.dtype.kind, y.dtype.kind} <= set("iub")
    x, y = x.reshape(-1), y.reshape(-1)
    total = _blocks(x, y, exact)
    if exact or total.aa < LARGE * total.count:
        return total
    masked = hidden(x, y)
    if not masked.any():
        return total
    return _blocks(x[~masked], y[~masked], exact) + Distance(masked=int(masked.sum()))


def _blocks(x: Array, y: Array, exact: bool) -> Distance:
    total = Distance()
    for start in range(0, x.size, _BLOCK):
        stop = start + _BLOCK
        total += _block(x[start:stop], y[start:stop], exact)
    return total


def _block(x: Array, y: Array, exact: bool) -> Distance:
    a, b = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.abs(a - b)
        if exact:
            # Integers past 2^53 collapse in float64; two that differ must never look equal.
            e = np.maximum(e, x != y)
        aa, bb, ee = float(a @ a), float(b @ b), float(e @ e)
    if math.isfinite(aa + bb + ee):
        return Distance(count=a.size, aa=aa, bb=bb, ee=ee, l1=float(e.sum()), peak=float(e.max(initial=0.0)))
    bad_a, bad_b = ~np.isfinite(a), ~np.isfinite(b)
    bad = bad_a | bad_b
    if not bad.any():  # squares that overflow even float64
        return Distance(count=a.size, aa=aa, bb=bb, ee=ee, l1=float(e.sum()), peak=float(e.max()))
    same = (np.isnan(a) & np.isnan(b)) | (a == b)
    counted = Distance(nonfinite_a=int(bad_a.sum()), nonfinite_b=int(bad_b.sum()), one_sided=int((bad & ~same).sum()))
    return _block(a[~bad], b[~bad], False) + counted
