"""Which range an activation gets: the one with the least error at its readers, or its bound."""

import itertools

import numpy as np
import pytest

from layerline.calib.histogram import Histogram
from layerline.calib.plan import Wanted
from layerline.calib.range_candidates import BOUND, SHIFT_WEIGHT, Error, best, bound_of, candidates, layer_sqnr


def wanted(name, *shared):
    return Wanted(name=name, role="activation", shared=shared, readers=(("y", 0),), why="")


def histogram(*numbers):
    out = Histogram()
    out.update(np.float32(numbers))
    return out


SPREAD = histogram(*np.linspace(-1, 1, 999), 50)


def test_candidates_are_the_thresholds_that_differ():
    tried = candidates([wanted("x")], {"x": SPREAD}, {}, percentile=99)["x"]
    values = sorted(tried.values())
    assert values[-1] == pytest.approx(50, rel=0.02) and tried["percentile"] < 1.1
    assert all(b > 1.02 * a for a, b in itertools.pairwise(values))
    assert len(candidates([wanted("x")], {"x": histogram(1, 1, 1)}, {}, percentile=99.99)["x"]) == 1


def test_a_bounded_value_has_its_bound_alone_and_a_group_the_greatest_of_its_bounds():
    histograms = {"a": histogram(0.1, 0.177), "b": histogram(5.0)}
    assert candidates([wanted("a")], histograms, {"a": 1.0}, percentile=99.99) == {"a": {BOUND: 1.0}}
    both = candidates([wanted("a", "b"), wanted("b", "a")], histograms, {"a": 1.0, "b": 6.0}, percentile=99.99)
    assert both == {"a": {BOUND: 6.0}, "b": {BOUND: 6.0}}
    assert BOUND not in candidates([wanted("a", "b")], histograms, {"a": 1.0}, percentile=99.99)["a"]


@pytest.mark.parametrize(("bound", "reached", "taken"), [(6, 1.5, True), (6, 1.4, False), (1, 0.001, True)])
def test_a_bound_far_beyond_all_numbers_bounds_nothing(bound, reached, taken):
    assert bound_of(["a"], {"a": histogram(reached)}, {"a": float(bound)}) == (bound if taken else None)


def test_the_candidate_with_the_least_relative_error_over_all_readers_wins():
    tried = {"x": {"mse": 1.0, "minmax": 2.0}}
    errors = {
        ("x", "mse", "small"): Error(signal=1.0, error=0.5), ("x", "mse", "large"): Error(signal=1e6, error=1.0),
        ("x", "minmax", "small"): Error(signal=1.0, error=0.1), ("x", "minmax", "large"): Error(signal=1e6, error=1e4),
    }  # fmt: skip
    assert best([wanted("x")], tried, errors) == {"x": "minmax"}
    assert layer_sqnr({"x": "minmax"}, errors) == {"small": pytest.approx(10), "large": pytest.approx(20)}


def test_values_that_share_a_scale_share_the_choice():
    both = [wanted("a", "b"), wanted("b", "a")]
    tried = {name: {"mse": 1.0, "minmax": 2.0} for name in "ab"}
    errors = {
        ("a", "mse", "y"): Error(signal=1, error=0.01), ("a", "minmax", "y"): Error(signal=1, error=0.02),
        ("b", "mse", "z"): Error(signal=1, error=0.5), ("b", "minmax", "z"): Error(signal=1, error=0.1),
    }  # fmt: skip
    assert best(both, tried, errors) == {"a": "minmax", "b": "minmax"}


def test_a_shift_counts_more_than_the_same_error_without_one():
    even = Error(signal=100.0, error=4.0, shift=np.zeros(2), count=2)
    shifted = Error(signal=100.0, error=4.0, shift=np.ones(2), count=2)
    assert even.relative == 0.04 and shifted.relative == pytest.approx((4 + SHIFT_WEIGHT * 4) / 100)


@pytest.mark.parametrize("error", [Error(signal=0, error=1), Error(signal=np.inf, error=1)])
def test_what_no_layer_tells_leaves_the_first_candidate(error):
    tried = {"x": {"mse": 1.0, "minmax": 2.0}}
    assert best([wanted("x")], tried, {("x", "minmax", "y"): error}) == {"x": "mse"}
    assert layer_sqnr({"x": "minmax"}, {("x", "minmax", "y"): error}) == {}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_candidate_that_breaks_a_layer_never_wins_and_leaves_it_float(broken):
    tried = {"x": {"mse": 1.0, "minmax": 2.0}}
    errors = {
        ("x", "mse", "a"): Error(signal=1.0, error=broken), ("x", "mse", "b"): Error(signal=1.0, error=0.01),
        ("x", "minmax", "a"): Error(signal=1.0, error=0.5), ("x", "minmax", "b"): Error(signal=1.0, error=0.5),
        ("x", "mse", "off"): Error(signal=0.0, error=0.1), ("x", "minmax", "off"): Error(signal=0.0, error=0.2),
    }  # fmt: skip
    assert best([wanted("x")], tried, errors) == {"x": "minmax"}
    assert layer_sqnr({"x": "mse"}, errors) == {"a": -float("inf"), "b": pytest.approx(20)}
