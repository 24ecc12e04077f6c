"""From a threshold to a scale, and from a weight to the numbers that are stored.

Weights are symmetric with zero point 0, so that w and -w stay mirror images and 0 stays 0: int8 uses -127..127. So are
activations, for TensorRT takes nothing else. QuantizeLinear quantises them at run time and saturates int8 at -128..127:
their scale is threshold / 127 too, and -128 is one step of head room below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

# Steps from 0 to the threshold in symmetric int8.
LEVELS = 127

# Float16's smallest positive number: a scale stays above 0 when a later step casts it to half. Ranges under 127 * 2^-24
# = 7.6e-6 get fewer steps for that.
LEAST_SCALE = 2.0**-24

# For a tensor in which only zeros were seen: any scale represents them; this one leaves room up to 1.
ZERO_RANGE_SCALE = 1 / LEVELS

# By element type: the number that a threshold is stored as, and numpy's type.
_DTYPES: dict[str, tuple[float, Any]] = {
    "int8": (LEVELS, np.int8),
    "uint8": (255, np.uint8),
    "float8e4m3fn": (448.0, ml_dtypes.float8_e4m3fn),
    "int4": (7, ml_dtypes.int4),
    "float4e2m1": (6.0, ml_dtypes.float4_e2m1fn),
}

# The least number of a type, where the numbers are not symmetric: a block has no mirror image to keep.
_LEAST = {"int4": -8}
_LEAST_E4M3 = 2.0**-9
# Ranges that are tried for a block, as multiples of its greatest |x|. At 7/8 that number is stored as -8 if it is
# negative. Above 1, the great numbers of float4 lie among 4, 3 and 2, whose neighbours are nearer than those of 6.
_FACTORS = {
    "int4": (1.0, 0.95, 0.9, 7 / 8, 0.85, 0.8, 0.75, 0.7),
    "float4e2m1": (1.0, 0.95, 0.9, 0.85, 0.8, 1.1, 1.2, 1.35, 1.5),
}
# Elements whose ranges are tried at once, which bounds the memory.
_CHUNK = 1 << 20


def numpy_dtype(dtype: str) -> Any:
    """numpy's type for an element type of a plan."""
    return np.dtype(_DTYPES[dtype][1])


