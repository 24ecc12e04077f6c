"""What differs between runs: figures and layers, each beside its value in the other runs."""

from __future__ import annotations

import math
from dataclasses import replace

from layerline.pipeline.commands.lookup import PastRun
from layerline.pipeline.report import LayerDiff, Report
from layerline.views.html import page
from layerline.views.run_comparison import figures, moved
from tests.views.samples import diff, run_of


def past(name: str, *records: LayerDiff, **metrics: float) -> PastRun:
    reports = {"quantize": Report(stage="quantize", records=records, metrics={"nodes": 7, **metrics})}
    return PastRun(replace(run_of(reports), id=name), reports)


def test_figures_that_differ_stand_side_by_side() -> None:
    now, then = past("b", bytes_after=2e6, accuracy=0.5), past("a", bytes_after=4e6)
    view = figures(now, [then])
    assert [column.label for column in view.columns] == ["figure", "now", "a"]
    assert view.rows == [["quantize: file size after", "2 MB", "4 MB"], ["quantize: accuracy", "0.5", ""]]
    assert figures(now, [now]).rows == []
    failed = PastRun(replace(then.run, records=()), {})
    assert figures(now, [failed]).rows == [], "it finished no stage, so there is nothing to compare"


def test_the_layer_that_moved_most_comes_first() -> None:
    def layer(name: str, db: float, own: float | None = None) -> LayerDiff:
        return diff(name, f"net.{name}", db=db, extra={} if own is None else {"isolated_sqnr_db": own})

    now = past("c", layer("a", 9.0, 20.0), layer("b", 9.0, 50.0), layer("c", 9.0, math.inf), layer("new", 9.0, 9.0))
    then = past("b", layer("a", 9.0, 45.5), layer("b", 40.0, 50.05), layer("c", 9.0, 41.0))
    first = past("a", layer("a", 9.0, 20.0), layer("b", 9.0, 10.0))
    assert [row[:1] + row[2:-1] for row in moved(now, [then]).rows] == [
        ["net.c", "109.0", "equal", "41.0"],
        ["net.a", "25.5", "20.0", "45.5"],
    ], "by its own error: that of b is within a tenth, though the accumulated one is not"
    assert [row[:1] + row[2:-1] for row in moved(now, [then, first]).rows] == [
        ["net.c", "109.0", "equal", "41.0", ""],
        ["net.b", "40.0", "50.0", "50.0", "10.0"],
        ["net.a", "25.5", "20.0", "45.5", "20.0"],
    ]
    assert moved(now, [now]).rows == []
    lost, never = past("b", layer("a", 9.0, math.nan)), past("a", layer("a", 9.0, 20.0))
    assert [row[2] for row in moved(lost, [never]).rows] == ["inf"] and moved(lost, [lost]).rows == []


def test_the_page_shows_the_other_runs() -> None:
    now, then = past("now", diff("a", "net.a", db=20.0), accuracy=0.5), past("then", diff("a", "net.a", db=33.0))
    text = page("p", now.run, now.reports, others=[then])
    assert "Beside the run before" in text and "<code>then</code>" in text and "Layers that moved most" in text
    assert "Beside" not in page("p", now.run, now.reports)
