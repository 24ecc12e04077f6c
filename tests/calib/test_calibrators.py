"""Thresholds: properties that hold for any data, and agreement with slow, plain versions of each formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerline.calib.calibrators import entropy, minmax, mse, percentile_of, threshold
from layerline.calib.histogram import Histogram
from layerline.calib.scales import LEVELS, scale_of
from layerline.pipeline.errors import ConfigError

ARRAYS = hnp.arrays(
    np.float32,
    st.integers(0, 40),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1e-40, 3e38, -1.0]),
)
ALL = ("minmax", "entropy", "mse", "percentile")
RNG = np.random.default_rng(0)
SAMPLES = {
    "normal": RNG.standard_normal(50_000),
    "relu": np.maximum(RNG.standard_normal(50_000), 0),
    "laplace": RNG.laplace(size=50_000),
    "heavy": RNG.standard_t(3, 50_000),
    "uniform": RNG.uniform(-1, 1, 50_000),
}


def of(array):
    histogram = Histogram()
    histogram.update(np.asarray(array, np.float32))
    return histogram


def error(array, amax):
    step = amax / LEVELS
    return np.square(np.clip(np.rint(array / step), -LEVELS, LEVELS) * step - array).mean()


@given(ARRAYS, st.sampled_from(ALL))
@settings(max_examples=60, deadline=None)
def test_a_threshold_never_exceeds_what_was_seen_and_always_gives_a_usable_scale(array, calibrator):
    found = threshold(of(array), calibrator)
    assert 0 <= found <= np.abs(array).max(initial=0.0)
    assert (found > 0) == bool(np.abs(array).max(initial=0.0) > 0)
    assert np.isfinite(scale_of(found)) and scale_of(found) > 0


@given(ARRAYS, st.sampled_from(ALL), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_neither_order_nor_sharding_changes_a_threshold(array, calibrator, random):
    shuffled = array.tolist()
    random.shuffle(shuffled)
    cut = len(shuffled) // 3
    sharded = of(shuffled[:cut]).merge(of(shuffled[cut:]))
    assert threshold(sharded, calibrator) == threshold(of(array), calibrator)


@given(ARRAYS, st.floats(0.01, 100), st.floats(0.01, 100))
@settings(max_examples=80, deadline=None)
def test_a_higher_percentile_never_gives_a_lower_threshold(array, a, b):
    low, high = sorted((a, b))
    assert percentile_of(of(array), low) <= percentile_of(of(array), high)
    assert percentile_of(of(array), 100) == minmax(of(array))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("percentile", [50, 99, 99.9])
def test_percentile_agrees_with_numpy_to_a_bucket(name, percentile):
    array = SAMPLES[name]
    expected = np.percentile(np.abs(array[array != 0]), percentile)
    assert percentile_of(of(array), percentile) == pytest.approx(expected, rel=1 / 128)


@pytest.mark.parametrize("name", SAMPLES)
def test_mse_is_as_good_as_a_search_over_the_values_themselves(name):
    array = SAMPLES[name]
    best = min(error(array, t) for t in np.linspace(0.02, 1, 150) * np.abs(array).max())
    assert error(array, mse(of(array))) <= best * 1.02


def reference_entropy(histogram):
    """The algorithm as the talk tells it, candidate by candidate."""
    edges, counts = histogram.nonzero()
    below = np.concatenate(([0.0], np.cumsum(counts)))
    bins = np.diff(np.interp(np.linspace(0, edges[-1], 2049), edges, below, left=0.0))
    best = (np.inf, 0)
    for i in range(128, 2049):
        raw, outside = bins[:i], bins[i:].sum()
        if outside > 0.01 * bins.sum():
            continue
        p = raw.copy()
        p[np.flatnonzero(raw)[-1]] += outside
        starts = np.arange(128) * i // 128
        level = np.repeat(np.arange(128), np.diff([*starts, i]))
        filled = np.maximum(np.add.reduceat((raw > 0).astype(int), starts), 1)
        q = np.where(raw > 0, (np.add.reduceat(raw, starts) / filled)[level], 0)
        p, q = p[p > 0] / p.sum(), q[p > 0] / q.sum()
        best = min(best, ((p * np.log(p / q)).sum(), i))
    return edges[-1] * best[1] / 2048


@pytest.mark.parametrize("name", ["heavy", "relu", "laplace"])
def test_entropy_is_the_published_algorithm(name):
    histogram = of(SAMPLES[name])
    assert entropy(histogram) == pytest.approx(reference_entropy(histogram), rel=1e-3)


def test_entropy_leaves_a_lone_outlier_behind_but_never_a_hundredth_of_the_values():
    assert entropy(of([*SAMPLES["normal"], 1000.0])) < 80
    assert entropy(of([1.0, 2.0, 3.0])) == 3.0
    assert entropy(of([*np.ones(1000), *np.full(20, 50.0)])) == pytest.approx(50.0, rel=1e-2)


@pytest.mark.parametrize("calibrator", ALL)
def test_zeros_are_ignored_and_a_constant_is_kept(calibrator):
    constant = threshold(of(np.full(100, 0.3)), calibrator)
    assert constant == pytest.approx(0.3, rel=0.01)
    assert threshold(of([*np.zeros(100_000), *np.full(100, 0.3)]), calibrator) == constant
    assert threshold(of(np.zeros(10)), calibrator) == 0.0


def test_what_is_not_a_calibrator_or_a_percentile_is_refused():
    with pytest.raises(ConfigError, match="'max'; known: entropy, percentile, minmax, mse"):
        threshold(of([1.0]), "max")
    for wrong in (0.0, -1.0, 100.1):
        with pytest.raises(ConfigError, match=r"\(0, 100\]"):
            percentile_of(of([1.0]), wrong)
