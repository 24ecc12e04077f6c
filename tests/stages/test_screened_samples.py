"""Samples that hold NaN or Inf, and outliers, are left out of every later step; the report names them."""

import numpy as np
import pytest

from layerline.calib.calibration_survey import Survey
from layerline.calib.hold_out import HoldOut, digest_of
from layerline.calib.plan import FILE, QuantPlan
from layerline.calib.sample_screen import SampleScreen
from layerline.calib.samples import Batch
from layerline.export.signature import Value
from layerline.pipeline.errors import StageError
from tests.stages.test_held_out_samples import decibels_of_fresh_samples, network
from tests.stages.test_quantize import work  # noqa: F401 - a fixture

X = Value(name="x", dtype="float32", shape=("n", 2))


def screen(nonfinite="skip", outputs=lambda feed: {"y": feed["x"]}, every=True, drops_outliers=True):
    return SampleScreen(Survey((X,)), nonfinite, outputs, every=every, drops_outliers=drops_outliers)


def batches(rows, size):
    array = np.array(rows, np.float32)
    return [Batch({"x": part}, None, len(part)) for part in np.split(array, range(size, len(array), size))]


def first_column(parts):
    return [float(number) for part in parts for number in part.feed["x"][:, 0]]


def test_a_sequence_that_the_model_gives_is_looked_at_tensor_by_tensor():
    with np.errstate(invalid="ignore"):
        made = screen(outputs=lambda feed: {"y": [feed["x"], np.sqrt(feed["x"][:, :1])]})
        assert first_column(made.through(batches([[1, 2], [-1, 2], [4, 2]], 3))) == [1, 4]
    (note,) = made.notes(lambda n: n)
    assert note.startswith("1 non-finite elements of y were left out")


def test_zeros_of_two_shapes_are_two_samples():
    assert digest_of({"x": np.zeros((2, 8))}) != digest_of({"x": np.zeros((4, 4))})


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("bad", [0, 5, 15])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_sample_with_nan_or_inf_is_left_out_of_every_pass(size, bad, number):
    rows = [[index, 1.0] for index in range(16)]
    rows[bad][1] = number
    left = [float(index) for index in range(16) if index != bad]
    made = screen()
    assert first_column(made.through(batches(rows, size))) == left
    assert first_column(made.again(batches(rows[::-1], 4))) == left[::-1]
    assert first_column(made.finite(batches(rows, size))) == left
    assert made.left_out == 1
    (note,) = made.notes(lambda n: 100 + n)
    assert note.startswith("1 non-finite elements of x were left out") and f"0: {100 + bad})" in note


def test_what_the_model_makes_nan_of_is_left_out_and_a_mask_is_not():
    rows = [[1, -np.inf], [-1, 2], [3, 0.5]]

    def root_and_mask(feed):
        with np.errstate(invalid="ignore"):
            return {"y": np.sqrt(feed["x"][:, :1]) + np.exp(feed["x"][:, 1:])}

    assert first_column(screen(outputs=root_and_mask).through(batches(rows, 3))) == [1, 3]
    with pytest.raises(
        StageError, match=r"1 NaN and 0 Inf elements in calibration batch 0, sample 1 \(counted from 0\)"
    ):
        list(screen("stop", root_and_mask).through(batches(rows, 3)))
    with pytest.raises(StageError, match="no calibration sample is left: all 1 hold"):
        list(screen().through(batches([[np.nan, 1]], 1)))


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("place", [0, 7, 15])
@pytest.mark.parametrize("factor", [1e3, 1e30])
def test_one_sample_of_another_magnitude_is_left_out(size, place, factor):
    rows = [[1 + index / 16, -1] for index in range(16)]
    rows[place] = [factor, factor]
    others = [row[0] for row in rows if row[0] != factor]
    made = screen()
    assert first_column(made.through(batches(rows, size))) == pytest.approx(others)
    assert first_column(made.again(batches(rows, 16))) == pytest.approx(others)
    (note,) = made.notes(int)
    assert f"calibration sample {place} (counted from 0) is an outlier: x reaches {factor:.4g}" in note
    kept = screen(drops_outliers=False)
    assert first_column(kept.through(batches(rows, size))) == pytest.approx([row[0] for row in rows])
    assert kept.left_out == 0 and "the ranges include it" in kept.notes(int)[0]


