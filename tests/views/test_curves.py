"""The training log as curves: what was measured, where it was measured, and nothing else."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.views.curves import LEFT, RIGHT, Scale, curves, thinned, validated
from layerline.views.html import page
from tests.views.samples import run_of, sample_reports

HEADS = ["step", "loss", "loss_smooth", "lr", "metric_online", "metric_deploy", "deploy_gap"]
cells = st.one_of(st.none(), st.floats(-1e30, 1e30), st.sampled_from([math.inf, -math.inf]))


def log(rows: list[dict[str, float | None]]) -> str:
    """The text that a Monitor writes for these rows."""
    lines = [["" if row.get(h) is None else f"{row[h]:.9g}" for h in HEADS] for row in rows]
    return "\n".join(",".join(line) for line in [HEADS, *lines]) + "\n"


def draw(rows: list[dict[str, float | None]]) -> ElementTree.Element:
    return ElementTree.fromstring(curves(log(rows)))


def texts(svg: ElementTree.Element, kind: str) -> list[str]:
    return [e.text or "" for e in svg.iter("text") if (e.get("class") or "").split()[0] == kind]


def paths(svg: ElementTree.Element, kind: str) -> list[str]:
    return [e.get("d", "") for e in svg.iter("path") if (e.get("class") or "").split() == kind.split()]


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
    assert len(paths(svg, "area")) == 2
    titles = [e.text for e in svg.iter("title")]
    assert "step 50: online 0.9" in titles and "step 50: gap 0.095" in titles and len(titles) == 12
    assert "over steps 10 to 200; in the end metric online 0.9, metric would ship 0.82" in svg.get("aria-label", "")
    assert texts(svg, "group")[-1] == "200"


def test_only_what_was_measured_has_a_strip() -> None:
    plain = [{k: v for k, v in row.items() if k in ("step", "loss", "loss_smooth", "lr")} for row in TRAINED]
    assert texts(draw(plain), "stage") == ["loss", "learning rate"]
    assert not validated(log(plain)) and validated(log(TRAINED))
    assert curves(log([])) == curves("") == curves("a,b\n1,2\n") == ""
    assert curves(log([{"step": 1.0}])) == "", "a row in which nothing was measured"


def test_one_metric_alone_has_no_area() -> None:
    svg = draw([{"step": float(i), "metric_online": 100.0 + i} for i in (1, 2)])
    assert len(paths(svg, "line online")) == 1 and paths(svg, "area") == []


def test_the_gap_strip_keeps_zero_in_sight_and_one_point_is_a_dot() -> None:
    svg = draw([{"step": 7.0, "metric_online": 0.5, "metric_deploy": 0.25, "deploy_gap": 0.25}])
    assert "0" in texts(svg, "tick") and "0.25" in texts(svg, "tick")
    assert len(paths(svg, "dots online")) == 1 and len(paths(svg, "dots main")) == 2
    behind = draw([{"step": float(i), "deploy_gap": -0.1 - i / 100} for i in range(3)])
    assert texts(behind, "tick") == ["step", "-0.12", "0"]
    level = draw([{"step": float(i), "deploy_gap": 0.0} for i in range(3)])
    assert texts(level, "tick") == ["step", "0"] and texts(level, "end") == ["gap 0"]


@given(st.lists(st.tuples(*[cells] * 6), max_size=12), st.integers(0, 10**9), st.integers(1, 10**7))
def test_every_mark_lies_inside_the_picture(found: list[tuple[float | None, ...]], start: int, apart: int) -> None:
    rows = [dict(zip(HEADS, (start + i * apart, *values), strict=True)) for i, values in enumerate(found)]
    text = curves(log(rows))
    finite = any(v is not None and math.isfinite(v) for values in found for v in values)
    assert bool(text) == finite
    if not finite:
        return
    svg = ElementTree.fromstring(text)
    height = float(svg.get("viewBox", "").split()[3])
    for x, y in re.findall(r"[ML]([\d.e+-]+) ([\d.e+-]+)", "".join(e.get("d", "") for e in svg.iter("path"))):
        assert LEFT <= float(x) <= RIGHT and 0 <= float(y) <= height
    assert not re.search(r'd="[^"]*(nan|inf)', text)
    assert len(texts(svg, "group")) <= 9, "at most so many round steps"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4000))
def test_thinning_keeps_every_spike(values: list[float]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    scale = Scale(0, len(values) - 1, min(values), max(values), 0)
    kept = thinned(points, scale)
    assert len(kept) <= 2 * (RIGHT - LEFT + 1) and kept == sorted(kept, key=lambda p: p[0])
    assert {min(y for _, y in kept), max(y for _, y in kept)} == {scale.y(max(values)), scale.y(min(values))}


def test_a_long_training_stays_small() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 10.0 * i, "loss": math.sin(i), "loss_smooth": 0.0, "lr": 1.0} for i in range(20_000)
    ]
    assert len(curves(log(rows))) < 80_000


def test_two_labels_do_not_lie_on_each_other() -> None:
    svg = draw([{"step": float(i), "metric_online": 0.5, "metric_deploy": 0.5, "deploy_gap": 0.0} for i in range(9)])
    upper, lower = [float(e.get("y", "")) for e in svg.iter("text") if (e.get("class") or "").startswith("end")][:2]
    assert lower - upper >= 12


@pytest.mark.parametrize("rows", [TRAINED, TRAINED[:3]], ids=["with metric", "without"])
def test_the_page_shows_them_and_still_needs_nothing_from_elsewhere(rows: list[dict[str, float | None]]) -> None:
    reports = sample_reports()
    text = page("mnist", run_of(reports), reports, logs={"train": log(rows)})
    train = text[text.index('id="stage-0"') : text.index('id="stage-1"')]
    assert train.count("<svg") == 1 and 'class="curves"' in train
    assert ("valid_interval" in train) == (rows is not TRAINED) and ("what ships is behind" in train) == (
        rows is TRAINED
    )
    assert not re.search(r"https?:|@import|url\(| style=", text)
    assert 'class="curves"' not in page("mnist", run_of(reports), reports)
