"""The terminal: one line a stage, a progress bar while it works, tables for status, explain and diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from layerline.pipeline.config.project import as_options
from layerline.pipeline.inputs.untrusted import printable
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.plan import Step, shown
from layerline.pipeline.reasons import awaited, changes, label
from layerline.pipeline.records.lookup import Beside
from layerline.pipeline.report import Order, Report, Scalar
from layerline.pipeline.runner import Outcome, Result
from layerline.pipeline.stage import Stage
from layerline.views import grid, layers, lines
from layerline.views.lines import stage_line
from layerline.views.screen import cleaned, console, words

ORDERS: Mapping[Order, str] = {
    "own": "the lowest own dB first",
    "error": "the lowest SQNR first",
    "network": "in the network's order",
}

FIGURES = 2  # of a stage, in the list of runs


class Silent:
    """A listener for `--json`: says nothing."""

    def say(self, text: str) -> None: ...

    def progress(self, done: int, total: int, **fields: float | str) -> None: ...

    def started(self, stage: Stage, reason: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def close(self) -> None: ...


class Live:
    """A listener that draws: a bar for the stage at work, a line for each stage that is done."""

    def __init__(self, out: Console, width: int) -> None:
        self._out, self._width = out, width
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        _hanging(self._out, Text("  "), words(text, "dim"))

    def started(self, stage: Stage, reason: str) -> None:
        if not self._out.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
        # The last column takes what the others leave: no text pushes the bar out.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        told = TextColumn("{task.fields[told]}", style="dim", markup=False, table_column=rest)
        self._bar = Progress(*columns, TimeRemainingColumn(), told, console=self._out, transient=True, expand=True)
        self._bar.start()
        self._task = self._bar.add_task(f"{stage.name:{self._width}}", total=None, told=printable(reason))

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
            if fields:
                figures = "  ".join(f"{grid.heading(k)} {grid.figure(v)}" for k, v in fields.items())
                self._bar.update(self._task, told=printable(figures))

    def finished(self, result: Result) -> None:
        self.close()
        self._out.print(stage_line(result, self._width, self._out.width), soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away, also after an interrupt."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def listener(stages: Sequence[Stage], *, silent: bool) -> Live | Silent:
    """What draws the work on these stages, or says nothing of it."""
    return Silent() if silent else Live(console(), width=max(len(s.name) for s in stages))


def outcome(out: Console, done: Outcome, where: str, sets: Sequence[str] = ()) -> None:
    """What a run leaves to say: stages now out of date, and the next useful command, if there is one.

    Args:
        out: where to.
        done: the run.
        where: ` -C DIR`, or nothing in the project's own folder.
        sets: the overrides that the run was given; another run means the same only with them.
    """
    for step in done.out_of_date:
        line = (("out of date", "yellow"), f" {step.stage.name} ", words(f"({step.reason})", "dim"))
        out.print(Text.assemble(*line), soft_wrap=True)
    failed = next((r for r in done.results if r.state == "failed"), None)
    if failed is not None:
        hint = f"pipe diff {failed.name}" if failed.record else ""
    elif done.out_of_date:
        hint = f"pipe run all {as_options(sets)}".rstrip()
    else:
        hint = "pipe report"
    if hint:
        out.print(Text.assemble(("next:", "dim"), " ", words(hint + where)), soft_wrap=True)


def status(out: Console, steps: Sequence[Step], states: Mapping[str, str]) -> None:
    """What is fresh, what would or may run, and why; `states` by stage. A column that says nothing is left out."""
    rows = [_status(step, states[step.stage.name]) for step in steps]
    widths = {heading: max(row[heading].cell_len for row in rows) for heading in rows[0]}
    told = [heading for heading, width in widths.items() if width]
    if sum(max(widths[heading], cell_len(heading)) + 2 for heading in told) > out.width + 2:
        told.remove("made")  # a reason is worth more
    table = _table({heading: heading != "why" for heading in told})
    for row in rows:
        table.add_row(*(row[heading] for heading in told))
    out.print(table)


def _status(step: Step, state: str) -> dict[str, Text]:
    artifact, record = step.artifact, step.record if step.artifact else None
    return {
        "stage": Text(step.stage.name),
        "state": Text(state, "green" if artifact else "yellow"),
        "why": words("" if artifact else step.reason),
        "digest": Text(artifact.digest[:12] if artifact else ""),
        "made": words(record.created if record else ""),
        "verdict": _verdict(record.passed) if record else Text(),
    }


def _verdict(passed: bool) -> Text:
    return Text("passed", "green") if passed else Text("failed", "red")


def _table(headings: Mapping[str, bool]) -> Table:
    """Columns by heading, and whether they keep their width: only the others are wrapped where there is no room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, kept in headings.items():
        table.add_column(heading, no_wrap=kept, overflow="fold")
    return table


