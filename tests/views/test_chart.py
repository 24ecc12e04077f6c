"""The chart: every layer in its slot, failing ones crossed, nothing drawn that was not measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline.report import LayerDiff, Report
from layerline.views.canvas import GAP, HEAD, LEFT, RIGHT, STRIP, WIDTHS
from layerline.views.chart import FLAT, chart
from layerline.views.follow import follow
from tests.views.pictures import assert_labels_fit, boxes, paths, picture, texts
from tests.views.samples import diff, many, sample_reports, values

levels = st.one_of(st.none(), st.floats(-200, 400), st.sampled_from([math.inf, -math.inf, math.nan]))


def draw(*reports: Report, width: int = WIDTHS[0]) -> ElementTree.Element:
    named = {r.stage: r for r in reports}
    return picture(chart(follow(named), list(named)), width)


def records_of(found: list[tuple[float | None, bool]]) -> tuple[LayerDiff, ...]:
    return tuple(
        diff(f"v{i}", f"m.{i}", db=db, rel_l2=1.0, tolerance=2.0 if ok else 0.5) for i, (db, ok) in enumerate(found)
    )


@given(st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=30), st.sampled_from(WIDTHS))
def test_each_measured_layer_has_one_mark_inside_the_picture(
    found: list[tuple[float | None, bool]], width: int
) -> None:
    report = Report(stage="s", records=records_of(found))
    if all(db is None for db, _ in found):
        assert chart(follow({"s": report}), ["s"]) == ""
        return
    svg = draw(report, width=width)
    drawn = [ok for db, ok in found if db is not None]
    dots = "".join(paths(svg, "dots") + paths(svg, "dots equal"))
    assert dots.count("M") == sum(drawn)
    assert "".join(paths(svg, "crosses")).count("l8 8") == len(drawn) - sum(drawn)
    height = float(svg.get("viewBox", "").split()[3])
    for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", "".join(e.get("d", "") for e in svg.iter("path"))):
        assert LEFT - 4 <= float(x) <= width - RIGHT + 4
        assert 0 <= float(y) <= height


@pytest.mark.parametrize(
    ("figures", "ticks"),
    [
        ([40.0, 31.0, 829.0], ["≥ 200 dB", "30"]),
        ([829.0, 900.0], ["≥ 200 dB", "180"]),
        ([40.0, 31.0, -760.0], ["40 dB", "≤ -60"]),
        ([200.5, -61.0], ["≥ 200 dB", "≤ -60"]),
        ([40.0, 31.0, 130.0], ["130 dB", "30"]),
    ],
)
def test_one_figure_far_out_does_not_flatten_the_others(figures: list[float], ticks: list[str]) -> None:
    svg = draw(Report(stage="s", records=records_of([(db, True) for db in figures])))
    assert texts(svg, "tick") == ticks


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
    assert numbered[:3] == ["…layers.0", "…layers.4", "…layers.8"]
    assert len(set(numbered)) == len(numbered)


def test_a_group_is_named_by_its_parts_only_where_their_paths_are_read_whole() -> None:
    found = Report(
        stage="s", records=tuple(diff(f"v{i}", f"encoder{i // 40}.block.part{i // 8 % 5}", db=30.0) for i in range(80))
    )
    assert texts(draw(found), "group") == ["encoder0.block", "encoder1.block"]


def test_a_long_network_has_a_line_and_no_dots() -> None:
    svg = draw(many("s", 2000, 30.0))
    assert paths(svg, "dots") == [""]
    assert len(ElementTree.tostring(svg)) < 60_000
    flat = draw(many("s", 2000, math.inf))
    assert paths(flat, "dots equal") == [f"M{LEFT + 0.3} {2 + HEAD}H{WIDTHS[0] - RIGHT - 0.3}"], "a bar of equal ones"


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
    assert height(flat, drawn) == height(drawn) + HEAD + FLAT + GAP
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


SCENES = {
    "failing": list(sample_reports().values()),
    "numbered": [many("a stage of a long name", 2000, 30.0), many("quantize", 2000, math.inf)],
    "long names": [
        Report(
            stage="quantize",
            records=tuple(
                diff(f"v{i}", f"encoder.layers.{i}.attention.output.{'projection_' * 4}{i}", db=db, tolerance=0.01)
                for i, db in enumerate([20.0, 30.0, 5.0, math.nan, 12.0, 18.0, 9.0])
            ),
        )
    ],
    "a name at each edge": [
        Report(stage=s, records=tuple(diff(f"v{i}", n, db=db) for i, (n, db) in enumerate(found)))
        for s, found in {
            "first": [("MobileNetV3.mmmmmmmmmmmmmmmmmmmm", 10.0), ("b", 30.0), ("c", 30.0)],
            "last": [("a", 30.0), ("b", 30.0), ("MobileNetV3.WWWWWWWWWWWWWWWWWWWW", 10.0)],
        }.items()
    ],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_labels_fit_at_every_width(scene: str, width: int) -> None:
    assert_labels_fit(draw(*SCENES[scene], width=width))


@given(
    st.lists(st.tuples(st.from_regex(r"\A[a-zW]{1,12}(\.[a-z0-9_]{1,30}){0,4}\Z"), levels, st.booleans()), max_size=40),
    st.sampled_from(WIDTHS),
)
def test_labels_of_any_modules_fit(found: list[tuple[str, float | None, bool]], width: int) -> None:
    records = tuple(
        diff(f"v{i}", module, db=db, rel_l2=1.0, tolerance=2.0 if ok else 0.5)
        for i, (module, db, ok) in enumerate(found)
    )
    if any(r.sqnr_db is not None for r in records):
        assert_labels_fit(draw(Report(stage="s", records=records), width=width))


def test_a_long_run_of_layers_keeps_its_name_beside_a_short_one() -> None:
    modules = ["stem"] * 20 + ["pool"] + ["head"] * 2
    found = Report(stage="s", records=tuple(diff(f"v{i}", m, db=30.0) for i, m in enumerate(modules)))
    assert [texts(draw(found, width=width), "group") for width in (WIDTHS[0], WIDTHS[-1])] == [
        ["stem", "head", "pool"],
        ["stem", "head"],
    ]


def test_the_name_of_a_lost_layer_is_beside_its_mark() -> None:
    svg = draw(Report(stage="s", records=(diff("a", "m.a", db=math.nan, tolerance=0.1), diff("b", "m.b", db=20.0))))
    (name,) = [b for b in boxes(svg) if b.text == "m.a" and b.bottom < 2 + HEAD + STRIP + 12]
    x, y = map(float, re.findall(r"M([\d.]+) ([\d.]+)", paths(svg, "crosses")[0])[0])
    assert name.left > x + 8 and name.top < y + 4 < name.bottom
