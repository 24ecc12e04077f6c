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
    "float8e4m3fn": (448.0, ml_dtypes.float8_e4m3fn),
}
"""By element type: the number that a threshold is stored as, and numpy's type."""


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
        scales: float32, shape (size of axis,) or ().
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    axis: int | None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """What DequantizeLinear gives back."""
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


def _rounded(steps: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    top, kind = _DTYPES[dtype]
    # A cast to a float type rounds ties to even as well.
    if "int" in dtype:
        steps = np.rint(steps)
    return np.clip(steps, -top, top).astype(kind)


def _along(scales: npt.NDArray[np.float32], axis: int | None, rank: int) -> npt.NDArray[np.float32]:
    """The scales in a shape that broadcasts along `axis` of a tensor of that rank."""
    if axis is None:
        return scales
    shape = [1] * rank
    shape[axis] = -1
    return scales.reshape(shape)
