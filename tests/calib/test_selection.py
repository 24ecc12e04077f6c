"""Which samples calibrate: equal shares of classes, coverage of the activations, and orders that are even early on."""

import numpy as np
import pytest

from layerline.calib import selection
from layerline.calib.samples import Batch, Samples
from layerline.export.signature import Value
from layerline.pipeline.errors import TaskError

X = (Value(name="x", dtype="float32", shape=("n", 2)),)


def test_a_class_of_one_percent_that_even_sampling_misses_is_kept_whole():
    labels = np.arange(1000) // 334
    labels[501:511] = 3  # ten in a row, between two of every twentieth sample
    even = np.arange(50) * 1000 // 50
    assert not (labels[even] == 3).any()
    chosen = selection.stratified(labels, 50)
    assert chosen.size == 50 and np.unique(chosen).size == 50
    # 50 among four classes; the rare class of ten is whole, and the 40 left are shared by three.
    assert sorted(np.bincount(labels[chosen])) == [10, 13, 13, 14]
    assert set(range(501, 511)) <= set(chosen.tolist())


@pytest.mark.parametrize(
    ("sizes", "count", "shares"),
    [
        ((5, 5), 4, (2, 2)),
        ((1, 9), 6, (1, 5)),
        ((3, 4), 100, (3, 4)),
        ((9, 9, 9, 9), 2, (1, 0, 1, 0)),  # fewer samples than classes
    ],
)
def test_classes_have_equal_shares(sizes, count, shares):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chosen = selection.stratified(labels, count)
    assert tuple(np.bincount(labels[chosen], minlength=len(sizes))) == shares


def test_slices_go_before_labels_and_scores_are_no_classes():
    slices = np.array(["day", "night", "day"])
    both = Batch({}, np.array([0, 1, 2]), 3, slices=slices)
    values, kind = selection.labels([both], "calib_data")
    assert kind == "slice" and values.tolist() == slices.tolist()
    values, kind = selection.labels([Batch({}, np.array([[4], [5]]), 2), Batch({}, np.array([6]), 1)], "calib_data")
    assert kind == "label" and values.tolist() == [4, 5, 6]
    for target in (None, np.array([0.5, 0.2]), np.eye(2, dtype=int), {"a": np.array([1, 2])}):
        with pytest.raises(TaskError, match="no class"):
            selection.labels([Batch({}, target, 2)], "calib_data")


def test_coverage_takes_what_is_far_apart_and_each_sample_once():
    features = np.array([[0.0], [0.1], [10.0], [-9.0], [0.0], [0.1]])
    # The mean is 0 after standardisation: sample 0 is the nearest, 2 the farthest from it, then 3.
    assert selection.k_center(features, 3).tolist() == [0, 2, 3]
    assert sorted(selection.k_center(features, 9)) == list(range(6))


class Doubling:
    """A model with the inner value y = 2x."""

    def __init__(self, taps):
        self.taps = taps

    def run(self, feed):
        return {"y": 2 * feed["x"]}


def test_statistics_are_those_of_each_sample_without_filler():
    feed = {"x": np.array([[1, -3], [5, 1], [7, 7]], np.float32)}
    table = selection.statistics(Doubling, [Batch(feed, None, 2, filler=1)], ["x", "y"])
    # Of two samples, standardised: -1 and 1. Means are -1 and 3, greatest magnitudes 3 and 5.
    assert table.tolist() == [[-1, -1, -1, -1], [1, 1, 1, 1]]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 100])
def test_a_prefix_of_the_spread_order_is_even(count):
    order = selection.spread_order(count)
    assert sorted(order) == list(range(count))
    for size in (1 << bit for bit in range(count.bit_length())):
        gaps = np.diff([0, *sorted(order[:size]), count])
        assert gaps.max() < 3 * count / size


def test_chosen_samples_are_read_whatever_form_the_data_has():
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    y = np.arange(12)
    numbers = np.array([9, 0, 7, 4])

    def rows_of(data):
        batches = list(Samples(data, X, hook="calib_data", batch_size=3, numbers=numbers))
        return np.concatenate([batch.feed["x"][:, 0] for batch in batches]).tolist()

    in_order = [18.0, 0.0, 14.0, 8.0]
    assert rows_of((x, y)) == in_order
    # Ready-made batches keep their order.
    assert rows_of([(x[:5], y[:5]), (x[5:6], y[5:6]), (x[6:], y[6:])]) == sorted(in_order)
    samples = Samples((x, y), X, hook="calib_data", limit=4)
    assert samples.positions(4).tolist() == [0, 3, 6, 9]
    assert Samples([(x, y)], X, hook="calib_data", limit=4).positions(4).tolist() == [0, 1, 2, 3]
