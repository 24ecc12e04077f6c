"""The heat map: a cell for each measured layer, the shade of its error, and nothing drawn that was not measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layerline.pipeline.report import LayerDiff, Report
from layerline.views.canvas import WIDTHS
from layerline.views.follow import by_module, by_own_error, follow
from layerline.views.heat_map import STEPS, heat_map
from tests.views.pictures import assert_labels_fit, paths, picture, texts
from tests.views.samples import diff, many, sample_reports, values

levels = st.one_of(st.none(), st.floats(-200, 400), st.sampled_from([math.inf, -math.inf, math.nan]))
SHADES = [f"h{i}" for i in range(len(STEPS) + 1)] + ["bad"]


def draw(*reports: Report, width: int = WIDTHS[0]) -> ElementTree.Element:
    named = {r.stage: by_own_error(r) for r in reports}
    return picture(heat_map(by_module(follow(named)), list(named)), width)


def cells(svg: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """By shade where its areas begin and end on the x axis; the legend's are left out."""
    drawn = {}
    for kind in SHADES:
        areas = [d for group in svg.iter("g") for d in paths(group, kind)]
        drawn[kind] = [(float(a), float(b)) for d in areas for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)v", d)]
    return {kind: spans for kind, spans in drawn.items() if spans}


def records_of(found: list[tuple[float | None, bool]]) -> tuple[LayerDiff, ...]:
    return tuple(
        diff(f"v{i}", f"m.{i}", db=db, rel_l2=1.0, tolerance=2.0 if ok else 0.5) for i, (db, ok) in enumerate(found)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=30), st.sampled_from(WIDTHS))
def test_each_measured_layer_has_one_cell_inside_the_picture(
    found: list[tuple[float | None, bool]], width: int
) -> None:
    report = Report(stage="s", records=records_of(found))
    if all(db is None and ok for db, ok in found):
        assert heat_map(follow({"s": report}), ["s"]) == ""
        return
    drawn = cells(draw(report, width=width))
    assert len(drawn.pop("bad", [])) == sum(not ok for _, ok in found)
    assert sum(map(len, drawn.values())) == sum(db is not None and ok for db, ok in found)
    assert all(0 <= left < right <= width for spans in drawn.values() for left, right in spans)


@pytest.mark.parametrize(
    ("db", "shade"),
    [(math.inf, "h11"), (100.0, "h11"), (99.9, "h10"), (20.0, "h4"), (19.9, "h3"), (4.9, "h0"), (math.nan, "h0")],
)
def test_a_shade_is_a_range_of_decibels(db: float, shade: str) -> None:
    # The second layer was not measured anywhere, and has no slot.
    assert cells(draw(Report(stage="s", records=(diff("a", db=db), diff("b", "b"))))) == {shade: [(0.0, 1159.0)]}


def test_the_own_error_is_drawn_where_it_was_measured() -> None:
    late = diff("a", "m.a", db=12.0, extra={"isolated_sqnr_db": 55.0})
    early = diff("b", "m.b", db=30.0, extra={"isolated_sqnr_db": 18.0})
    svg = draw(Report(stage="fuse", records=values(120)), Report(stage="quantize", records=(late, early)))
    assert texts(svg, "figure")[-2:] == ["55.0", "18.0"]
    assert texts(svg, "end")[-1] == "m.b  18.0 dB", "the worst by itself, where the error is made"


def test_stages_without_sqnr_have_no_row_and_failing_layers_are_named_first() -> None:
    svg = draw(*sample_reports().values())
    assert texts(svg, "stage") == ["train", "ema", "export", "fuse", "quantize"]
    assert texts(svg, "end")[-2:] == ["all equal", "mean  ✗ NaN"]
    assert len(cells(svg)["bad"]) == 2


def test_of_layers_narrower_than_a_unit_the_worst_is_drawn() -> None:
    lost = {1234: 2.0, 3210: 3.0}
    records = tuple(diff(f"v{i}", f"m.{i}", db=lost.get(i, 130.0)) for i in range(5000))
    svg = draw(Report(stage="s", records=records))
    starts = [left for left, _ in cells(svg)["h0"]]
    assert starts == pytest.approx([1234 / 5000 * 1160, 3210 / 5000 * 1160], abs=1)
    assert len(cells(svg)["h11"]) == 3, "neighbours of one shade are one area"
    assert len(ElementTree.tostring(svg)) < 6_000


def test_groups_are_as_deep_as_there_is_room() -> None:
    roomy = texts(draw(Report(stage="s", records=values(30))), "group")
    assert roomy == ["stem.conv", "stem.act", "layer1.0.conv1", "layer1.0", "layer1.0.relu", "mean", "head.fc"]
    crowded = tuple(diff(f"v{i}", f"block{i // 40}.branch_{i % 40}.conv", db=30.0) for i in range(120))
    assert texts(draw(Report(stage="s", records=crowded)), "group") == ["block0", "block1", "block2"]
    numbered = texts(draw(many("s", 2000, 30.0)), "group")
    assert numbered[:3] == ["…layers.1", "…layers.4", "…layers.7"]
    assert len(set(numbered)) == len(numbered)


def test_a_module_that_is_a_row_itself_does_not_hide_the_names_of_its_parts() -> None:
    names = [f"encoder.{i // 6}.part_{i % 6}" for i in range(60)]
    records = tuple(diff(n, n, db=30.0) for n in [*names, "encoder"])
    assert texts(draw(Report(stage="s", records=records)), "group")[:3] == ["encoder.0", "encoder.1", "encoder.2"]


def test_a_group_is_named_by_its_parts_only_where_their_paths_are_read_whole() -> None:
    found = Report(
        stage="s", records=tuple(diff(f"v{i}", f"encoder{i // 40}.block.part{i % 40}", db=30.0) for i in range(80))
    )
    assert texts(draw(found), "group") == ["encoder0.block", "encoder1.block"]


SCENES = {
    "failing": list(sample_reports().values()),
    "numbered": [many("a stage of a long name", 2000, 30.0), many("quantize", 2000, math.inf)],
    "long names": [
        Report(
            stage="quantize-everything-but-the-head-and-the-stem-of-it",
            records=tuple(
                diff(f"v{i}", f"encoder.layers.{i}.attention.output.{'projection_' * 4}{i}", db=db, tolerance=0.01)
                for i, db in enumerate([20.0, 30.0, 5.0, math.nan, 12.0, 18.0, 9.0])
            ),
        )
    ],
    "wide letters": [
        Report(stage="s", records=tuple(diff(f"v{i}", f"Conv@{i}Relu@{i + 1}", db=3.0) for i in range(240)))
    ],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_labels_fit_at_every_width(scene: str, width: int) -> None:
    assert_labels_fit(draw(*SCENES[scene], width=width))


@example([("block.0", None, True), ("block.0", float("inf"), True)], 1160)  # one value of a module has no SQNR
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.from_regex(r"\A[a-zW]{1,12}(\.[a-z0-9_]{1,30}){0,4}\Z"), levels, st.booleans()), max_size=40),
    st.sampled_from(WIDTHS),
)
def test_labels_of_any_modules_fit(found: list[tuple[str, float | None, bool]], width: int) -> None:
    records = tuple(
        diff(f"v{i}", module, db=db, rel_l2=1.0, tolerance=2.0 if ok else 0.5)
        for i, (module, db, ok) in enumerate(found)
    )
    if any(r.sqnr_db is not None or not r.passed for r in records):
        assert_labels_fit(draw(Report(stage="s", records=records), width=width))
