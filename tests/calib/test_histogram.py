"""Histograms are exact, range-free and add up."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerline.calib.histogram import BUCKETS, INFINITE, Histogram, bucket_floor

FLOATS = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


def of(*arrays):
    histogram = Histogram()
    for array in arrays:
        histogram.update(np.asarray(array))
    return histogram


def same(a, b):
    scalars = [(h.low, h.high, h.nan, h.inf) for h in (a, b)]
    return scalars[0] == scalars[1] and bool((a.counts == b.counts).all())


@given(FLOATS, FLOATS)
@settings(max_examples=60, deadline=None)
def test_merging_shards_gives_the_histogram_of_all_values(a, b):
    whole = of(np.concatenate([a, b]))
    assert same(of(a).merge(of(b)), whole)
    assert same(of(b).merge(of(a)), whole)
    assert same(of(a, b), whole)


@given(FLOATS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_order_and_shape_do_not_matter(array, random):
    shuffled = array.tolist()
    random.shuffle(shuffled)
    assert same(of(np.array(shuffled, np.float32)), of(array.reshape(1, -1, 1)))


@given(FLOATS)
@settings(max_examples=60, deadline=None)
def test_counts_and_extremes_are_exact(array):
    histogram, finite = of(array), array[np.isfinite(array)]
    assert histogram.count == finite.size
    assert histogram.nan == np.isnan(array).sum()
    assert histogram.inf == np.isinf(array).sum()
    if finite.size:
        assert (histogram.low, histogram.high) == (finite.min(), finite.max())
        assert histogram.amax == np.abs(finite).max()
    floors = bucket_floor(np.arange(INFINITE))
    places = np.searchsorted(floors, np.abs(finite.astype(np.float64)), side="right") - 1
    assert (histogram.counts == np.bincount(places, minlength=BUCKETS)).all()


def test_buckets_are_bfloat16_and_never_wider_than_a_128th():
    floors = bucket_floor(np.arange(0x80, 0x7F80))
    assert (np.diff(floors) / floors[:-1] <= 1 / 128).all()
    assert of([1.0, 1.0078124, 1.0078125]).counts[0x3F80:0x3F82].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int8", "uint8", "int64", "bool"])
def test_every_real_type_counts_as_its_float32(dtype):
    import ml_dtypes

    array = np.array([0, 1, 1, 0, 1]).astype(getattr(ml_dtypes, dtype, dtype))
    assert same(of(array), of(array.astype(np.float32)))


def test_a_double_beyond_float32_stays_finite_and_a_true_infinity_does_not():
    histogram = of(np.array([1e300, -1e300, np.inf, 1.0]))
    assert (histogram.count, histogram.inf) == (3, 1)
    assert histogram.high == -histogram.low == np.finfo(np.float32).max


def test_views_of_any_stride_and_arrays_larger_than_a_chunk():
    array = np.random.default_rng(0).standard_normal((3, 1 << 18), dtype=np.float32)
    assert same(of(array[:, ::-2].T), of(np.ascontiguousarray(array[:, ::-2])))
    assert of(array).count == array.size


def test_nothing_seen_and_only_zeros_seen():
    assert of().amax == of([0.0, -0.0]).amax == 0.0
    assert of().count == 0
    assert of([0.0]).nonzero()[1].size == 0
    assert of([np.nan]).count == 0


@pytest.mark.parametrize("amax", [0.5, 1.0, 2.0, 3.3])
def test_share_beyond_a_threshold(amax):
    array = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    assert of(array).beyond(amax) == pytest.approx((np.abs(array) > amax).mean(), abs=2e-3)
    assert of(array).beyond(math.inf) == 0.0


def test_a_profile_is_a_logarithmic_picture_of_the_shares() -> None:
    histogram = Histogram()
    histogram.update(np.array([0.0] * 989_999 + [0.5] * 10_000 + [-3.0], np.float32))
    profile = histogram.profile(4.0)
    # Bins of 1/16: 0.99 is 35 of 35; 0.01 is 35 * (1 - 2 / 6) = 23.3; one in a million is above 0.
    assert len(profile) == 64 and {i: digit for i, digit in enumerate(profile) if digit != "0"} == {
        0: "z",
        8: "n",
        47: "1",
    }
    assert Histogram().profile(1.0) == "0" * 64
