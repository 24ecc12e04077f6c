"""One row follows a value through every stage, in the network's order."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline.report import LayerDiff, Report
from layerline.views.follow import by_module, by_own_error, follow, follow_views, in_network_order
from tests.views.samples import LAYERS, diff, sample_reports, values


def names(*reports: Report) -> list[str]:
    return [row.value for row in follow({r.stage: r for r in reports})]


def test_one_row_per_value_with_every_stage_that_measured_it() -> None:
    rows = {row.value: row for row in follow(sample_reports())}
    assert list(rows["conv2d_1"].records) == ["export", "fuse", "quantize"]
    assert rows["conv2d_1"].layer == "layer1.0.conv1"
    assert list(rows["head.fc.weight"].records) == ["train", "ema"]
    assert rows["mean"].layer == "mean"


def test_parameters_stand_before_their_module_and_new_values_behind_the_one_they_follow() -> None:
    trained = Report(stage="train", records=(diff("w1", "m.b", "parameter"), diff("w0", "m.a", "parameter")))
    export = Report(stage="export", records=(diff("a", "m.a"), diff("b", "m.b"), diff("c", "m.c")))
    fused = Report(stage="fuse", records=(diff("a", "m.a"), diff("a_fused", ""), diff("c", "m.c")))
    assert names(trained, export, fused) == ["w0", "a", "a_fused", "w1", "b", "c"]


def test_values_named_by_module_stand_inside_their_module() -> None:
    weights = tuple(diff(f"{m}.weight", m, "parameter") for m in ("m.a", "m.b"))
    hooks = tuple(diff(m, m, "Conv2d") for m in ("m.a", "m.b"))
    export = Report(stage="export", records=(diff("a", "m.a"), diff("b", "m.b"), diff("c", "m.c")))
    expected = ["m.a.weight", "a", "m.a", "m.b.weight", "b", "m.b", "c"]
    assert names(Report(stage="ema", records=weights + hooks), export) == expected


def test_parameters_are_not_first_where_their_report_measures_most() -> None:
    weights = tuple(diff(f"{m}.weight", m, "parameter", 40.0) for m in ("m.a", "m.b"))
    scale = diff("scale", "", "parameter", 40.0)
    hooks = tuple(diff(m, m, "Conv2d", 30.0) for m in ("m.a", "m.b", "m.c", "m"))
    ema = Report(stage="ema", records=(scale, *weights, *hooks))
    export = Report(stage="export", records=(diff("a", "m.a", db=90.0), diff("b", "m.b", db=90.0)))
    expected = ["scale", "m.a.weight", "m.a", "a", "m.b.weight", "m.b", "b", "m.c", "m"]
    assert names(ema, export) == expected
    alone = [name for name in expected if name not in ("a", "b")]
    assert names(ema) == [r.name for r in in_network_order(ema.records)] == alone
    only = Report(stage="train", records=weights)
    assert in_network_order(only.records) == list(weights), "without a value there is the report's own order alone"


@given(st.permutations(range(6)), st.integers(0, 5), st.integers(0, 5))
def test_the_longest_report_keeps_its_order(order: list[int], a: int, b: int) -> None:
    whole = [diff(f"v{i}", f"m.{i % 2}") for i in order]
    part = [r for r in whole if r.name not in (f"v{a}", f"v{b}")]
    assert names(Report(stage="fuse", records=tuple(part)), Report(stage="export", records=tuple(whole))) == [
        r.name for r in whole
    ]


def test_a_report_that_measured_nothing_does_not_give_the_order() -> None:
    export = Report(stage="export", records=tuple(diff(v, f"m.{v}", db=130.0) for v in "abc"))
    engine = Report(stage="engine", records=tuple(diff(v, f"m.{v[0]}") for v in ("c", "b/quantized", "b", "a", "x/q")))
    assert [name for name in names(export, engine) if name in "abc"] == ["a", "b", "c"]


def test_a_module_shows_the_worst_of_its_values_in_each_stage() -> None:
    low, high = diff("relu", "act", "Relu", 20.0), diff("relu_1", "act", "Relu", 50.0)
    lost = diff("relu_1", "act", "Relu", 90.0, one_sided=1)
    reports = {"a": Report(stage="a", records=(low, high)), "b": Report(stage="b", records=(lost,))}
    (module,) = by_module(follow(reports))
    assert module.records == {"a": low, "b": lost}
    assert (module.layer, module.value, module.op) == ("act", "2", "Relu")


def test_worst_first_is_failed_then_lowest_and_learned_changes_last() -> None:
    sqnr_by_module, sqnr, relative_by_module, relative = follow_views(follow(sample_reports()), list(sample_reports()))
    order = [row[1] for row in sqnr.rows]
    assert order[:2] == ["mean", "conv2d_1"]
    assert order[2:].index("logits") == 0
    assert all(name.endswith("weight") or name == "stem.conv" for name in order[-4:])
    assert [len(v.rows) for v in (sqnr_by_module, relative_by_module)] == [len({m or n for n, m, _ in LAYERS})] * 2
    assert len(sqnr.rows) == len(relative.rows) == len(LAYERS) + 4


def test_what_was_not_measured_is_empty_and_a_stage_that_measured_nothing_has_no_column() -> None:
    lost = diff(*LAYERS[0])
    partly = Report(stage="quantize", records=(lost, *values(30)[1:]))
    reports = {
        "export": Report(stage="export", records=values(100)),
        "quantize": partly,
        "engine": Report(stage="engine"),
    }
    for view in follow_views(follow(reports), list(reports)):
        assert [c.label for c in view.columns][2:] == ["export", "quantize", "op", "order"]
        assert [row[0] for row in view.rows if row[3] == ""] == [lost.module] and all(row[2] for row in view.rows)
    (change, *_) = follow_views(
        follow({"train": Report(stage="train", records=(diff("w", "m", "parameter"),))}), ["train"]
    )
    assert [c.label for c in change.columns] == ["layer", "values", "op", "order"]


def test_equal_is_said_and_a_value_measured_twice_counts_once() -> None:
    report = Report(stage="s", records=(diff("a", db=math.inf), diff("b", db=30.0), diff("b", db=10.0)))
    view = follow_views(follow({"s": report}), ["s"])[1]
    assert [tuple(row[1:3]) for row in view.rows] == [("b", "10.0"), ("a", "equal")]


def test_own_errors_come_first_where_a_stage_measured_them() -> None:
    late, early = (
        diff(n, n, db=db, extra={"isolated_sqnr_db": own}) for n, db, own in (("a", 9.0, 50.0), ("b", 30.0, 20.0))
    )
    reports = {
        "fuse": Report(stage="fuse", records=(diff("a", "a", db=90.0),)),
        "q": Report(stage="q", records=(late, early)),
    }
    own = follow({stage: by_own_error(report) for stage, report in reports.items()})
    views = follow_views(follow(reports), list(reports), own)
    assert [view.label.split(",")[0] for view in views] == ["own error in dB"] * 2 + ["SQNR in dB"] * 2 + ["rel L2"] * 2
    assert [tuple(row[:4]) for row in views[1].rows] == [("b", "b", "", "20.0"), ("a", "a", "90.0", "50.0")]
    assert [row[0] for row in views[3].rows] == ["a", "b"]


def fused(into: dict[str, str], *records: LayerDiff) -> dict[str, Report]:
    """A convolution, its BatchNorm and a ReLU exported, and what fuse made of them."""
    exported = tuple(diff(v, m) for v, m in (("conv", "net.conv"), ("norm", "net.bn"), ("relu", "net.act")))
    return {
        "ema": Report(stage="ema", records=(diff("net.conv.weight", "net.conv", "parameter"),)),
        "export": Report(stage="export", records=exported),
        "fuse": Report(stage="fuse", records=records, merged=into),
    }


def merged(reports: dict[str, Report]) -> tuple[dict[str, str], dict[str, str]]:
    rows = follow(reports)
    return {r.value: r.into for r in rows if r.into}, {r.layer: r.into for r in by_module(rows) if r.into}


def test_what_was_merged_names_the_value_and_the_module_that_hold_it() -> None:
    norm, relu = diff("norm", "net.bn"), diff("relu", "net.act")
    once = fused({"conv": "norm", "of no record": "norm"}, norm, relu)
    assert merged(once) == ({"conv": "norm"}, {"net.conv": "net.bn"})
    twice = fused({"conv": "relu", "norm": "relu"}, relu)
    assert merged(twice) == ({"conv": "relu", "norm": "relu"}, {"net.conv": "net.act", "net.bn": "net.act"})
    (modules, values_, _, _) = follow_views(follow(once), list(once))
    assert [c.label for c in values_.columns][-3:] == ["merged into", "op", "order"]
    assert {row[0]: row[-3] for row in modules.rows} == {"net.conv": "net.bn", "net.bn": "", "net.act": ""}


def test_values_merged_inside_one_module_leave_its_row_alone() -> None:
    parts = (diff("erf", "act", "Erf"), diff("gelu", "act", "Mul"))
    fuse = Report(stage="fuse", records=parts[1:], merged={"erf": "gelu"})
    assert merged({"export": Report(stage="export", records=parts), "fuse": fuse}) == ({"erf": "gelu"}, {})


def test_no_reports() -> None:
    assert follow({}) == []
    assert follow({"s": Report(stage="s")}) == []
