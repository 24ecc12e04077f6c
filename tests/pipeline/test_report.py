"""Reports: to JSON and back, what passes, what is worst."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline.report import Gate, LayerDiff, Report


def layer(name: str = "v", **fields: Any) -> LayerDiff:
    return LayerDiff(name=name, op="Conv", **fields)


NUMBERS = st.floats(allow_nan=False) | st.just(math.inf)
MEASURES = st.none() | NUMBERS
SCALARS = st.none() | st.booleans() | st.integers() | NUMBERS | st.text("abc é☃", max_size=5)
NAMES = st.text("ab.é_0", min_size=1, max_size=6)
DISTANCES = MEASURES.filter(lambda value: value is None or not value < 0)
LAYERS = st.builds(
    LayerDiff,
    name=NAMES,
    op=NAMES,
    module=NAMES,
    shape=st.tuples(st.integers(0, 9), st.just("batch")),
    dtype=st.just("float32"),
    max_abs=DISTANCES,
    mean_abs=DISTANCES,
    rel_l2=DISTANCES,
    cosine=st.none() | st.floats(-1, 1) | st.sampled_from([math.inf, -math.inf]),
    sqnr_db=MEASURES | st.just(-math.inf),
    nonfinite_a=st.integers(0, 3),
    one_sided=st.integers(0, 3),
    judged=st.sampled_from(["max_abs", "mean_abs", "rel_l2"]),
    tolerance=st.none() | st.floats(0, 10),
    extra=st.dictionaries(NAMES, SCALARS, max_size=3),
)
REPORTS = st.builds(
    Report,
    stage=NAMES,
    reference=NAMES,
    records=st.lists(LAYERS, max_size=4).map(tuple),
    metrics=st.dictionaries(NAMES, SCALARS, max_size=3),
    gates=st.lists(st.builds(Gate, NAMES, st.booleans(), NAMES, NAMES), max_size=2).map(tuple),
    notes=st.lists(NAMES, max_size=2).map(tuple),
    tables=st.dictionaries(NAMES, st.lists(st.dictionaries(NAMES, SCALARS, max_size=2), max_size=2), max_size=2),
    merged=st.dictionaries(NAMES, NAMES, max_size=2),
)


@given(REPORTS)
def test_to_json_and_back(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text) == report
    assert Report.from_json(text).to_json() == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_report_from_before_values_were_named_that_merged_is_read() -> None:
    raw = json.loads(Report(stage="fuse", records=(layer(),)).to_json())
    del raw["merged"]
    assert Report.from_json(json.dumps(raw)) == Report(stage="fuse", records=(layer(),))


def test_nan_and_numpy_scalars_survive() -> None:
    report = Report(
        stage="x", records=(layer(max_abs=math.nan, extra={"a": np.float32(0.5)}),), metrics={"n": np.int64(3)}
    )
    again = Report.from_json(report.to_json())
    assert (
        math.isnan(again.records[0].max_abs or 0) and again.records[0].extra == {"a": 0.5} and again.metrics == {"n": 3}
    )
    assert report.plain_metrics() == {"n": 3}
    assert layer("v", module="m", sqnr_db=math.inf).summary() == {
        "layer": "m",
        "value": "v",
        "sqnr_db": "inf",
        "cosine": None,
    }


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({}, True),
        ({"rel_l2": 9.0}, True),  # measured, but nothing is gated
        ({"rel_l2": math.nan}, True),
        ({"rel_l2": 0.1, "tolerance": 0.1}, True),
        ({"rel_l2": 0.11, "tolerance": 0.1}, False),
        ({"rel_l2": 0.0, "tolerance": 0.0}, True),
        ({"rel_l2": math.inf, "tolerance": 1.0}, False),
        ({"rel_l2": math.nan, "tolerance": 1.0}, False),
        ({"tolerance": 1.0}, False),  # not measured
        ({"max_abs": 0.1, "rel_l2": 9.0, "judged": "max_abs", "tolerance": 0.2}, True),
        ({"rel_l2": 0.0, "one_sided": 1}, False),
        ({"rel_l2": 0.0, "one_sided": 1, "tolerance": 1.0}, False),
        ({"rel_l2": 0.0, "nonfinite_a": 2, "nonfinite_b": 2, "tolerance": 1.0}, True),
    ],
)
def test_what_passes(fields: dict[str, Any], passed: bool) -> None:
    assert layer(**fields).passed is passed
    assert Report(stage="x", records=(layer(rel_l2=0.0, tolerance=1.0), layer(**fields))).passed is passed


def test_a_gate_that_fails_fails_the_report() -> None:
    good, bad = Gate("budget", True, "1", "2"), Gate("budget", False, "3", "2", "calibrate on more")
    assert Report(stage="x", gates=(good,)).passed
    report = Report(stage="x", gates=(good, bad))
    assert not report.passed
    assert str(report.failure()) == "x: budget: 3, expected 2\n  calibrate on more"


def test_rows_without_sqnr_are_sorted_by_their_relative_error() -> None:
    errors = {"small": 0.1, "nan": math.nan, "large": 2.96, "none": None, "zero": 0.0}
    rows = tuple(LayerDiff(name=n, op="parameter", module=n, rel_l2=e) for n, e in errors.items())
    assert [r.name for r in Report(stage="train", records=rows).sorted("error")[:3]] == ["nan", "large", "small"]


def test_the_worst_come_first() -> None:
    layers = [
        layer("quiet", sqnr_db=90.0),
        layer("unmeasured"),
        layer("noisy", sqnr_db=10.0),
        layer("near", rel_l2=0.9, tolerance=1.0, sqnr_db=50.0),
        layer("equal", sqnr_db=math.inf),
        layer("beyond", rel_l2=2.0, tolerance=1.0, sqnr_db=60.0),
        layer("far beyond", rel_l2=5.0, tolerance=1.0, sqnr_db=70.0),
        layer("nan", rel_l2=math.nan, tolerance=1.0, sqnr_db=math.nan),
        layer("one side", rel_l2=0.0, one_sided=1, sqnr_db=99.0),
        layer("broken", sqnr_db=math.nan),
    ]
    expected = ["nan", "one side", "far beyond", "beyond", "near", "broken", "noisy", "quiet", "unmeasured", "equal"]
    report = Report(stage="x", records=tuple(layers))
    assert [r.name for r in report.sorted("error")] == expected
    first = report.first_failing()
    assert first is not None and first.name == "beyond"  # in topological order


def test_a_failure_names_the_first_value_and_counts_the_others() -> None:
    report = Report(
        stage="export",
        records=(
            layer("fine", rel_l2=0.0, tolerance=1.0),
            layer("relu_3", module="layer1.conv", rel_l2=0.5, tolerance=0.1),
            layer("relu_4", rel_l2=0.6, tolerance=0.1),
        ),
    )
    told = "export: relu_3 (Conv layer1.conv): rel_l2 0.5, tolerance 0.1 (1 later values fail too)"
    assert str(report.failure()).startswith(told)
    one_sided = Report(stage="export", records=(layer("relu_3", one_sided=2),))
    assert "2 elements are NaN or Inf on one side only" in str(one_sided.failure())
    unmeasured = Report(stage="export", records=(layer("relu_3", tolerance=0.1),))
    assert "rel_l2 not measured, tolerance 0.1" in str(unmeasured.failure())


def test_the_order_that_shows_where_an_error_is_made() -> None:
    innocent = LayerDiff(name="a", op="Add", sqnr_db=5.0, rel_l2=0.5, extra={"isolated_sqnr_db": math.inf})
    guilty = LayerDiff(name="g", op="Conv", sqnr_db=12.0, rel_l2=0.2, extra={"isolated_sqnr_db": 9.0})
    lost = LayerDiff(name="n", op="Conv", sqnr_db=30.0, rel_l2=0.1, extra={"isolated_sqnr_db": math.nan})
    unmeasured = LayerDiff(name="u", op="TopK", sqnr_db=1.0, rel_l2=0.9)
    failed = LayerDiff(name="f", op="Conv", sqnr_db=40.0, rel_l2=0.01, tolerance=0.001)
    report = Report(stage="quantize", records=(innocent, guilty, lost, unmeasured, failed))
    assert report.order == "own"
    assert [r.name for r in report.sorted("own")] == ["f", "n", "g", "u", "a"]
    assert [r.name for r in report.sorted("error")] == ["f", "u", "a", "g", "n"]
    assert report.sorted("network") == report.records
    assert Report(stage="fuse", records=(failed, unmeasured)).order == "error"
