"""A cell says what was measured: not more, not less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.views.formatting import amount, decibels, error, figure, heading, percent, similarity
from layerline.views.tables import free_table, records_table
from tests.views.samples import diff

positive = st.floats(min_value=1e-30, max_value=1e30)


@given(positive)
def test_an_error_keeps_three_digits(value: float) -> None:
    assert float(error(value)) == pytest.approx(value, rel=5.1e-3)
    assert not error(value).endswith(".")


@given(st.floats(min_value=-1, max_value=1))
def test_only_equal_directions_read_one(value: float) -> None:
    shown = similarity(value)
    assert abs(float(shown)) <= abs(value)
    assert (shown == "1.000000") == (value == 1.0)


@given(st.floats(min_value=-400, max_value=400))
def test_decibels_are_to_one_place_and_zero_has_no_sign(value: float) -> None:
    assert abs(float(decibels(value)) - value) <= 0.0501
    assert decibels(value) != "-0.0"


@pytest.mark.parametrize("text", [decibels, error, similarity, figure])
def test_nothing_measured_is_nothing_shown(text: object) -> None:
    assert callable(text)
    assert text(None) == ""
    assert text(math.nan) == "NaN"
    assert text(-math.inf) == "-inf"


def test_figures_of_every_kind() -> None:
    assert [figure(v) for v in (True, False, 0, 12345678, 0.0, 0.98125, "int8", math.inf)] == [
        "yes", "no", "0", "12345678", "0", "0.9812", "int8", "inf",
    ]  # fmt: skip
    assert error(0.0) == "0"
    assert decibels(math.inf) == "equal"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("engine_bytes", 9732516, "engine size 9.73 MB"),
        ("bytes_before", 999, "file size before 999 B"),
        ("bytes_after", 1_234_000_000, "file size after 1.23 GB"),
        ("peak_bytes", 41_000.0, "peak size 41 kB"),
        ("layers", 9732516, "layers 9732516"),
        ("kilobytes", 12, "kilobytes 12"),
        ("onnx_bytes", None, "onnx size "),
    ],
)
def test_bytes_have_a_unit(name: str, value: float | None, told: str) -> None:
    assert f"{heading(name)} {amount(name, value)}" == told


def test_records_are_worst_first_and_keep_their_order_in_a_column() -> None:
    view = records_table([diff("a", db=50.0), diff("b", db=8.0, tolerance=0.1), diff("c", db=math.inf)])
    named = {c.label: [row[i] for row in view.rows] for i, c in enumerate(view.columns)}
    assert named["value"] == ["b", "a", "c"]
    assert named["order"] == ["2", "1", "3"]
    assert named["verdict"] == ["✗ failed", "", ""]
    assert named["tolerance"] == ["0.100", "", ""]
    assert "cosine" not in named and "shape" not in named


def test_what_a_tolerance_bounds_is_named_as_its_column_is() -> None:
    view = records_table(
        [diff("a", db=50.0, tolerance=0.1), diff("b", db=8.0, max_abs=1.0, mean_abs=0.5, tolerance=1.0)]
    )
    labels = [c.label for c in view.columns]
    assert {row[labels.index("judged by")] for row in view.rows} == {"rel L2"} and "rel L2" in labels
    for judged, label in (("max_abs", "max abs"), ("mean_abs", "mean abs")):
        view = records_table([diff("b", db=8.0, max_abs=1.0, mean_abs=0.5, tolerance=1.0, judged=judged)])
        labels = [c.label for c in view.columns]
        assert view.rows[0][labels.index("judged by")] == label and label in labels


def test_extra_columns_by_what_they_hold() -> None:
    rows = [{"isolated_sqnr_db": 31.04, "clipped": 0.25}, {"isolated_sqnr_db": math.inf, "why": "graph output"}]
    view = free_table(rows)
    assert [(c.label, c.kind) for c in view.columns] == [("own dB", "low"), ("clipped %", "number"), ("why", "text")]
    assert view.rows == [("31.0", "25.00", ""), ("equal", "", "graph output")]


def test_a_gain_without_a_bound_is_told_as_what_it_means() -> None:
    view = free_table([{"gain_db": math.inf}, {"gain_db": 0.25}, {"gain_db": -0.01}])
    assert [row[0] for row in view.rows] == ["exact", "+0.2", "+0.0"]


def test_shares_are_per_cent() -> None:
    shares = {0.0: "0", 3e-11: "0", 1e-6: "0.0001", 0.00001: "0.001", 0.0001: "0.01", 0.0123: "1.23", 1.0: "100.00"}
    assert {share: percent(share) for share in shares} == shares and percent(None) == ""


def test_then_is_joined_by_name() -> None:
    records = [diff("a", db=30.0), diff("b", db=40.0)]
    view = records_table(records, then={"b": diff("b", db=50.0)})
    cells = {c.label: [row[i] for row in view.rows] for i, c in enumerate(view.columns)}
    assert (cells["now dB"], cells["then dB"]) == (["30.0", "40.0"], ["", "50.0"])


def test_an_extra_column_may_share_a_name_without_loss() -> None:
    view = records_table([diff("a", db=50.0, extra={"op": "QLinearConv", "type": "int8"}, dtype="float32")])
    labels = [c.label for c in view.columns]
    assert labels.count("op") == 2 and (labels.count("type"), labels.count("dtype")) == (1, 1)
    assert {"Conv", "QLinearConv", "int8", "float32"} <= set(view.rows[0])