def explain(out: Console, step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> None:
    """Each part of a stage's key: same or changed, old and new value, and what its hooks reach."""
    key = step.key[:12] if step.key else "not known yet"
    head = Text.assemble(words(f"{step.reason}  "), (f"key {key}", "dim"))
    _hanging(out, Text(f"{step.stage.name}  ", "bold"), head)
    out.print(_parts(step, old))
    for hook, seen in prints.items():
        names = [*seen.whole, *seen.reached] if seen.whole else [r for r in seen.reached if ":import " not in r]
        _hanging(out, Text(f"{hook}() ", "dim"), _reached(", ".join(names)))
    for note in step.notes:
        _hanging(out, Text("note ", "yellow"), words(note))


def _parts(step: Step, old: Mapping[str, str] | None) -> Table:
    new, before = shown(step.parts), old or {}
    changed, waiting = changes(before, new), awaited(before, new, step.key)
    table = _table({"part": False, "": True, "last run": False, "now": False})
    for name in [*new, *(n for n in changed if n not in new)]:
        whole = name in changed
        state = "new" if old is None else "may change" if name in waiting else "changed" if whole else "same"
        now = "not known yet" if name in waiting else new.get(name)
        then = _value(before.get(name) if whole else None, whole=whole)
        style = "yellow" if whole and before else "dim"
        table.add_row(words(label(name)), Text(state, style), then, _value(now, whole=whole))
    return table


def _value(value: str | None, *, whole: bool) -> Text:
    """A part's value: on one line, but all of what changed, for two long values may differ at their ends."""
    if whole:
        return words(layers.hashed(value))
    return Text(printable(layers.short(value)), no_wrap=True, overflow="ellipsis")


def _reached(names: str) -> Text:
    return Text.assemble(("reaches ", "dim"), words(names)) if names else Text("is not defined in the task", "dim")


def diff(out: Console, report: Report, top: int, order: Order, beside: Beside | None = None) -> None:
    """The per-layer table in an order; beside another run's report, its figures too, and what was changed since."""
    report, beside = cleaned(report), cleaned(beside)
    sides = f"{report.reference} against {report.candidate}" if report.reference or report.candidate else ""
    past = f"; then: run {beside.run.id}" if beside else ""
    _hanging(out, Text(f"{report.stage}  ", "bold"), Text(sides + past))
    if beside:
        _hanging(
            out, Text("changed since then  ", "dim"), Text("; ".join(beside.changed) or "nothing that is on record")
        )
    records = report.sorted(order)[:top]
    found = layers.columns(records, {r.name: r for r in beside.report.records} if beside else None)
    shown = layers.fitting(found, out.width)
    for line in layers.lines(shown) if records else ():
        out.print(line, soft_wrap=True)
    if hidden := len(found) - len(shown):
        told = f"{grid.count(hidden, 'column')} hidden; widen the terminal or use --json"
        out.print(Text(told, "dim"), soft_wrap=True)
    if len(report.records) > top:
        told = f"{top} of {len(report.records)} values, {ORDERS[order]}; --top N shows more"
        out.print(Text(told, "dim"), soft_wrap=True)
    findings(out, report, beside.report if beside else None)


def runs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A list of runs, newest first: what each ran and kept, what changed since the run before, and its figures.

    Settings are those that differ from their defaults, of the oldest run: behind it `changed` says what became of them.
    """
    for row in rows:
        kept = [stage for stage in row["stages"] if stage not in row["ran"]]
        out.print(Text.assemble(words(row["id"], "bold"), "  ", words(row["time"]), "  ", _verdict(row["passed"])))
        settings = [f"{stage}.{name}={v}" for stage, fields in row["settings"].items() for name, v in fields.items()]
        figures = {stage: lines.figures(m)[:FIGURES] for stage, m in row["metrics"].items() if stage in row["ran"]}
        facts = {
            "ran": [" ".join(row["ran"])],
            "kept": [" ".join(kept)],
            "error": [": ".join(filter(None, (stage, e["where"], e["error"]))) for stage, e in row["errors"].items()],
            "--set": row["sets"],
            "changed": row["changed"],
            "settings": settings if row is rows[-1] else [],
            "figures": [f"{stage}: {', '.join(found)}" for stage, found in figures.items() if found],
        }
        for name, items in facts.items():
            if any(items):
                _hanging(out, Text(f"  {name:8}  ", "dim"), words("; ".join(items)))


def findings(out: Console, report: Report, then: Report | None = None) -> None:
    """A report's gates, figures and notes; the figures beside those of another run."""
    for gate in report.gates:
        mark = Text("✓ ", "green") if gate.passed else Text("✗ ", "red")
        _hanging(out, mark, words(f"{gate.name}: {gate.seen}, expected {gate.expected}"))
    if then is not None:
        out.print(_figures(report.metrics, then.metrics))
    else:
        for line in _filled([f"{grid.heading(k)} {grid.amount(k, v)}" for k, v in report.metrics.items()], out.width):
            out.print(words(line, "dim"), soft_wrap=True)
    for note in report.notes:
        _hanging(out, Text("note ", "yellow"), words(note))


def _figures(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> Table:
    table = _table({"figure": False, "now": False, "then": False})
    for name in {**now, **then}:
        cells = (grid.heading(name), grid.amount(name, now.get(name)), grid.amount(name, then.get(name)))
        table.add_row(*map(words, cells))
    return table


def _filled(items: Sequence[str], width: int) -> list[str]:
    """Lines of as many items as fit; none is broken in two."""
    full: list[str] = []
    for item in items:
        longer = f"{full[-1]}  {item}" if full else item
        full[-1:] = [longer] if cell_len(longer) <= width else [*full[-1:], item]
    return full


def _hanging(out: Console, head: Text, body: Text) -> None:
    """A paragraph whose further lines start where its first words do."""
    indent = head.cell_len
    for i, line in enumerate(body.wrap(out, max(out.width - indent, 20))):
        line.rstrip()
        out.print(Text.assemble(head if i == 0 else " " * indent, line), soft_wrap=True)
