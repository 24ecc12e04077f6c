"""Plans survive JSON as they are."""

import dataclasses

import numpy as np
import pytest

from layerline.calib import assign
from layerline.calib.histogram import Histogram
from layerline.calib.plan import Kept, QuantPlan, Wanted
from layerline.pipeline.errors import StageError


def histogram(*values):
    found = Histogram()
    found.update(np.array(values, np.float32))
    return found


RELU = Wanted(name="relu", role="activation", module="layer1", readers=(("conv2", 0),), why="input of Conv")
WEIGHT = Wanted(name="w", role="weight", module="layer2", axis=0, readers=(("conv2", 1),), why="weight of Conv")
W = np.array([[0.1, -0.3], [0.0, 0.0]], np.float32)


def plan(top=3.0, kept=()):
    values = (
        assign.activation(RELU, {"relu": histogram(0.0, 1.0, top)}, "minmax"),
        assign.weight(WEIGHT, W),
    )
    return QuantPlan(values=values, kept=(Kept(name="fc", op="Gemm", reason="skip"), *kept))


def test_json_is_canonical_and_lossless():
    text = plan().to_json()
    assert QuantPlan.from_json(text) == plan()
    assert QuantPlan.from_json(text).to_json() == text
    assert all(np.float32(s) == s or str(np.float32(s)) == str(s) for v in plan().values for s in v.scales)


def test_numbers_of_an_activation_and_a_weight():
    activation, weight = plan().values
    assert (activation.amax, activation.seen, activation.axis) == (3.0, (0.0, 3.0), None)
    assert activation.scales == (pytest.approx(3 / 127),)
    assert weight.scales == (pytest.approx(0.3 / 127), pytest.approx(1 / 127))
    assert (weight.calibrator, weight.zero_point, weight.dtype) == ("minmax", 0, "int8")


def test_values_that_share_a_scale_are_calibrated_together():
    ranges = {"a": histogram(1.0), "b": histogram(-4.0), "y": histogram(1.0, -4.0)}
    scales: set[tuple[float, ...]] = set()
    for name in ranges:
        wanted = dataclasses.replace(RELU, name=name, shared=tuple(sorted(set(ranges) - {name})))
        scales.add(assign.activation(wanted, ranges, "minmax").scales)
    assert len(scales) == 1 and scales.pop() == (pytest.approx(4 / 127),)


def test_what_is_not_finite_is_named():
    with pytest.raises(StageError, match="w: 1 of 4 weights are not finite"):
        assign.weight(WEIGHT, np.array([[1, np.nan], [2, 3]], np.float32))
    with pytest.raises(StageError, match="relu: calibration saw no finite element"):
        assign.activation(RELU, {"relu": histogram(np.nan)}, "minmax")
