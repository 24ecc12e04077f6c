"""`pipe report`: one run as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from urllib.parse import quote

from layerline.pipeline.config.project import as_options
from layerline.pipeline.records.ledger import Record, Run
from layerline.pipeline.records.lookup import Log
from layerline.pipeline.report import Gate, LayerDiff, Report, Scalar
from layerline.views import glossary
from layerline.views.chart import chart
from layerline.views.curves import curves, validated
from layerline.views.follow import MERGED, Followed, follow, follow_views, in_network_order
from layerline.views.grid import (
    FAILED,
    Column,
    View,
    amount,
    count,
    decibels,
    filled,
    free_view,
    grid,
    heading,
    outcome,
    records_view,
    scrolling,
    table,
)
from layerline.views.lines import DEPLOYED
from layerline.views.run_settings import made_with, settings_view
from layerline.views.screen import cleaned

MAIN_METRICS = 4
SUMMARY = (
    Column("stage"),
    Column("verdict"),
    Column("worst layer"),
    Column("its SQNR dB", "low"),
    Column("figures"),
    Column("compared", "number"),
    Column("failed", "number"),
    Column("seconds", "number"),
    Column("digest"),
)


def page(
    title: str,
    run: Run,
    reports: Mapping[str, Report],
    missing: Sequence[str] = (),
    logs: Mapping[str, Log] | None = None,
) -> str:
    """The run as a self-contained page; the same input gives the same text.

    Control characters in names become escapes before anything else is done with them; every text is HTML-escaped.

    Args:
        title: the project's name.
        run: gives the stages and their order.
        reports: by stage; a stage without one is shown with what its record holds.
        missing: stages that a failed run left without a result.
        logs: by stage, the rows of the metrics.csv that a training left.
    """
    title, run, reports, missing = cleaned((title, run, reports, missing))
    of_run = {record.stage: reports[record.stage] for record in run.records if record.stage in reports}
    rows = follow(of_run)
    layer_of = {row.value: row.layer for row in rows}
    body = [_header(title, run, of_run, missing), _stages(run, of_run, layer_of), _layers(of_run, rows)]
    for i, record in enumerate(run.records):
        log = (logs or {}).get(record.stage, [])
        body.append(_stage(i, record, of_run.get(record.stage), log, earlier=record.stage not in run.ran))
    body.append(f"<section>{_folded('What the columns mean', _columns(), len(glossary.TERMS))}</section>")
    files = resources.files("layerline.views")
    style = files.joinpath("page.css").read_text("utf-8")
    script = files.joinpath("page.js").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}: run {escape(run.id)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _columns() -> str:
    lead = _lead("a is the reference and b the candidate of a stage. The line above its tables names both.")
    return lead + _scrolling_table(glossary.view(), "What the columns mean")


def _lead(inner: str) -> str:
    """A paragraph that introduces what follows; `inner` is HTML."""
    return f'<p class="lead">{inner}</p>'


def _scrolling_table(view: View, caption: str) -> str:
    return scrolling(table(view, caption), caption)


def _policy(style: str, script: str) -> str:
    """Allows the page's own style and script alone, by hash, whatever a name in a report may hold."""
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed.append(f"{directive} 'sha256-{digest}'")
    return "; ".join(allowed)


def _header(title: str, run: Run, reports: Mapping[str, Report], missing: Sequence[str]) -> str:
    records: list[LayerDiff] = []
    gates: list[Gate] = []
    for report in reports.values():
        records += report.records
        gates += report.gates
    ran = [record for record in run.records if record.stage in run.ran]
    kept = len(run.records) - len(ran)
    failed_gates = sum(not gate.passed for gate in gates)
    facts = [
        count(len(run.records), "stage"),
        f"{sum(record.seconds for record in ran):.1f} s of work",
        count(len(records), "comparison"),
        f"{sum(not record.passed for record in records)} beyond tolerance",
    ]
    if kept:
        facts.append(f"{count(kept, 'stage')} from an earlier run")
    if failed_gates:
        facts.append(f"{count(failed_gates, 'gate')} failed")
    if missing:
        facts.append(f"without a result: {escape(', '.join(missing))}")
    run_id = _lead(f"Layerline run <code>{escape(run.id)}</code>")
    heading_line = f"<h1>{escape(title)} {_badge(run.passed)}</h1>"
    return f"<header>{run_id}{heading_line}{_lead(' · '.join(facts))}{_sets(run)}{_failures(run, reports)}</header>"


