"""What is kept of calibration data: few samples, evenly spread, however many come."""

import numpy as np
import pytest

from layerline.calib.calibration_survey import PARTS, ROWS, Survey
from layerline.calib.samples import Batch
from layerline.export.signature import Value

X = Value(name="x", dtype="float32", shape=("n", 2))


def batches(count, rows):
    for i in range(count):
        yield Batch({"x": np.full((rows, 2), float(i), np.float32)}, None, rows)


@pytest.mark.parametrize(("count", "rows"), [(1, 64), (3, 16), (8, 16), (9, 16), (100, 16), (1000, 1)])
def test_samples_are_few_and_spread_over_all_batches(count, rows):
    survey = Survey((X,))
    assert sum(1 for _ in survey.through(batches(count, rows))) == count
    kept = survey.batches()
    assert PARTS // 2 * ROWS <= sum(b.rows for b in kept) <= PARTS * ROWS or count * rows < PARTS * ROWS
    assert all(b.rows == min(rows, ROWS) for b in kept) and len(kept) >= min(count, PARTS // 2)
    numbers = [float(b.feed["x"][0, 0]) for b in kept]
    assert numbers[0] == 0 and set(np.diff(numbers)) <= {0.0, *(float(2**i) for i in range(10))}
    assert numbers[-1] >= count / 2 - 1
    assert survey.peaks == {"x": count - 1.0} and survey.shapes == {"x": {(rows, 2)}}


def test_of_single_samples_as_many_are_kept_as_of_batches():
    survey = Survey((Value(name="x", dtype="float32", shape=(1, 2)),))
    list(survey.through(batches(120, 1)))
    assert [float(b.feed["x"][0, 0]) for b in survey.batches()] == list(range(0, 120, 4))


def test_batches_of_a_fixed_size_are_kept_whole():
    survey = Survey((Value(name="x", dtype="float32", shape=(16, 2)),))
    list(survey.through(batches(2, 16)))
    assert [b.rows for b in survey.batches()] == [16, 16]


def test_kept_rows_do_not_hold_the_batch_in_memory():
    survey = Survey((X,))
    list(survey.through(batches(1, 64)))
    assert survey.batches()[0].feed["x"].base is None or survey.batches()[0].feed["x"].base.shape[0] < 64


def test_rows_of_few_batches_are_spread_over_each():
    survey = Survey((X,))
    list(survey.through([Batch({"x": np.arange(126, dtype=np.float32).reshape(63, 2)}, None, 63)]))
    assert [float(b.feed["x"][0, 0]) for b in survey.batches()] == [16.0 * i for i in range(8)]
    assert {b.rows for b in survey.batches()} == {4}


def test_infinite_numbers_are_no_peak():
    survey = Survey((X,))
    list(survey.through([Batch({"x": np.float32([[np.inf, -3], [np.nan, 2]])}, None, 2)]))
    assert survey.peaks == {"x": 3.0}
