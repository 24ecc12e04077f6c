"""The training log as curves: what was measured, where it was measured, and nothing else."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline.commands.lookup import LogRows
from layerline.views.canvas import LEFT, RIGHT, WIDTHS
from layerline.views.curves import curves, validated
from layerline.views.html import page
from tests.views.pictures import assert_labels_fit, paths, picture, texts
from tests.views.samples import run_of, sample_reports

HEADS = ["step", "loss", "loss_smooth", "lr", "metric_online", "metric_deploy", "deploy_gap"]
cells = st.one_of(st.none(), st.floats(-1e30, 1e30), st.sampled_from([math.inf, -math.inf]))


def log(rows: list[dict[str, float | None]]) -> LogRows:
    """The rows that a Monitor writes: what was not measured is left out."""
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def draw(rows: list[dict[str, float | None]], width: int = WIDTHS[0]) -> ElementTree.Element:
    return picture(curves(log(rows)), width)


TRAINED: list[dict[str, float | None]] = [
    {"step": 10.0 * i, "loss": 2.0 / i, "loss_smooth": 2.1 / i, "lr": 0.01,
     **({"metric_online": 0.9, "metric_deploy": 0.8 + i / 1000, "deploy_gap": 0.1 - i / 1000} if i % 5 == 0 else {})}
    for i in range(1, 21)
]  # fmt: skip


def test_both_metrics_their_gap_loss_and_rate() -> None:
    svg = draw(TRAINED)
    assert texts(svg, "stage") == ["metric", "deploy gap", "loss", "learning rate"]
    assert texts(svg, "end") == ["online 0.9", "would ship 0.82", "gap 0.08", "smoothed 0.105", "0.01"]
    online, ships = paths(svg, "line online"), paths(svg, "line main")
    assert [p.count("L") for p in (*online, *ships)] == [3, 3, 3, 19, 19]
    titles = [e.text for e in svg.iter("title")]
    assert "step 50: online 0.9" in titles and "step 50: gap 0.095" in titles and len(titles) == 12
    assert "over steps 10 to 200; in the end metric online 0.9, metric would ship 0.82" in svg.get("aria-label", "")
    assert texts(svg, "group")[-1] == "200"


def test_only_what_was_measured_has_a_strip() -> None:
    plain = [{k: v for k, v in row.items() if k in ("step", "loss", "loss_smooth", "lr")} for row in TRAINED]
    assert texts(draw(plain), "stage") == ["loss", "learning rate"]
    assert not validated(log(plain)) and validated(log(TRAINED))
    assert [curves(rows) for rows in ([], [{}], [{"a": 1.0, "b": 2.0}])] == [""] * 3
    assert curves(log([{"step": 1.0}])) == "", "a row in which nothing was measured"


def test_one_metric_alone_has_one_line() -> None:
    svg = draw([{"step": float(i), "metric_online": 100.0 + i} for i in (1, 2)])
    assert len(paths(svg, "line online")) == 1 and paths(svg, "line main") == []


def test_the_gap_strip_keeps_zero_in_sight_and_one_point_is_a_dot() -> None:
    svg = draw([{"step": 7.0, "metric_online": 0.5, "metric_deploy": 0.25, "deploy_gap": 0.25}])
    assert "0" in texts(svg, "tick") and "0.25" in texts(svg, "tick")
    assert len(paths(svg, "dots online")) == 1 and len(paths(svg, "dots main")) == 2
    behind = draw([{"step": float(i), "deploy_gap": -0.1 - i / 100} for i in range(3)])
    assert texts(behind, "tick") == ["-0.12", "0"]
    level = draw([{"step": float(i), "deploy_gap": 0.0} for i in range(3)])
    assert texts(level, "tick") == ["0"] and texts(level, "end") == ["gap 0"]


@given(
    st.lists(st.tuples(*[cells] * 6), max_size=12),
    st.integers(0, 10**9),
    st.integers(1, 10**7),
    st.sampled_from(WIDTHS),
)
def test_every_mark_lies_inside_the_picture(
    found: list[tuple[float | None, ...]], start: int, apart: int, width: int
) -> None:
    rows = [dict(zip(HEADS, (start + i * apart, *values), strict=True)) for i, values in enumerate(found)]
    text = curves(log(rows))
    finite = any(v is not None and math.isfinite(v) for values in found for v in values)
    assert bool(text) == finite
    if not finite:
        return
    svg = picture(text, width)
    height = float(svg.get("viewBox", "").split()[3])
    for x, y in re.findall(r"[ML]([\d.e+-]+) ([\d.e+-]+)", "".join(e.get("d", "") for e in svg.iter("path"))):
        assert LEFT <= float(x) <= width - RIGHT and 0 <= float(y) <= height
    assert not re.search(r'd="[^"]*(nan|inf)', text)
    assert len(texts(svg, "group")) <= 9, "at most so many round steps"
    assert_labels_fit(svg)


def test_a_long_training_stays_small() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 10.0 * i, "loss": math.sin(i), "loss_smooth": 0.0, "lr": 1.0} for i in range(20_000)
    ]
    assert len(ElementTree.tostring(draw(rows))) < 80_000
    assert len(curves(log(rows))) < 200_000


EVEN: list[dict[str, float | None]] = [
    {"step": float(i), "metric_online": 0.5, "metric_deploy": 0.5, "deploy_gap": 0.0} for i in range(9)
]
LONG: list[dict[str, float | None]] = [
    {"step": 2500.0 * i, "loss": -1.2345e-5 * i, "loss_smooth": -1.2345e-5 * i, "lr": 9.9987e-6 / (i + 1),
     "metric_online": -1234.5678e9 * i, "metric_deploy": -0.00012345, "deploy_gap": -4.3219e-5}
    for i in range(401)
]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [TRAINED, EVEN, LONG], ids=["trained", "even", "long"])
def test_labels_fit_at_every_width(rows: list[dict[str, float | None]], width: int) -> None:
    svg = draw(rows, width)
    assert_labels_fit(svg)
    ends = [e for e in svg.iter("text") if e.get("class") == "end"]
    assert {e.get("x") for e in ends} == {str(width - RIGHT)}, "above the end of the strip, and not beyond it"
    assert len(ends) == (2 if rows is EVEN else 4) and len(texts(svg, "group")) >= 4


def test_a_last_step_that_has_no_room_beside_the_one_before_goes() -> None:
    svg = draw([{"step": 9999996.0 + 5 * i, "deploy_gap": 0.0} for i in (0, 1)], WIDTHS[-1])
    assert texts(svg, "group")[-2:] == ["9999999", "10000000"] and len(paths(svg, "border")) == 6


def test_the_last_step_stays_inside() -> None:
    svg = draw(LONG, WIDTHS[-1])
    last = [e for e in svg.iter("text") if e.get("class") == "group"][-1]
    assert last.text == "1000000" and float(last.get("x", "")) < WIDTHS[-1] - RIGHT
    assert f"M{WIDTHS[-1] - RIGHT} " in "".join(paths(svg, "border")), "its line is at its own place"


@pytest.mark.parametrize("rows", [TRAINED, TRAINED[:3]], ids=["with metric", "without"])
def test_the_page_shows_them_and_still_needs_nothing_from_elsewhere(rows: list[dict[str, float | None]]) -> None:
    reports = sample_reports()
    text = page("mnist", run_of(reports), reports, logs={"train": log(rows)})
    train = text[text.index('id="stage-0"') : text.index('id="stage-1"')]
    assert re.findall(r'<svg class="(\w+)"', train) == [f"w{width}" for width in WIDTHS]
    assert ("valid_interval" in train) == (rows is not TRAINED) and ("weights that ship are behind" in train) == (
        rows is TRAINED
    )
    assert not re.search(r"https?:|@import|url\(| style=", text)
    assert "smoothed" not in page("mnist", run_of(reports), reports)
