"""The page is whole, inert and complete, whatever a report holds."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerline.pipeline.diagnosis.causes import Evidence
from layerline.pipeline.diagnosis.quantize_causes import sensitive_layers
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import CHANNELS, CONVERGENCE, FLIPPED, HISTOGRAMS, Gate, Report
from layerline.pipeline.untrusted import printable
from layerline.views.canvas import WIDTHS
from layerline.views.html import page
from tests.views.samples import diff, many, run_of, sample_reports

EVIL = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"' onmouseover='alert(1)",
    "a & b &lt; &amp;c <i>d</i>",
    "]]>{{7*7}}\u2028\\u003c/script>",
]


class Parsed(HTMLParser):
    """What a browser would make of a page: elements with their attributes, text, and the data of the tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.data: list[dict[str, Any]] = []
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.attributes += attrs
        self._in = "json" if ("type", "application/json") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "json":
            self.data.append(json.loads(data))
        elif self._in not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def cells(self) -> set[str]:
        """Every cell of every table, shown or not."""
        return {cell for grid in self.data for view in grid["views"] for row in view["rows"] for cell in row}


def hostile(text: str) -> tuple[str, Run, dict[str, Report]]:
    """A run in which every string that comes from outside is `text`."""
    fields: dict[str, Any] = {"module": text, "op": text, "dtype": text, "shape": (text,), "extra": {text: text}}
    report = Report(
        stage=text,
        reference=text,
        candidate=text,
        records=(diff(text, db=9.0, tolerance=0.01, **fields), diff("other", text, text, 20.0)),
        metrics={text: text},
        gates=(Gate(text, False, text, text, text),),
        notes=(text,),
        tables={text: [{text: text}]},
    )
    names: dict[str, Any] = dict.fromkeys(("key", "digest", "kind", "created"), text)
    return text, replace(run_of({text: report}, **names), id=text), {text: report}


def structure(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return Parsed(page(*hostile(text))).elements


def render(reports: dict[str, Report]) -> str:
    return page("mnist", run_of(reports), reports)


@pytest.mark.parametrize("evil", EVIL)
def test_no_string_becomes_markup(evil: str) -> None:
    # A harmless string of the same length gives the very same elements and attributes.
    assert structure(evil) == structure("x" * len(evil))
    parsed = Parsed(page(*hostile(evil)))
    assert printable(evil) in parsed.text
    assert printable(evil) in parsed.cells()


# Dots divide a module path, which the chart shows; white space alone may make a label empty.
@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters=".", exclude_categories=("C", "Z", "N")), min_size=1))
def test_any_text_leaves_the_structure_alone(text: str) -> None:
    assert structure(text) == structure("x" * len(text))