def _sets(run: Run) -> str:
    if not run.sets:
        return ""
    return _lead(f"run with <code>{escape(as_options(run.sets))}</code>")


def _failures(run: Run, reports: Mapping[str, Report]) -> str:
    """What went wrong, in the words of the command line."""
    items = []
    explained = set()
    for stage, report in reports.items():
        if not report.passed:
            failure = report.failure()
            items.append(_failure(stage, failure.what, failure.hint))
            explained.add(stage)
    for stage, error in run.errors.items():
        what = f"{error.where}: {error.error}" if error.where else error.error
        items.append(_failure(stage, what, error.hint))
    unexplained = [r.stage for r in run.records if not r.passed and r.stage not in explained]
    items += [f"<li><b>{escape(stage)}</b> did not pass</li>" for stage in unexplained]
    if not items and not run.passed:
        items.append("<li>A stage stopped before it left a record.</li>")
    if not items:
        return ""
    return f'<ul class="failures">{"".join(items)}</ul>'


def _failure(stage: str, what: str, hint: str | None) -> str:
    return f"<li><b>{escape(stage)}</b> {escape(what)}<br><span>{escape(hint or '')}</span></li>"


def _stages(run: Run, reports: Mapping[str, Report], layer_of: Mapping[str, str]) -> str:
    heads = "".join(f'<th scope="col" class="{c.kind}">{c.label}</th>' for c in SUMMARY)
    rows = ""
    for i, record in enumerate(run.records):
        rows += _stage_row(i, record, reports.get(record.stage), layer_of)
    summary = f'<table class="stages"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<section><h2>Stages</h2>{scrolling(summary, 'Stages')}</section>"


def _stage_row(i: int, record: Record, report: Report | None, layer_of: Mapping[str, str]) -> str:
    """A row of the summary.

    Args:
        layer_of: the layer under which a value stands on this page; the record has the name after fusion.
    """
    worst = record.worst or {}
    layer = layer_of.get(str(worst.get("value")), str(worst.get("layer", "")))
    link = f'<a href="#layer={quote(layer, safe="")}">{escape(layer)}</a>' if layer else ""
    sqnr = worst.get("sqnr_db")
    # Figures in DEPLOYED come first, so that the limit never cuts them.
    names = sorted(record.metrics, key=lambda name: name not in DEPLOYED)
    metrics = [_metric(name, record.metrics[name]) for name in names if record.metrics[name] is not None]
    compared = failed = ""
    if report and report.records:
        compared = str(len(report.records))
        failed = str(sum(not r.passed for r in report.records))
    cells = [
        _badge(record.passed),
        link,
        decibels(None if sqnr is None else float(sqnr)),
        " ".join(metrics[:MAIN_METRICS]),
        compared,
        failed,
        f"{record.seconds:.1f}",
        f"<code>{escape(record.digest[:12])}</code>",
    ]
    row = f'<th scope="row"><a href="#stage-{i}">{escape(record.stage)}</a></th>'
    for column, cell in zip(SUMMARY[1:], cells, strict=True):
        row += f'<td class="{column.kind}" data-label="{column.label}">{cell}</td>'
    return f"<tr>{row}</tr>"


def _metric(name: str, value: Scalar) -> str:
    return f'<span class="metric">{escape(heading(name))} <b>{escape(amount(name, value))}</b></span>'


def _layers(reports: Mapping[str, Report], rows: Sequence[Followed]) -> str:
    if not rows:
        return ""
    views = follow_views(rows, list(reports))
    lead = (
        "One row is one module, or one value under the name it keeps from PyTorch to the engine. Each stage says how "
        "far the row is from the stage's own reference. Empty cells were not measured; a stage without any measurement "
        "has no column."
    )
    if any(row.into for row in rows):
        lead += (
            " A layer that was merged into another one has its figures there from then on: "
            f"<i>{MERGED}</i> names it, and the opened row continues with it."
        )
    follow_grid = grid(views, "Every layer in every stage, worst first", follow=True)
    title = '<section id="follow"><h2>Follow a layer</h2>'
    return f"{_figure(chart(rows, list(reports)))}{title}{_lead(lead)}{follow_grid}</section>"


