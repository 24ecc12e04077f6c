"""How scales move while calibration reads more samples, and when it may stop."""

import numpy as np
import pytest

from layerline.calib.collect import collect
from layerline.calib.convergence import Convergence
from layerline.calib.histogram import Histogram
from layerline.calib.samples import Batch


class Fake:
    def __init__(self, taps):
        pass

    def run(self, feed):
        return {"y": 2 * feed["x"]}


def batches(*arrays):
    return [Batch({"x": np.asarray(array, np.float32)}, None, len(array)) for array in arrays]


def test_a_row_for_each_doubling_and_for_the_end():
    peaks = [[1], [2], [2], [2], [2], [2], [3]]
    ranges = collect(Fake, batches(*peaks), ["x", "y"], percentile=100)
    rows = ranges.convergence
    assert [row["samples"] for row in rows] == [1, 2, 4, 7]
    assert [row["greatest_change"] for row in rows] == [None, 1.0, 0.0, 0.5]
    assert [row["median_change"] for row in rows] == [None, 1.0, 0.0, 0.5]
    assert [row["moving"] for row in rows] == [None, 1.0, 0.0, 1.0]
    assert [row["value"] for row in rows] == ["", "x", "x", "x"] and rows[0]["values"] == 2
    assert not ranges.stopped


def test_it_stops_when_two_doublings_moved_nothing():
    same = batches(*[np.ones(8)] * 20)
    ranges = collect(Fake, same, ["x"], stop_early=0.01)
    # Rows at 8, 16 and 32 samples: the first that two doublings and the least number of samples allow.
    assert ranges.stopped and ranges.samples == 32
    assert "no scale moved by more than 1 %" in ranges.notes[0]
    assert collect(Fake, same, ["x"]).samples == 160
    growing = batches(*[np.full(8, 1.1**i) for i in range(20)])
    assert not collect(Fake, growing, ["x"], stop_early=0.01).stopped


def followed(draws, percentile):
    """The last interval after batches of the given values."""
    histogram = Histogram()
    convergence = Convergence(["x"], percentile=percentile)
    for number, values in enumerate(draws, 1):
        histogram.update(np.asarray(values, np.float32))
        convergence.after_batch({"x": histogram}, number)
    convergence.finish({"x": histogram}, len(draws))
    return convergence.rows[-1]["interval"]


def test_the_interval_is_that_of_a_bootstrap_over_batches():
    assert followed([[1.0]] * 3, 100) is None  # too few batches
    assert followed([[1.0]] * 8, 100) == 0
    # One batch of eight has the peak: it is in 66 % of all draws, so the interval reaches from 1 to 2.
    assert followed([[1.0]] * 7 + [[2.0]], 100) == pytest.approx(0.25, abs=0.01)
    # With zeros alone there is no scale to be sure of.
    assert followed([[0.0]] * 8, 100) is None


def test_the_interval_agrees_with_a_bootstrap_of_the_samples():
    rng = np.random.default_rng(3)
    draws = rng.gamma(2.0, size=(16, 2000)) * rng.uniform(0.5, 1.5, (16, 1))
    picked = rng.integers(0, 16, (400, 16))
    scales = [np.percentile(draws[rows], 99) for rows in picked]
    low, high = np.quantile(scales, [0.025, 0.975])
    expected = (high - low) / 2 / np.percentile(draws, 99)
    assert followed(draws, 99) == pytest.approx(expected, rel=0.15)


def test_many_batches_take_no_more_memory_than_few():
    convergence = Convergence(["x"], percentile=100)
    histogram = Histogram()
    for number in range(1, 200):
        histogram.update(np.ones(4, np.float32))
        convergence.after_batch({"x": histogram}, number)
        assert len(convergence._sums["x"]) < 16
    assert convergence.rows[-1]["samples"] == 128 and convergence.rows[-1]["interval"] == 0