def greatest(dtype: str) -> float:
    """The number that a threshold is stored as."""
    return _DTYPES[dtype][0]


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight as it is stored. The float value is `values * scales`, the scales along `axis` (None: one for all)."""

    values: npt.NDArray[Any]  # of the stored type, the shape of the weight
    # float32, shape (size of axis,) or (); for blocks the shape of the weight with one number a block.
    scales: npt.NDArray[np.float32]
    axis: int | None
    block: int = 0  # elements along the axis that share a scale; 0 for one scale at each position.
    # for float4, the scales in float8, and the float32 number that all of them are multiples of
    parts: tuple[npt.NDArray[Any], npt.NDArray[np.float32]] | None = None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """What DequantizeLinear gives back."""
        if self.block:
            return self.values.astype(np.float32) * np.repeat(self.scales, self.block, self.axis)
        return self.values.astype(np.float32) * _along(self.scales, self.axis, self.values.ndim)

    def transposed(self) -> Stored:
        """The same numbers of a weight of two axes, in blocks along the other axis."""
        assert self.axis is not None
        parts = self.parts
        if parts is not None:
            parts = np.ascontiguousarray(parts[0].T), parts[1]
        values, scales = np.ascontiguousarray(self.values.T), np.ascontiguousarray(self.scales.T)
        return Stored(values, scales, 1 - self.axis, self.block, parts)


def scale_of(amax: npt.NDArray[Any] | float, dtype: str = "int8") -> npt.NDArray[np.float32]:
    """The scale of each threshold, elementwise: finite, above 0, also after a cast to float16 from below.

    Raises:
        ValueError: a threshold is negative, NaN or infinite.
    """
    threshold = np.asarray(amax, np.float64)
    if not (np.isfinite(threshold) & (threshold >= 0)).all():
        raise ValueError(f"thresholds must be finite and not negative, not {amax}")
    scale = np.maximum(threshold / _DTYPES[dtype][0], LEAST_SCALE)
    return np.where(threshold > 0, scale, ZERO_RANGE_SCALE).astype(np.float32)


def steps_of(amax: float, dtype: str, low: float, high: float) -> tuple[npt.NDArray[np.float32], int]:
    """The scale and the zero point of an activation.

    Args:
        dtype: uint8 covers what lies between low and high, and 0; others are symmetric.
    """
    if dtype != "uint8":
        return scale_of(amax, dtype), 0
    least, most = min(max(low, -amax), 0.0), max(min(high, amax), 0.0)
    scale = scale_of(most - least, dtype)
    return scale, int(np.clip(np.rint(-least / scale), 0, 255))


def channel_amax(weight: npt.NDArray[Any], axis: int | None) -> npt.NDArray[np.float64]:
    """max |w| of each slice along `axis`, shape (size of axis,); of everything, shape (), when axis is None."""
    other_axes = None
    if axis is not None:
        other_axes = tuple(i for i in range(weight.ndim) if i != axis)
    amax: npt.NDArray[np.float64] = np.abs(weight.astype(np.float64)).max(axis=other_axes, initial=0.0)
    return amax


def quantize(
    weight: npt.NDArray[Any], scales: npt.NDArray[np.float32], axis: int | None, dtype: str = "int8"
) -> Stored:
    """Rounds to the nearest number of the type, ties to even as QuantizeLinear does; beyond the range it saturates."""
    steps = weight.astype(np.float32) / _along(scales, axis, weight.ndim)
    return Stored(to_type(steps, dtype), scales, axis)


def in_blocks(weight: npt.NDArray[Any], axis: int, block: int, dtype: str) -> Stored:
    """Stores a weight with a scale for each block along `axis`, whose size is a multiple of `block`.

    The range of a block is the one of a few with the least squared error.
    """
    whole = whole_scale(weight, dtype)
    split = np.moveaxis(weight, axis, -1)
    shape = (*split.shape[:-1], split.shape[-1] // block)
    rows = split.reshape(-1, block)
    multiples = np.empty(len(rows), np.float32)
    step = max(1, _CHUNK // block)
    for start in range(0, len(rows), step):
        multiples[start : start + step] = block_multiples(rows[start : start + step], whole, dtype)
    multiples = np.ascontiguousarray(np.moveaxis(multiples.reshape(shape), -1, axis))
    scales = stored_scales(multiples, whole, weight.dtype)
    steps = weight.astype(np.float32) / np.repeat(scales, block, axis)
    return Stored(to_type(steps, dtype), scales, axis, block, scale_parts(multiples, whole, dtype))


def whole_scale(weight: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """The number that the scales of all blocks of a weight are multiples of.

    Those of float4 are float8 multiples, of which the greatest is 448. Other types have 1.
    """
    if dtype != "float4e2m1":
        return np.ones((), np.float32)
    amax = np.abs(weight.astype(np.float64)).max(initial=0.0)
    # Scales have the type of the weight; numbers are computed with a scale as it is stored.
    return scale_of(amax / _DTYPES[dtype][0], "float8e4m3fn").astype(weight.dtype).astype(np.float32)


def block_multiples(
    rows: npt.NDArray[Any], whole: npt.NDArray[np.float32], dtype: str, importance: npt.NDArray[Any] | float = 1.0
) -> npt.NDArray[np.float32]:
    """The scale of each row of (blocks, numbers), as a multiple of `whole`.

    Args:
        importance: factors of the squared errors, which broadcast over the rows.
    """
    exact = rows.astype(np.float32)
    amax = np.abs(rows.astype(np.float64)).max(axis=-1, initial=0.0)
    best = np.ones(len(rows), np.float32)
    least = np.full(len(rows), np.inf)
    for factor in _FACTORS[dtype]:
        if dtype == "float4e2m1":
            # A block of tiny numbers has the smallest float8 as its scale, for 0 is none; nor is 0 in float16.
            least_multiple = np.maximum(_LEAST_E4M3, LEAST_SCALE / whole)
            multiples = np.maximum(amax * factor / _DTYPES[dtype][0] / whole, least_multiple).astype(np.float32)
            multiples = to_type(multiples, "float8e4m3fn").astype(np.float32)
        else:
            multiples = scale_of(amax * factor, dtype)
        scales = stored_scales(multiples, whole, rows.dtype)[:, None]
        error = np.square(to_type(exact / scales, dtype).astype(np.float32) * scales - exact) * importance
        noise = error.sum(axis=-1)
        best = np.where(noise < least, multiples, best)
        least = np.minimum(noise, least)
    return best


def stored_scales(multiples: npt.NDArray[np.float32], whole: npt.NDArray[np.float32], kind: Any) -> npt.NDArray[Any]:
    """The scales as float32, rounded to the type `kind` that they are stored in."""
    scales: npt.NDArray[Any] = (multiples * whole).astype(kind).astype(np.float32)
    return scales


def scale_parts(
    multiples: npt.NDArray[np.float32], whole: npt.NDArray[np.float32], dtype: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]] | None:
    """The parts of the scales of a `Stored`; None where each is one number."""
    if dtype != "float4e2m1":
        return None
    return to_type(multiples, "float8e4m3fn"), whole


def to_type(steps: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Numbers in steps, rounded to the type: to the nearest, ties to even; beyond the range they saturate."""
    top, kind = _DTYPES[dtype]
    # A cast to a float type rounds ties to even as well.
    if "int" in dtype:
        steps = np.rint(steps)
    stored: npt.NDArray[Any] = np.clip(steps, _LEAST.get(dtype, -top), top).astype(kind)
    return stored


def _along(scales: npt.NDArray[np.float32], axis: int | None, rank: int) -> npt.NDArray[np.float32]:
    """The scales in a shape that broadcasts along `axis` of a tensor of that rank."""
    if axis is None:
        return scales
    shape = [1] * rank
    shape[axis] = -1
    return scales.reshape(shape)
