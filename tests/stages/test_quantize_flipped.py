"""Samples whose answer quantisation flipped are part of the report, as far as they can be shown."""

from __future__ import annotations

import pytest

from layerline.parity.flipped_samples import MOST
from layerline.pipeline.report import FLIPPED
from layerline.stages.quantize import Quantize
from tests.stages.test_quantize import CALIB, work

__all__ = ["work"]  # the fixture
LABELS = "'label': np.arange(40) % 4"


@pytest.mark.parametrize(
    ("data", "shows", "note"),
    [
        (f"{{'x': X, {LABELS}}}", "picture", ""),
        (f"{{'x': rng.permutation(X), {LABELS}}}", "", "eval_data() gives other samples"),
    ],
)
def test_some_flipped_samples_are_shown(work, data, shows, note):
    report = Quantize(calibrator="percentile", percentile=50).run(work(f"{CALIB}def eval_data(): return {data}\n"))
    flips = report.tables["flipped answers"]
    assert flips
    rows = report.tables[FLIPPED]
    numbers = sorted(row["sample"] for row in flips[:MOST])
    assert [row["sample"] for row in rows if shows in row] == (numbers if shows else [])
    assert all(row["float"] != row["converted"] for row in rows)
    assert any(text.startswith(f"no flipped sample is shown: {note}") for text in report.notes) == bool(note)


def test_an_error_in_show_is_a_note(work):
    more = f"def eval_data(): return {{'x': X, {LABELS}}}\ndef show(sample): return sample.none\n"
    report = Quantize(calibrator="percentile", percentile=50).run(work(CALIB + more))
    assert report.tables[FLIPPED] == []
    (note,) = [text for text in report.notes if text.startswith("no flipped sample is shown: task.py")]
    assert "show() raised AttributeError" in note
