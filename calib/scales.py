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

LEVELS = 127
"""Steps from 0 to the threshold in symmetric int8."""

LEAST_SCALE = 2.0**-24
"""Float16's smallest positive number: a scale stays above 0 when a later step casts it to half. Ranges under
127 * 2^-24 = 7.6e-6 get fewer steps for that."""

ZERO_RANGE_SCALE = 1 / LEVELS
"""For a tensor in which only zeros were seen: any scale represents them; this one leaves room up to 1."""

_DTYPES: dict[str, tuple[float, Any]] = {
    "int8": (LEVELS, np.int8),
    "uint8": (255, np.uint8),
    "float8e4m3fn": (448.0, ml_dtypes.float8_e4m3fn),
    "int4": (7, ml_dtypes.int4),
    "float4e2m1": (6.0, ml_dtypes.float4_e2m1fn),
}
"""By element type: the number that a threshold is stored as, and numpy's type."""

_LEAST_E4M3 = 2.0**-9


def numpy_dtype(dtype: str) -> Any:
    """numpy's type for an element type of a plan."""
    return np.dtype(_DTYPES[dtype][1])


def greatest(dtype: str) -> float:
    """The number that a threshold is stored as."""
    return _DTYPES[dtype][0]


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight as it is stored. The float value is `values * scales`, the scales along `axis` (None: one for all).

    Attributes:
        values: of the stored type, the shape of the weight.
        scales: float32, shape (size of axis,) or (); for blocks the shape of the weight with one number a block.
        block: elements along the axis that share a scale; 0 for one scale at each position.
        parts: for float4, the scales in float8, and the float32 number that all of them are multiples of.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    axis: int | None
    block: int = 0
    parts: tuple[npt.NDArray[Any], npt.NDArray[np.float32]] | None = None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """What DequantizeLinear gives back."""
        if self.block:
            return self.values.astype(np.float32) * np.repeat(self.scales, self.block, self.axis)
        return self.values.astype(np.float32) * _along(self.scales, self.axis, self.values.ndim)


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
        amax: the threshold.
        dtype: uint8 covers what lies between low and high, and 0; others are symmetric.
        low: least value.
        high: greatest value.
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
    return Stored(_rounded(steps, dtype), scales, axis)


def in_blocks(weight: npt.NDArray[Any], axis: int, block: int, dtype: str) -> Stored:
    """Stores a weight with a scale for each block along `axis`, whose size is a multiple of `block`.

    The scales of float4 are float8 multiples of one number, so that the greatest of them is 448.
    """
    shape = weight.shape
    split = weight.reshape(*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
    amax = np.abs(split.astype(np.float64)).max(axis=axis + 1, initial=0.0)
    parts = None
    # Scales have the type of the weight; numbers are computed with a scale as it is stored.
    if dtype == "float4e2m1":
        exact = amax / _DTYPES[dtype][0]
        whole = scale_of(exact.max(initial=0.0), "float8e4m3fn").astype(weight.dtype).astype(np.float32)
        # A block of tiny numbers has the smallest float8 as its scale, for 0 is none.
        multiples = np.maximum(exact / whole, _LEAST_E4M3).astype(np.float32)
        parts = _rounded(multiples, "float8e4m3fn"), whole
        scales = parts[0].astype(np.float32) * whole
    else:
        scales = scale_of(amax, dtype)
    scales = scales.astype(weight.dtype).astype(np.float32)
    steps = weight.astype(np.float32) / np.repeat(scales, block, axis)
    return Stored(_rounded(steps, dtype), scales, axis, block, parts)


def _rounded(steps: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    top, kind = _DTYPES[dtype]
    # A cast to a float type rounds ties to even as well.
    if "int" in dtype:
        steps = np.rint(steps)
    stored: npt.NDArray[Any] = np.clip(steps, -top, top).astype(kind)
    return stored


def _along(scales: npt.NDArray[np.float32], axis: int | None, rank: int) -> npt.NDArray[np.float32]:
    """The scales in a shape that broadcasts along `axis` of a tensor of that rank."""
    if axis is None:
        return scales
    shape = [1] * rank
    shape[axis] = -1
    return scales.reshape(shape)