def test_it_needs_nothing_from_elsewhere_and_allows_nothing_else() -> None:
    text = render(sample_reports())
    parsed = Parsed(text)
    assert not [n for n, _ in parsed.attributes if n.startswith("on") or n in ("src", "style")]
    assert all(v and v.startswith("#") for n, v in parsed.attributes if n == "href")
    assert not re.search(r"https?:|@import|url\(", text)
    (policy,) = [v for n, v in parsed.attributes if n == "content" and v and "default-src" in v]
    assert policy.startswith("default-src 'none'")
    for kind in ("script", "style"):
        (inlined,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inlined.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_same_run_gives_the_same_page() -> None:
    reports = sample_reports()
    run = run_of(reports)
    assert page("mnist", run, reports) == page("mnist", run, dict(reversed(reports.items())))
    revived = {stage: Report.from_json(report.to_json()) for stage, report in reports.items()}
    assert page("mnist", run, reports) == page("mnist", run, revived)


def test_everything_a_report_says_is_on_the_page() -> None:
    reports = sample_reports()
    parsed = Parsed(render(reports))
    cells = parsed.cells()
    for report in reports.values():
        assert {r.name for r in report.records} | {r.where for r in report.records} <= cells
        for said in (*report.notes, *report.metrics, *(g.hint for g in report.gates), *report.tables):
            assert said in parsed.text
    assert {"graph output", "✗ 9.3", "✗ 3 NaN/Inf", "equal"} <= cells
    assert "quantize" in parsed.text and "budget: 1.2 points, expected ≤ 0.5 points" in parsed.text


def test_a_row_per_stage_with_verdict_and_worst_layer() -> None:
    reports = sample_reports()
    text = render(reports)
    summary = text[text.index("<h2>Stages") : text.index("<h2>Error by")]
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", summary)
    assert [Parsed(row).texts[0] for row in rows] == list(reports)
    seen = Parsed(rows[list(reports).index("quantize")]).texts
    assert 'data-label="SQNR dB"' in rows[0], "a narrow window has no headings"
    assert seen[1] == "✗ failed" and "mean" in seen and "NaN" in seen and "12.5" in seen


def test_what_was_not_measured_is_empty_and_never_zero() -> None:
    records = (diff("w", "m", "parameter"), diff("v", "n", "parameter", 20.0))
    text = render({"train": Report(stage="train", records=records, metrics={"accuracy": None})})
    assert Parsed(text).cells() == {"w", "m", "v", "n", "parameter", "1", "2", "20.0", "0.100", ""}
    assert '<td class="low"></td>' in text
    assert "<dt>accuracy</dt><dd></dd>" in text


def test_numbers_that_are_not_finite_have_words() -> None:
    records = (
        diff("a", "m.a", db=math.inf),
        diff("b", "m.b", db=-math.inf, rel_l2=math.inf),
        diff("c", "m.c", db=math.nan, rel_l2=math.nan, cosine=math.nan, one_sided=2),
        diff("d", "m.d", db=12.0, extra={"isolated_sqnr_db": math.inf, "ratio": math.nan}),
    )
    report = Report(stage="s", records=records, metrics={"loss": math.nan})
    text = render({"s": report})
    parsed = Parsed(text)
    assert {"equal", "-inf", "inf", "NaN", "✗ 2 NaN/Inf"} <= parsed.cells()
    pictures = re.findall(r"<svg.*?</svg>", text)
    assert len(pictures) == len(WIDTHS) and not re.search(r'"[^"a-z]*(nan|inf)', "".join(pictures))


@pytest.mark.parametrize(
    "reports",
    [{}, {"engine": Report(stage="engine")}, {"train": Report(stage="train", tables={"none": [], "blank": [{}]})}],
)
def test_empty_reports(reports: dict[str, Report]) -> None:
    parsed = Parsed(render(reports))
    assert ("svg" in {tag for tag, _ in parsed.elements}) is False
    assert all(stage in parsed.text for stage in reports)


def test_a_missing_report_and_a_stage_that_stopped_are_said() -> None:
    reports = sample_reports()
    run = run_of(reports)
    assert "The report of this stage is missing." in page("t", run, {})
    assert "did not pass" in page("t", run, {})
    fine = run_of({"fuse": reports["fuse"]})
    assert "stopped before it left a record" in page("t", replace(fine, passed=False), reports)
    assert "failures" not in Parsed(page("t", fine, reports)).text


def test_two_thousand_records_stay_small_and_all_reachable() -> None:
    reports = {stage: many(stage, 2000, db) for stage, db in (("export", 130), ("quantize", 30))}
    text = render(reports)
    parsed = Parsed(text)
    assert len(text) < 1_500_000
    assert sum(tag == "tr" for tag, _ in parsed.elements) < 130
    assert {r.name for r in reports["export"].records} <= parsed.cells()


def test_a_failed_run_says_which_gates_failed_and_what_it_left_undone() -> None:
    reports = sample_reports()
    del reports["engine"]
    text = page("net", run_of(reports), reports, ["engine"])
    head = text[text.index("<header>") : text.index("</header>")]
    assert "1 gate failed" in head and "without a result: engine" in head
    passed = {"export": reports["export"]}
    text = page("net", run_of(passed), passed)
    assert "failed" not in text[text.index("<header>") : text.index("</header>")]


def test_the_figures_of_the_result_and_the_likely_causes_are_on_top() -> None:
    row = {"metric": "accuracy", "float": 0.98, "converted": 0.97, "change": -0.01, "low_95": -0.02, "high_95": -0.001}
    layer = diff("c", "net.c", db=9.0, extra={"isolated_sqnr_db": 11.0})
    figures = {"bytes_before": 4e6, "bytes_after": 1e6, "int8_products": "3 of 4", "output_sqnr_db": 21.0}
    gate = Gate("accuracy budget", False, "0.98 -> 0.97", "a drop of at most 0.005", "skip: [c]")
    report = Report(stage="quantize", records=(layer,), metrics=figures, gates=(gate,), tables={"metrics": [row]})
    causes = list(sensitive_layers(Evidence(reports={"quantize": report}, losses={"quantize": "accuracy"})))
    text = page("p", run_of({"quantize": report}), {"quantize": report}, causes=causes)
    head = Parsed(text[text.index("<header>") : text.index("</header>")]).text.split("\n")
    assert {"0.97", "float 0.98, change -0.01 (95 %: -0.02 to -0.001)", "1 MB", "float 4 MB, 4 times smaller"} <= set(
        head
    )
    assert {"int8", "3 of 4 matrix products", "21.0 dB", "skip: [c]", "a layer that int8 does not suit"} <= set(head)
    assert """--set 'quantize.layers={"c": "fp16"}'""" in head
    assert '<a href="#layer=c">net.c (c)</a>' in text


def test_the_plan_stands_in_the_order_of_the_network() -> None:
    report = Report(stage="quantize", records=(diff("a", "net.a", db=30.0), diff("b", "net.b", db=30.0)))
    value = {"name": "x", "module": "net.b", "dtype": "int8", "axis": None, "scales": [0.5], "calibrator": "mse"}
    entries = {"x": {**value, "why": "input of Conv"}, "y (Softmax)": {"module": "net.a", "reason": "skip"}}
    text = page("p", run_of({"quantize": report}), {"quantize": report}, plans={"quantize": entries})
    (rows,) = [view["rows"] for grid in Parsed(text).data for view in grid["views"] if view["label"] == "plan"]
    assert rows == [
        ["net.a", "y (Softmax)", "float: skip"],
        ["net.b", "x", "int8, step 0.5, range by mse: input of Conv"],
    ]


PICTURE = "data:image/png;base64,iVBORw0KGgo="
OTHER_FORMS = [
    (HISTOGRAMS, {"value": "a"}),
    (HISTOGRAMS, {"profile": "z", "range": math.nan, "end": 1.0}),
    (FLIPPED, {"sample": 3, "picture": "https://elsewhere.example/a.png"}),
    (FLIPPED, {"sample": 3, "picture": f"{PICTURE}&<script>"}),
    (CONVERGENCE, {"samples": "many"}),
]


@pytest.mark.parametrize(("title", "row"), OTHER_FORMS)
def test_a_table_that_only_has_the_name_of_a_drawn_one_is_listed(title: str, row: dict[str, Any]) -> None:
    text = render({"s": Report(stage="s", records=(diff("a", "a", db=3.0),), tables={title: [row]})})
    assert f"<summary>{title} <span>1" in text and "<img" not in text
    assert all(not any(grid["drawn"].values()) for grid in Parsed(text).data)


def test_flipped_samples_and_the_convergence_are_drawn() -> None:
    flips = [
        {"sample": 17, "became": "wrong", "float": 3, "converted": 8, "picture": PICTURE},
        {"sample": 18, "became": "right", "text": "a <b> c"},
    ]
    curve = [{"samples": n, "median_change": 1 / n, "greatest_change": None, "moving": 0.5} for n in (16, 32, 64)]
    rows = ((3, 9.5, 0.2), (1, math.inf, 0.0), (2, 7.0, 0.8))
    channels = [{"value": "a", "channel": n, "own_sqnr_db": db, "share": share} for n, db, share in rows]
    tables = {FLIPPED: flips, CONVERGENCE: curve, CHANNELS: channels}
    text = render({"quantize": Report(stage="quantize", records=(diff("a", "a", db=3.0),), tables=tables)})
    parsed = Parsed(text)
    assert ("src", PICTURE) in parsed.attributes and "sample 17: 3 → 8, wrong" in parsed.text
    assert "a <b> c" in parsed.texts and "sample 18: right" in parsed.text
    assert "samples 16 to 64; in the end change of the scales median 0.01562, share of values that moved 0.5" in text
    assert [row["channel"] for grid in parsed.data for row in grid["drawn"].get("channels", ())] == [2, 3]
    assert "img-src data:" in text and not any(f"<summary>{title}" in text for title in (FLIPPED, CONVERGENCE))
    assert f"<summary>{CHANNELS}" in text, "with the range and the weights of each"


def test_a_layer_that_fusing_gave_another_name_has_one_on_the_page() -> None:
    before = Report(
        stage="import-onnx", records=(diff("v0", "MatMul@0", "MatMul", 90.0), diff("v1", "Add@43", "Add", 90.0))
    )
    after = Report(stage="quantize", records=(diff("v1", "MatMul@0, Add@43", "Gemm", 20.0),))
    reports = {r.stage: r for r in (before, after)}
    text = page("p", run_of(reports), reports)
    assert '<a href="#layer=Add%4043">Add@43</a>' in text and "#layer=MatMul%400%2C" not in text


def test_bytes_are_told_in_megabytes() -> None:
    reports = {"engine": Report(stage="engine", metrics={"engine_bytes": 9732516})}
    text = page("p", run_of(reports), reports)
    assert "engine size <b>9.73 MB</b>" in text and "<dt>engine size</dt><dd>9.73 MB</dd>" in text
    assert "9732516" not in text
