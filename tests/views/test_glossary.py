"""Every column has a meaning, and docs/cli.md gives the same; LAYERLINE_WRITE_DOCS=1 writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

from layerline.pipeline.report import Report
from layerline.views import glossary
from layerline.views.html import page
from layerline.views.tables import records_table
from tests.views.samples import diff, run_of, sample_reports

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- columns -->\n"
# What stages put into `extra`, and the columns that say what they are about.
EXTRAS = {
    "isolated_sqnr_db": 1.0, "weight_sqnr_db": 1.0, "clipped": 0.001, "floor": 1e-7, "ratio": 0.5, "source": "t:3",
    "flips": 2, "masked": 9, "nondeterministic": "RandomNormal", "cause": "it jumps", "update_ratio": 0.1, "dead": True,
    "network_layer": "conv",
}  # fmt: skip
PLAIN = {"op", "shape", "dtype"}


def markdown() -> str:
    """The table of docs/cli.md."""
    lines = ["| column | unit | meaning |", "| --- | --- | --- |"]
    for term in glossary.TERMS:
        names = ", ".join(f"`{name}`" for name in term.name.split(", "))
        meaning = term.meaning.replace("|", r"\|")
        lines.append(f"| {names} | {term.unit} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_docs_have_the_same_table() -> None:
    before, *rest = PAGE.read_text("utf-8").split(MARK)
    if os.environ.get("LAYERLINE_WRITE_DOCS"):
        PAGE.write_text(before + MARK + markdown() + MARK + rest[1], "utf-8")
    assert PAGE.read_text("utf-8") == before + MARK + markdown() + MARK + rest[1]


def test_every_column_is_explained() -> None:
    names = {name for t in glossary.TERMS for name in t.name.split(", ")}
    quoted = {name for t in glossary.TERMS for name in re.findall("`([^`]+)`", t.meaning)}
    lost = {"nonfinite_a": 2, "nonfinite_b": 1, "one_sided": 1}
    record = diff("v", "m", db=30.0, max_abs=1.0, mean_abs=1.0, cosine=1.0, tolerance=1.0, **lost, extra=EXTRAS)
    assert not {c.label for c in records_table([record]).columns} - PLAIN - names - quoted


def test_the_page_ends_with_it() -> None:
    reports = sample_reports()
    text = page("mnist", run_of(reports), reports)
    assert text.index("What the columns mean") > text.index('id="stage-5"')
    assert "the layer&#39;s own error" in text


def test_shares_are_per_cent_on_the_page_too() -> None:
    report = Report(stage="quantize", records=(diff("v", db=30.0, extra={"clipped": 0.0019}),))
    view = records_table(report.records)
    assert dict(zip([c.label for c in view.columns], view.rows[0], strict=True))["clipped %"] == "0.19"
