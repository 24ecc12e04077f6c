"""The chart: every layer in its slot, failing ones crossed, nothing drawn that was not measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline.report import LayerDiff, Report
from layerline.views.chart import FLAT, GAP, LEFT, RIGHT, STRIP, WIDTH, chart
from layerline.views.follow import follow
from tests.views.samples import diff, many, sample_reports, values

levels = st.one_of(st.none(), st.floats(-200, 400), st.sampled_from([math.inf, -math.inf, math.nan]))


def draw(*reports: Report) -> ElementTree.Element:
    named = {r.stage: r for r in reports}
    return ElementTree.fromstring(chart(follow(named), list(named)))


def paths(svg: ElementTree.Element, kind: str) -> list[str]:
    return [e.get("d", "") for e in svg.iter("path") if e.get("class") == kind]


def texts(svg: ElementTree.Element, kind: str) -> list[str]:
    return [e.text or "" for e in svg.iter("text") if (e.get("class") or "").split()[0] == kind]


def records_of(found: list[tuple[float | None, bool]]) -> tuple[LayerDiff, ...]:
    return tuple(
        diff(f"v{i}", f"m.{i}", db=db, rel_l2=1.0, tolerance=2.0 if ok else 0.5) for i, (db, ok) in enumerate(found)
    )


@given(st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=30))
def test_each_measured_layer_has_one_mark_inside_the_picture(found: list[tuple[float | None, bool]]) -> None:
    report = Report(stage="s", records=records_of(found))
    if all(db is None for db, _ in found):
        assert chart(follow({"s": report}), ["s"]) == ""
        return
    svg = draw(report)
    drawn = [ok for db, ok in found if db is not None]
    dots = "".join(paths(svg, "dots") + paths(svg, "dots equal"))
    assert dots.count("M") == sum(drawn)
    assert "".join(paths(svg, "crosses")).count("l8 8") == len(drawn) - sum(drawn)
    height = float(svg.get("viewBox", "").split()[3])
    for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", "".join(e.get("d", "") for e in svg.iter("path"))):
        assert LEFT - 4 <= float(x) <= WIDTH - RIGHT + 4
        assert 0 <= float(y) <= height


def test_stages_without_sqnr_have_no_strip() -> None:
    svg = draw(*sample_reports().values())
    assert texts(svg, "stage") == ["train", "ema", "export", "fuse", "quantize"]


def test_the_line_breaks_where_layers_are_equal() -> None:
    svg = draw(
        Report(stage="s", records=tuple(diff(f"v{i}", db=db) for i, db in enumerate([20, 21, math.inf, 22, 23])))
    )
    (line,) = paths(svg, "line")
    assert line.count("M") == 2
    assert "equal" in texts(svg, "tick")


def test_the_worst_failing_layers_are_named_or_else_the_lowest() -> None:
    svg = draw(*sample_reports().values())
    assert {"layer1.0.conv1", "mean"} <= set(texts(svg, "name"))
    passing = draw(Report(stage="s", records=(diff("a", "m.a", db=30.0), diff("b", "m.b", db=20.0))))
    assert texts(passing, "name") == ["m.b"]


def test_groups_are_as_deep_as_there_is_room() -> None:
    roomy = texts(draw(Report(stage="s", records=values(30))), "group")
    assert roomy == ["stem.conv", "stem.act", "layer1.0.conv1", "layer1.0", "layer1.0.relu", "mean", "head.fc"]
    crowded = tuple(diff(f"v{i}", f"block{i // 40}.branch_{i % 40}.conv", db=30.0) for i in range(120))
    assert texts(draw(Report(stage="s", records=crowded)), "group") == ["block0", "block1", "block2"]
    numbered = texts(draw(many("s", 2000, 30.0)), "group")
    assert numbered[:3] == ["…layers.0", "…layers.3", "…layers.6"]
    assert len(set(numbered)) == len(numbered)


def test_a_long_network_has_a_line_and_no_dots() -> None:
    svg = draw(many("s", 2000, 30.0))
    assert paths(svg, "dots") == [""]
    assert len(ElementTree.tostring(svg)) < 60_000


def test_the_name_of_the_lowest_layer_is_below_the_line() -> None:
    svg = draw(Report(stage="s", records=values(40)))
    name = next(e for e in svg.iter("text") if e.get("class") == "name")
    line = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", paths(svg, "line")[0])]
    height = 11  # of its letters, in user units
    assert float(name.get("y", "")) - height > max(line)


def test_a_strip_of_equal_layers_takes_no_room_for_figures_it_has_not() -> None:
    def height(*reports: Report) -> float:
        return float(draw(*reports).get("viewBox", "").split()[3])

    flat, drawn = Report(stage="a", records=values(math.inf)), Report(stage="b", records=values(40))
    assert height(drawn) - height(flat) == STRIP - FLAT
    assert height(flat, drawn) == height(drawn) + FLAT + GAP
    mixed = Report(stage="a", records=(*values(math.inf), diff("last", db=20.0)))
    assert height(mixed) == height(drawn)


def test_names_of_wide_letters_leave_each_other_room() -> None:
    names = [f"Conv@{i}Relu@{i + 1}" for i in range(240)]
    svg = draw(Report(stage="s", records=tuple(diff(f"v{i}", name, db=30.0) for i, name in enumerate(names))))
    labels = [(float(e.get("x", "")), e.text or "") for e in svg.iter("text") if e.get("class") == "group"]
    # 6 units a letter, 11 a sign such as @: what a browser draws at this size, and something between two names.
    widths = [7 * (len(text) - 2) + 2 * 11 for _, text in labels]
    for (x, _), (y, _), a, b in zip(labels, labels[1:], widths, widths[1:], strict=False):
        assert y - x > (a + b) / 2 - 4
    assert 5 < len(labels) < 12 and len(paths(svg, "border")) == 0
