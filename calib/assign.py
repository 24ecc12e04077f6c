"""Numbers for a plan: a scale for each wanted value, from its histogram or its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.calib.calibrators import Calibrator, threshold
from layerline.calib.histogram import Histogram, shortest
from layerline.calib.plan import QuantValue, Wanted
from layerline.calib.range_candidates import BOUND
from layerline.calib.scales import channel_amax, scale_of, steps_of
from layerline.pipeline.errors import StageError


def activation(
    wanted: Wanted,
    histograms: Mapping[str, Histogram],
    calibrator: Calibrator,
    *,
    percentile: float = 99.99,
    chosen: tuple[str, float] | None = None,
) -> QuantValue:
    """One scale for an activation, from its own histogram and those it shares its scale with.

    Args:
        chosen: a threshold that was chosen already, with the name of what it comes from.

    Raises:
        StageError: calibration saw no finite element of it.
    """
    histogram = histograms[wanted.name]
    merged = histogram
    for name in wanted.shared:
        merged = merged.merge(histograms[name])
    if merged.count == 0:
        raise StageError("calibration saw no finite element of this value", where=wanted.name, hint="skip it")
    if chosen is None:
        chosen = (calibrator, threshold(merged, calibrator, percentile=percentile))
    name, amax = chosen
    observed = (0.0, 0.0)
    if histogram.count:
        observed = (histogram.low, histogram.high)
    low, high = merged.low, merged.high
    if name == BOUND:
        low, high = min(np.sign(low), 0.0) * amax, amax
    scale, zero_point = steps_of(amax, wanted.dtype, low, high)
    if wanted.block:
        # The number that the scales of blocks, which are computed while running, are multiples of.
        scale = scale_of(float(scale), "float8e4m3fn")
    return dataclasses.replace(_value(wanted, scale, amax, observed, name), zero_point=zero_point)


def weight(wanted: Wanted, array: npt.NDArray[Any]) -> QuantValue:
    """The scales of a weight: its exact maxima, per slice along `wanted.axis`, or one.

    Raises:
        StageError: NaN or Inf among the weights; says how many.
    """
    bad = int(array.size - np.isfinite(array).sum())
    if bad:
        raise StageError(f"{bad} of {array.size} weights are not finite", where=wanted.name)
    amax = channel_amax(array, wanted.axis)
    scales = scale_of(amax, wanted.dtype)
    calibrator = "minmax"
    if wanted.block:
        # The scale of each block is chosen when it is written, by the least squared error.
        scales = scales[:0]
        calibrator = "mse"
    observed = (0.0, 0.0)
    if array.size:
        observed = (float(array.min()), float(array.max()))
    return _value(wanted, scales, float(amax.max(initial=0.0)), observed, calibrator)


def _value(
    wanted: Wanted, scales: npt.NDArray[np.float32], amax: float, observed: tuple[float, float], calibrator: str
) -> QuantValue:
    return QuantValue(
        # Not asdict(): it would copy the readers into lists.
        **{f.name: getattr(wanted, f.name) for f in dataclasses.fields(Wanted)},
        scales=tuple(shortest(s) for s in scales.reshape(-1)),
        amax=shortest(amax),
        seen=(shortest(observed[0]), shortest(observed[1])),
        calibrator=calibrator,
    )
