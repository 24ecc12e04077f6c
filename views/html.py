"""`pipe report`: one run as one HTML file that needs nothing else, now or in ten years."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from urllib.parse import quote

from layerline.pipeline.config.project import as_options
from layerline.pipeline.records.ledger import Record, Run
from layerline.pipeline.report import Gate, Report, Scalar
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
    logs: Mapping[str, str] | None = None,
) -> str:
    """The run as a self-contained page; the same input gives the same text.

    Control characters in names become escapes here, before anything is built on them; `escape` keeps the rest text.

    Args:
        title: the project's name.
        run: gives the stages and their order.
        reports: by stage; a stage without one is shown with what its record holds.
        missing: stages that a failed run left without a result.
        logs: by stage, the text of the metrics.csv that a training left.
    """
    title, run, reports, missing = cleaned((title, run, reports, missing))
    known = {r.stage: reports[r.stage] for r in run.records if r.stage in reports}
    style, script = (
        resources.files("layerline.views").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    rows = follow(known)
    body = [
        _header(title, run, known, missing),
        _stages(run, known, {row.value: row.layer for row in rows}),
        _layers(known, rows),
        *(
            _stage(i, r, known.get(r.stage), (logs or {}).get(r.stage, ""), earlier=r.stage not in run.ran)
            for i, r in enumerate(run.records)
        ),
        f"<section>{_folded('What the columns mean', _columns(), len(glossary.TERMS))}</section>",
    ]
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
    told = '<p class="lead">a is the reference and b the candidate of a stage: what stands above its tables.</p>'
    return told + scrolling(table(glossary.view(), "What the columns mean"), "What the columns mean")


def _policy(style: str, script: str) -> str:
    """Only our own style and script run and nothing is fetched, whatever a name in a report may hold."""
    ours = {"style-src": style, "script-src": script}
    digests = {part: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for part, text in ours.items()}
    allowed = [f"{part} 'sha256-{digest}'" for part, digest in digests.items()]
    return "; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *allowed])


def _header(title: str, run: Run, reports: Mapping[str, Report], missing: Sequence[str]) -> str:
    records = [record for report in reports.values() for record in report.records]
    facts = [
        count(len(run.records), "stage"),
        f"{sum(r.seconds for r in run.records if r.stage in run.ran):.1f} s of work",
        count(len(records), "comparison"),
        f"{sum(not r.passed for r in records)} beyond tolerance",
    ]
    if kept := sum(r.stage not in run.ran for r in run.records):
        facts.append(f"{count(kept, 'stage')} from an earlier run")
    if failing := sum(not gate.passed for report in reports.values() for gate in report.gates):
        facts.append(f"{count(failing, 'gate')} failed")
    if missing:
        facts.append(f"without a result: {escape(', '.join(missing))}")
    return (
        f'<header><p class="lead">Layerline run <code>{escape(run.id)}</code></p>'
        f"<h1>{escape(title)} {_badge(run.passed)}</h1>"
        f'<p class="lead">{" · ".join(facts)}</p>{_sets(run)}{_failures(run, reports)}</header>'
    )


def _sets(run: Run) -> str:
    return f'<p class="lead">run with <code>{escape(as_options(run.sets))}</code></p>' if run.sets else ""


def _failures(run: Run, reports: Mapping[str, Report]) -> str:
    """What went wrong, in the words the command line uses."""
    errors = {stage: report.failure() for stage, report in reports.items() if not report.passed}
    items = [
        f"<li><b>{escape(stage)}</b> {escape(e.what)}<br><span>{escape(e.hint)}</span></li>"
        for stage, e in errors.items()
    ]
    for stage, error in run.errors.items():
        what = f"{error.where}: {error.error}" if error.where else error.error
        items.append(f"<li><b>{escape(stage)}</b> {escape(what)}<br><span>{escape(error.hint or '')}</span></li>")
    unexplained = [r.stage for r in run.records if not r.passed and r.stage not in errors]
    items += [f"<li><b>{escape(stage)}</b> did not pass</li>" for stage in unexplained]
    if not (run.passed or items):
        items = ["<li>A stage stopped before it left a record.</li>"]
    return f'<ul class="failures">{"".join(items)}</ul>' if items else ""


def _stages(run: Run, reports: Mapping[str, Report], layers: Mapping[str, str]) -> str:
    heads = "".join(f'<th scope="col" class="{c.kind}">{c.label}</th>' for c in SUMMARY)
    rows = "".join(_stage_row(i, record, reports.get(record.stage), layers) for i, record in enumerate(run.records))
    whole = f'<table class="stages"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<section><h2>Stages</h2>{scrolling(whole, 'Stages')}</section>"


def _stage_row(i: int, record: Record, report: Report | None, layers: Mapping[str, str]) -> str:
    """`layers` has the one name that a value's layer goes by on this page; fusing gives it others."""
    worst = record.worst or {}
    records = report.records if report else ()
    layer, sqnr = layers.get(str(worst.get("value")), str(worst.get("layer", ""))), worst.get("sqnr_db")
    told = {name: value for name, value in record.metrics.items() if value is not None}
    first = sorted(told, key=lambda name: name not in DEPLOYED)  # these are never cut
    metrics = [_metric(name, told[name]) for name in first]
    cells = [
        _badge(record.passed),
        f'<a href="#layer={quote(layer, safe="")}">{escape(layer)}</a>' if layer else "",
        decibels(None if sqnr is None else float(sqnr)),
        " ".join(metrics[:MAIN_METRICS]),
        str(len(records) or ""),
        str(sum(not r.passed for r in records)) if records else "",
        f"{record.seconds:.1f}",
        f"<code>{escape(record.digest[:12])}</code>",
    ]
    row = "".join(
        f'<td class="{c.kind}" data-label="{c.label}">{cell}</td>' for c, cell in zip(SUMMARY[1:], cells, strict=True)
    )
    return f'<tr><th scope="row"><a href="#stage-{i}">{escape(record.stage)}</a></th>{row}</tr>'