def _figure(drawn: str) -> str:
    if not drawn:
        return ""
    lead = _lead(f"In topological order. Every stage has its own scale; {FAILED} marks layers beyond their tolerance.")
    return f'<section id="chart"><h2>SQNR by layer</h2>{lead}{drawn}<output class="reading"></output></section>'


def _stage(i: int, record: Record, report: Report | None, log: Log, *, earlier: bool) -> str:
    """A stage in full; `earlier` says that its artifact comes from an earlier run."""
    origin = ", in an earlier run" if earlier else ""
    facts = {
        "artifact": f"{escape(record.kind)} <code>{escape(record.digest)}</code>",
        "key": f"<code>{escape(record.key)}</code>",
        "finished": f"{escape(record.created)}, after {record.seconds:.1f} s{origin}",
    }
    for name, text in made_with(record).items():
        facts[name] = escape(text)
    fact_list = "".join(f"<dt>{name}</dt><dd>{fact}</dd>" for name, fact in facts.items())
    title = f"<h2>{escape(record.stage)} {_badge(record.passed)}</h2>"
    if report:
        findings = _findings(report)
    else:
        findings = _lead("The report of this stage is missing.")
    fields = settings_view(record)
    settings = ""
    if fields.rows:
        settings = _folded("Settings", _scrolling_table(fields, "Settings"), len(fields.rows))
    parts = f'{title}{_training(log)}{findings}{settings}<dl class="facts">{fact_list}</dl>'
    return f'<section id="stage-{i}">{parts}</section>'


def _training(log: Log) -> str:
    drawn = curves(log)
    if not drawn:
        return ""
    if validated(log):
        lead = (
            "The deploy gap is the metric of the trained weights minus that of the weights that would ship: their "
            "average, masked and fake-quantised where that is configured. Above zero, the weights that ship are behind."
        )
    else:
        lead = "No metric was measured during training: <code>train.training.valid_interval</code> adds the deploy gap."
    return _lead(lead) + drawn


def _findings(report: Report) -> str:
    """A report in full: notes, gates, figures, the stage's own tables and every record."""
    parts = []
    sides = [escape(side) for side in (report.reference, report.candidate) if side]
    if sides:
        parts.append(_lead(" → ".join(sides)))
    if report.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts.append(f'<ul class="notes">{notes}</ul>')
    if report.gates:
        parts.append(_scrolling_table(_gates(report.gates), "Gates"))
    if report.metrics:
        figures = ""
        for name, value in report.metrics.items():
            figures += f"<div><dt>{escape(heading(name))}</dt><dd>{escape(amount(name, value))}</dd></div>"
        parts.append(f'<dl class="figures">{figures}</dl>')
    for title, rows in report.tables.items():
        if rows:
            parts.append(_folded(title, grid([free_view(rows)], title), len(rows)))
    if report.records:
        view = records_view(in_network_order(report.records))
        every_layer = grid([view], f"{report.stage}, worst first", stage=report.stage)
        parts.append(_folded("Every layer", every_layer, len(report.records), unfolded=not report.passed))
    return "".join(parts)


def _gates(gates: Sequence[Gate]) -> View:
    return filled(
        [
            (Column("gate"), [g.name for g in gates]),
            (Column("verdict", "verdict"), [outcome(g.passed) for g in gates]),
            (Column("seen"), [g.seen for g in gates]),
            (Column("expected"), [g.expected for g in gates]),
            (Column("what to do"), ["" if g.passed else g.hint for g in gates]),
        ]
    )


def _folded(title: str, inner: str, count: int, *, unfolded: bool = False) -> str:
    state = " open" if unfolded else ""
    return f"<details{state}><summary>{escape(title)} <span>{count}</span></summary>{inner}</details>"


def _badge(passed: bool) -> str:
    kind = "good" if passed else "bad"
    return f'<span class="badge {kind}">{outcome(passed)}</span>'
