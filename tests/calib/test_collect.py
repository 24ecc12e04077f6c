"""Calibration sees every real element of every wanted value, once, and stops at what is not finite."""

import json

import numpy as np
import pytest

from layerline.calib import collect as module
from layerline.calib.collect import collect
from layerline.calib.samples import Batch
from layerline.pipeline.errors import StageError


class Fake:
    """A model with the inner values y = 2x and z = -x, and the output y."""

    def __init__(self, taps):
        self.taps = taps

    def run(self, feed):
        x = feed["x"]
        return {"y": 2 * x, **{t: {"z": -x}[t] for t in self.taps if t == "z"}}


def batches(*arrays, filler=0):
    return [Batch({"x": np.array(a, np.float32)}, None, len(a) - filler, filler) for a in arrays]


def test_inputs_outputs_and_taps_are_seen_once_each(monkeypatch):
    for group in (1, 2, 128):
        monkeypatch.setattr(module, "GROUP", group)
        seen = []
        ranges = collect(Fake, batches([1, 2], [3]), ["x", "y", "z"], progress=seen.append)
        assert {n: (h.low, h.high, h.count) for n, h in ranges.histograms.items()} == {
            "x": (1, 3, 3),
            "y": (2, 6, 3),
            "z": (-3, -1, 3),
        }
        assert ranges.samples == 3 and seen == [2, 3]


def test_values_share_a_run_as_soon_as_their_sizes_are_known(monkeypatch):
    monkeypatch.setattr(module, "GROUP", 1)
    monkeypatch.setattr(module, "GROUP_BYTES", 24)
    opened = []

    def open_session(taps):
        opened.append(list(taps))
        return Fake(taps)

    ranges = collect(open_session, batches([1, 2, 3], [4, 5, 6], [7, 8, 9]), ["x", "y", "z"])
    # Three float32 each: two values of 12 bytes fit.
    assert opened == [["x"], ["y"], ["z"], ["x", "y"], ["z"]]
    assert {n: (h.low, h.high, h.count) for n, h in ranges.histograms.items()} == {
        "x": (1, 9, 9),
        "y": (2, 18, 9),
        "z": (-9, -1, 9),
    }


def test_rows_that_fill_up_a_batch_are_not_counted():
    ranges = collect(Fake, batches([1, 2, 9, 9], filler=2), ["x", "y"])
    assert ranges.histograms["y"].high == 4 and ranges.samples == 2


def test_a_nan_stops_and_names_tensor_batch_and_count():
    with pytest.raises(StageError, match="x: 2 NaN and 1 Inf elements in calibration batch 1") as caught:
        collect(Fake, batches([1, 2], [np.nan, 1, 2, np.inf, np.nan]), ["x"])
    assert "nonfinite: skip" in caught.value.hint


def test_skipping_leaves_the_range_of_the_others_and_says_so():
    ranges = collect(Fake, batches([np.nan, 1, 2, 3, np.nan], [0]), ["x"], nonfinite="skip")
    assert (ranges.histograms["x"].low, ranges.histograms["x"].high) == (0, 3)
    assert ranges.notes == ("2 non-finite elements of x were left out of its range (2 NaN, 0 Inf)",)


def test_ranges_are_written_one_line_a_value():
    ranges = collect(Fake, batches([1, 2, np.nan], [3]), ["z", "x"], nonfinite="skip")
    document = json.loads(ranges.to_json())
    assert document["samples"] == 4 and list(document["values"]) == ["x", "z"]
    assert document["values"]["x"] == {"range": [1.0, 3.0], "count": 3, "nan": 1, "inf": 0}
    assert document["values"]["z"]["range"][0] == -3.0
    assert collect(Fake, batches([np.nan]), ["x"], nonfinite="skip").to_json().count("null") == 1