def _metric(name: str, value: Scalar) -> str:
    return f'<span class="metric">{escape(heading(name))} <b>{escape(amount(name, value))}</b></span>'


def _layers(reports: Mapping[str, Report], rows: Sequence[Followed]) -> str:
    if not rows:
        return ""
    views = follow_views(rows, list(reports))
    told = ""
    if any(row.into for row in rows):
        told = (
            " What was merged into another layer has its figures there from then on: "
            f"<i>{MERGED}</i> names it, and the opened row goes on with it."
        )
    return (
        f'{_figure(chart(rows, list(reports)))}<section id="follow"><h2>Follow a layer</h2>'
        '<p class="lead">One row is one module, or one value under the name it keeps from PyTorch to the engine. Each '
        "stage says how far the row is from what that stage started from. What was not measured is empty; a stage that "
        f"measured nothing of the kind has no column.{told}</p>"
        f"{grid(views, 'Every layer in every stage, worst first', follow=True)}</section>"
    )


def _figure(drawn: str) -> str:
    if not drawn:
        return ""
    return (
        '<section id="chart"><h2>SQNR by layer</h2><p class="lead">In topological order. Every stage has its own '
        f'scale; {FAILED} marks what is beyond its tolerance.</p>{drawn}<output class="reading"></output></section>'
    )


def _stage(i: int, record: Record, report: Report | None, log: str, *, earlier: bool) -> str:
    """A stage in full; `earlier` says that this run found it as an earlier one had left it."""
    whose = ", in an earlier run" if earlier else ""
    facts = {
        "artifact": f"{escape(record.kind)} <code>{escape(record.digest)}</code>",
        "key": f"<code>{escape(record.key)}</code>",
        "finished": f"{escape(record.created)}, after {record.seconds:.1f} s{whose}",
        **{name: escape(text) for name, text in made_with(record).items()},
    }
    listed = "".join(f"<dt>{name}</dt><dd>{fact}</dd>" for name, fact in facts.items())
    said = _said(report) if report else '<p class="lead">The report of this stage is missing.</p>'
    title = f"<h2>{escape(record.stage)} {_badge(record.passed)}</h2>"
    fields = settings_view(record)
    every = (
        _folded("Settings", scrolling(table(fields, "Settings"), "Settings"), len(fields.rows)) if fields.rows else ""
    )
    return f'<section id="stage-{i}">{title}{_training(log)}{said}{every}<dl class="facts">{listed}</dl></section>'


def _training(log: str) -> str:
    drawn = curves(log)
    if not drawn:
        return ""
    if validated(log):
        told = (
            "The deploy gap is the metric of the weights that are trained less that of what would ship: their average, "
            "masked and fake-quantised where that is asked for. Above zero, what ships is behind."
        )
    else:
        told = "No metric was taken on the way: <code>train.training.valid_interval</code> adds the deploy gap."
    return f'<p class="lead">{told}</p>{drawn}'


def _said(report: Report) -> str:
    """A report in full: notes, gates, figures, the stage's own tables and every record."""
    sides = " → ".join(escape(side) for side in (report.reference, report.candidate) if side)
    parts = [f'<p class="lead">{sides}</p>'] if sides else []
    if report.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in report.notes)}</ul>')
    if report.gates:
        parts.append(scrolling(table(_gates(report.gates), "Gates"), "Gates"))
    if report.metrics:
        figures = (f"<dt>{escape(heading(k))}</dt><dd>{escape(amount(k, v))}</dd>" for k, v in report.metrics.items())
        parts.append(f'<dl class="figures"><div>{"</div><div>".join(figures)}</div></dl>')
    parts += [
        _folded(title, grid([free_view(rows)], title), len(rows)) for title, rows in report.tables.items() if rows
    ]
    if report.records:
        every = grid(
            [records_view(in_network_order(report.records))], f"{report.stage}, worst first", stage=report.stage
        )
        parts.append(_folded("Every layer", every, len(report.records), unfolded=not report.passed))
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
    return f'<span class="badge {"good" if passed else "bad"}">{outcome(passed)}</span>'
