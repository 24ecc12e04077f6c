"""Scales are usable whatever the range, and weights come back within half a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerline.calib.scales import LEAST_SCALE, LEVELS, ZERO_RANGE_SCALE, channel_amax, quantize, scale_of

TENSORS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=4, max_side=4),
    elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 1e-12, -1e-40]),
)


@given(st.floats(0, 3e38) | st.sampled_from([0.0, 5e-324, 1e-45, 1e-12]))
def test_every_scale_is_finite_and_above_zero_also_in_half(amax):
    scale = scale_of(amax)
    assert np.isfinite(scale) and scale > 0
    with np.errstate(over="ignore"):
        assert np.float16(scale) > 0


def test_zero_tiny_and_ordinary_ranges():
    assert scale_of(0.0) == np.float32(ZERO_RANGE_SCALE)
    assert scale_of(1e-12) == np.float32(LEAST_SCALE) == np.finfo(np.float16).smallest_subnormal
    assert scale_of(np.array([2.0, 254.0])).tolist() == [np.float32(2 / 127), 2.0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, np.array([1.0, np.nan])])
def test_a_threshold_that_is_no_range_never_becomes_a_scale(wrong):
    with pytest.raises(ValueError, match="thresholds"):
        scale_of(wrong)


@given(TENSORS, st.data())
@settings(max_examples=80, deadline=None)
def test_a_weight_comes_back_within_half_a_step_of_its_channel(weight, data):
    axis = data.draw(st.none() | st.integers(0, weight.ndim - 1))
    scales = scale_of(channel_amax(weight, axis))
    int8 = quantize(weight, scales, axis)
    assert np.abs(int8.values.astype(int)).max() <= LEVELS
    assert (int8.dequantized()[weight == 0] == 0).all()
    assert scales.shape == (() if axis is None else (weight.shape[axis],))
    steps = scales if axis is None else scales.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    assert (np.abs(int8.dequantized() - weight) <= 0.501 * steps).all()
    assert (quantize(-weight, scales, axis).values == -int8.values).all()


def test_a_dead_and_a_tiny_channel_do_not_disturb_their_neighbours():
    weight = np.array([[0.5, -1.0], [0.0, 0.0], [1e-12, -1e-12]], np.float32)
    int8 = quantize(weight, scale_of(channel_amax(weight, 0)), 0)
    assert int8.values.tolist() == [[64, -127], [0, 0], [0, 0]]
    assert int8.dequantized()[0] == pytest.approx(weight[0], abs=0.004)