def test_what_is_no_outlier_stays():
    for peaks in (
        [1] * 14 + [1000, 1000],  # two of 16
        [1] * 6 + [1000],  # fewer than eight samples
        [0] * 15 + [1000],  # the others hold zeros
        [2.0**index for index in range(16)],  # no gap
    ):
        made = screen()
        assert sorted(first_column(made.through(batches([[peak, 0] for peak in peaks], 1)))) == sorted(peaks)
        assert made.notes(int) == []


def test_equal_samples_are_not_all_kept_to_hold_some_out():
    fitted, judged = Survey((X,)), Survey((X,))
    hold_out = HoldOut(fitted, judged)
    for _ in hold_out.through(batches([[index % 3, 1] for index in range(3000)], 1)):
        assert len(fitted.batches()) + len(judged.batches()) <= 80
    hold_out.finish()
    assert judged.batches() == [] and set(first_column(fitted.batches())) == {0, 1, 2}


@pytest.mark.parametrize("fields", [{}, {"repairs": ["equalize", "adaround"]}])
def test_int8_with_a_broken_sample_is_as_good_as_without_it(work, tmp_path, fields):  # noqa: F811
    net, samples, fresh = network("dense", 1, 24)
    samples[5, 3], samples[6, 1] = np.nan, np.inf
    clean = np.delete(samples, [5, 6], axis=0)
    expected, _ = decibels_of_fresh_samples(work, net, clean, fresh, **fields)
    seen, report = decibels_of_fresh_samples(work, net, samples, fresh, nonfinite="skip", **fields)
    assert seen == pytest.approx(expected, abs=0.01) and seen > 20
    assert all(gate.passed for gate in report.gates)
    assert any("2 non-finite elements of x" in note and "0: 5, 6)" in note for note in report.notes)
    assert any(note.startswith("calibrated on 22 samples") for note in report.notes)


@pytest.mark.parametrize("mode", ["int8", "fp8", "int4", "nvfp4"])
def test_nan_stops_every_format_unless_it_is_skipped(work, mode):  # noqa: F811
    net, samples, fresh = network("dense", 1, 16)
    samples[3, 5] = np.nan
    fields = {"mode": mode, "repairs": ["gptq"] if "4" in mode else []}
    with pytest.raises(StageError, match="1 NaN and 0 Inf elements in calibration batch 0, sample 3"):
        decibels_of_fresh_samples(work, net, samples, fresh, **fields)


def test_one_sample_a_thousand_times_as_large_does_not_ruin_auto(work, tmp_path):  # noqa: F811
    net, samples, fresh = network("dense", 1, 16)
    expected, _ = decibels_of_fresh_samples(work, net, samples, fresh)
    samples[9] *= 1000
    seen, report = decibels_of_fresh_samples(work, net, samples, fresh)
    assert seen > expected - 2
    assert all(gate.passed for gate in report.gates)
    assert any("calibration sample 9 (counted from 0) is an outlier" in note for note in report.notes)
    # Another calibrator takes what the data has, and the report says so.
    _, report = decibels_of_fresh_samples(work, net, samples, fresh, calibrator="minmax")
    written = QuantPlan.from_json((tmp_path / "out" / FILE).read_text())
    assert written.value("x").amax == pytest.approx(float(abs(samples[9]).max()))
    assert any("the ranges include it" in note for note in report.notes)


def test_a_size_that_begins_with_one_number_a_sample_may_grow():
    open_size = Survey((Value(name="x", dtype="float32", shape=("n", "t")),))
    made = SampleScreen(open_size, "skip", lambda feed: {"y": feed["x"]}, every=True, drops_outliers=True)
    short = [Batch({"x": np.full((4, 1), 1.0, np.float32)}, None, 4)] * 3
    long = [Batch({"x": np.full((2, 5), 100.0, np.float32)}, None, 2)] * 2
    assert first_column(made.through(short + long)) == [1.0] * 12 + [100.0] * 4
    assert made.left_out == 0 and made.notes(int) == []


def test_an_input_of_mostly_single_numbers_does_not_hold_the_data_back():
    inputs = tuple(Value(name=name, dtype="float32", shape=("n", "t")) for name in "xz")
    made = SampleScreen(Survey(inputs), "skip", lambda feed: {"y": feed["x"]}, every=True, drops_outliers=True)
    x, one, two = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), np.ones((4, 2), np.float32)
    read = []

    def source():
        for index in range(10):
            read.append(index)
            yield Batch({"x": x, "z": two if index == 0 else one}, None, 4)

    passed = made.through(source())
    next(passed)
    # Eight samples tell the magnitude: the rest is not read before the first batch is passed on.
    assert read == [0, 1]
    assert len(list(passed)) == 9
