"""What commands print of a report on the terminal: its records, tables, gates, figures and notes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from layerline.pipeline.commands.lookup import Beside
from layerline.pipeline.diagnosis.why import TABLES, Trial
from layerline.pipeline.report import Order, Report, Scalar
from layerline.views.exit_codes import say
from layerline.views.formatting import amount, heading
from layerline.views.screen import cleaned, dim, hanging, words
from layerline.views.tables import Column, TableView, free_table, records_table
from layerline.views.terminal import table

ORDERS: Mapping[Order, str] = {
    "own": "the lowest own dB first",
    "error": "the lowest SQNR first",
    "sqnr": "the lowest SQNR first",
    "effect": "the lowest outputs dB first",
    "gain": "the greatest gain first",
    "clipped": "the greatest clipped share first",
    "network": "in the network's order",
}
ROWS = 20  # of a table, after `pipe tune`


def diff(out: Console, report: Report, top: int, order: Order, beside: Beside | None = None) -> None:
    """Prints the per-layer table in an order; with `beside`, another run's figures and what changed since then."""
    report, beside = cleaned(report), cleaned(beside)
    sides = ""
    if report.reference or report.candidate:
        # Reports of engines that were not run have no sides.
        sides = f"{report.reference} against {report.candidate}"
    if beside:
        sides += f"; then: run {beside.run.id}"
    title = f"{report.stage}  "
    if report.stage == f"{report.reference} {report.candidate}":
        title = ""  # two stages: the sides name both
    hanging(out, Text(title, "bold"), Text(sides))
    # Values are joined by name: a layer that is new in this run has no figure from then.
    earlier = None
    if beside:
        earlier = {record.name: record for record in beside.report.records}
        changed = "; ".join(beside.changed) or "nothing that is on record"
        hanging(out, Text("changed since then  ", "dim"), Text(changed))
    if report.records:
        _whole_table(out, records_table(report.records, order, earlier, top))
    if len(report.records) > top:
        dim(out, f"{top} of {len(report.records)} values, {ORDERS[order]}; --top N shows more")
    findings(out, report, beside.report if beside else None)


def report_tables(out: Console, report: Report, names: Sequence[str]) -> None:
    """Prints these tables of a report, those without rows left out, then its gates, figures and notes."""
    report = cleaned(report)
    tables = {name: report.tables.get(name, ()) for name in names}
    # A table of changes in which nothing changed, such as that of the slices, says nothing.
    for name, rows in tables.items():
        if any(row.get("change", True) for row in rows):
            _tables(out, {name: rows}, ROWS)
    findings(out, report)


def _whole_table(out: Console, view: TableView) -> None:
    """Prints a table, and names the columns that the terminal has no room for."""
    hidden = table(out, view)
    if hidden:
        dim(out, f"hidden: {', '.join(hidden)}; widen the terminal or use --json")


def _tables(out: Console, tables: Mapping[str, Sequence[Mapping[str, Scalar]]], top: int | None = None) -> None:
    for name, rows in tables.items():
        if rows:
            out.print(words(name, "bold"))
            _whole_table(out, free_table(rows[:top]))
        if top is not None and len(rows) > top:
            dim(out, f"{top} of {len(rows)} rows; --json and the page of `pipe report` have all")


def why(out: Console, report: Report, names: Sequence[str]) -> None:
    """Prints these tables of `pipe why`, the causes as a numbered list behind the others, and the verdict last."""
    report = cleaned(report)
    shown_tables = {name: report.tables.get(name, ()) for name in names}
    causes = shown_tables.pop("causes", ())
    _tables(out, shown_tables)
    if causes:
        out.print(words("causes, the likeliest first", "bold"))
    for number, cause in enumerate(causes, 1):
        # The value is named where it is not the layer itself.
        place = f"  {cause['stage']}  {cause['layer']}"
        if cause["value"] not in ("", cause["layer"]):
            place += f" ({cause['value']})"
        head = Text(f"{number:2}  ")
        hanging(out, head, Text.assemble(words(str(cause["cause"]), "yellow"), words(place.rstrip())))
        hanging(out, Text(" " * head.cell_len), words(str(cause["evidence"])))
        advice = str(cause["advice"])
        if cause["setting"]:
            advice += f": --set {shlex.quote(str(cause['setting']))}"
        hanging(out, Text(" " * head.cell_len), words(advice, "dim"))
    out.print(words("verdict", "bold"))
    for note in report.notes:
        hanging(out, Text("  "), words(note))


def why_and_trial(out: Console, report: Report, trial: Trial | None) -> None:
    """Prints `pipe why`, and what `--try` changed."""
    why(out, report, TABLES)
    if trial is None:
        return
    if trial.report is None:
        say(f"nothing to try: {trial.reason}")
    else:
        say(f"with --set {shlex.quote(trial.setting)}:")
        why(out, trial.report, TABLES[:1])


def findings(out: Console, report: Report, then: Report | None = None) -> None:
    """Prints a report's gates, figures and notes; with `then`, the figures of another run beside."""
    for gate in report.gates:
        mark = Text("✓ ", "green")
        if not gate.passed:
            mark = Text("✗ ", "red")
        hanging(out, mark, words(f"{gate.name}: {gate.seen}, expected {gate.expected}"))
    if then is not None:
        # Figures that only one of the runs has are shown beside an empty cell.
        names = {**report.metrics, **then.metrics}
        rows = [[heading(n), amount(n, report.metrics.get(n)), amount(n, then.metrics.get(n))] for n in names]
        table(out, TableView("", (Column("figure"), Column("now"), Column("then")), rows))
    elif report.metrics:
        figures = [f"{heading(name)} {amount(name, value)}" for name, value in report.metrics.items()]
        hanging(out, Text(), words("  ".join(figures), "dim"))
    for note in report.notes:
        hanging(out, Text("note ", "yellow"), words(note))
