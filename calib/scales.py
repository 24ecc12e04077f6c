"""From a threshold to an int8 scale, and from a weight to its int8 numbers.

Everything is symmetric with zero point 0: TensorRT refuses anything else, and 0 (padding, a closed ReLU) stays 0.

Weights are stored in -127..127, so that w and -w stay mirror images and the range has as many steps on both sides.
Activations are quantised by QuantizeLinear at run time, which saturates int8 at -128..127 in ONNX and in TensorRT
alike: their scale is threshold / 127 too, and -128 is one step of head room below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEVELS = 127
"""Steps from 0 to the threshold in symmetric int8."""

LEAST_SCALE = 2.0**-24
"""Float16's smallest positive number: a scale stays above 0 when a later step casts it to half. Ranges under
127 * 2^-24 = 7.6e-6 get fewer steps for that."""

ZERO_RANGE_SCALE = 1 / LEVELS
"""For a tensor in which only zeros were seen: any scale represents them; this one leaves room up to 1."""


@dataclass(frozen=True, eq=False)
class Int8:
    """A tensor in int8. The float value is `values * scales`, the scales along `axis` (None: one for all).

    Attributes:
        values: int8, the shape of the tensor.
        scales: float32, shape (size of axis,) or ().
    """

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    axis: int | None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """What DequantizeLinear gives back."""
        return self.values.astype(np.float32) * _along(self.scales, self.axis, self.values.ndim)


def scale_of(amax: npt.NDArray[Any] | float) -> npt.NDArray[np.float32]:
    """The scale of each threshold, elementwise: finite, above 0, also after a cast to float16 from below.

    Raises:
        ValueError: a threshold is negative, NaN or infinite.
    """
    threshold = np.asarray(amax, np.float64)
    if not (np.isfinite(threshold) & (threshold >= 0)).all():
        raise ValueError(f"thresholds must be finite and not negative, not {amax}")
    scale = np.maximum(threshold / LEVELS, LEAST_SCALE)
    return np.where(threshold > 0, scale, ZERO_RANGE_SCALE).astype(np.float32)


def channel_amax(weight: npt.NDArray[Any], axis: int | None) -> npt.NDArray[np.float64]:
    """max |w| of each slice along `axis`, shape (size of axis,); of everything, shape (), when axis is None."""
    other_axes = None
    if axis is not None:
        other_axes = tuple(i for i in range(weight.ndim) if i != axis)
    amax: npt.NDArray[np.float64] = np.abs(weight.astype(np.float64)).max(axis=other_axes, initial=0.0)
    return amax


def quantize(weight: npt.NDArray[Any], scales: npt.NDArray[np.float32], axis: int | None) -> Int8:
    """Rounds to the nearest step, ties to even as QuantizeLinear does, within -127..127."""
    steps = np.rint(weight.astype(np.float32) / _along(scales, axis, weight.ndim))
    return Int8(np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scales, axis)


def _along(scales: npt.NDArray[np.float32], axis: int | None, rank: int) -> npt.NDArray[np.float32]:
    """The scales in a shape that broadcasts along `axis` of a tensor of that rank."""
    if axis is None:
        return scales
    shape = [1] * rank
    shape[axis] = -1
    return scales.reshape(shape)
