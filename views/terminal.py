"""Terminal output: one line a stage, a progress bar while it works, tables for status, explain and diff."""

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
from rich.table import Column as BarLayout
from rich.table import Table
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
    """A listener for `--json`: prints nothing."""

    def say(self, text: str) -> None: ...

    def progress(self, done: int, total: int, **fields: float | str) -> None: ...

    def started(self, stage: Stage, reason: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def close(self) -> None: ...


class Live:
    """A listener that draws a bar for the stage at work, and a line for each stage that is done."""

    def __init__(self, out: Console, width: int) -> None:
        self._out = out
        self._width = width
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        _hanging(self._out, Text("  "), words(text, "dim"))

    def started(self, stage: Stage, reason: str) -> None:
        if not self._out.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
        # The last column takes the width that the others leave, so that no text pushes the bar out.
        rest = BarLayout(ratio=1, no_wrap=True, overflow="ellipsis")
        detail = TextColumn("{task.fields[detail]}", style="dim", markup=False, table_column=rest)
        self._bar = Progress(*columns, TimeRemainingColumn(), detail, console=self._out, transient=True, expand=True)
        self._bar.start()
        self._task = self._bar.add_task(f"{stage.name:{self._width}}", total=None, detail=printable(reason))

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, completed=done, total=total)
        if fields:
            figures = "  ".join(f"{grid.heading(name)} {grid.figure(value)}" for name, value in fields.items())
            self._bar.update(self._task, detail=printable(figures))

    def finished(self, result: Result) -> None:
        self.close()
        self._out.print(stage_line(result, self._width, self._out.width), soft_wrap=True)

    def close(self) -> None:
        """Removes the bar, also after an interrupt."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def listener(stages: Sequence[Stage], *, silent: bool) -> Live | Silent:
    """The listener that draws the work on these stages, or prints nothing."""
    if silent:
        return Silent()
    return Live(console(), width=max(len(stage.name) for stage in stages))


def outcome(out: Console, done: Outcome, where: str, sets: Sequence[str] = ()) -> None:
    """Prints the stages that are now out of date and, where there is one, the next useful command.

    Args:
        out: where to print.
        done: the run.
        where: ` -C DIR`, or empty in the project's own folder.
        sets: the `--set` overrides of the run; the next command repeats them, for without them it means other settings.
    """
    for step in done.out_of_date:
        reason = words(f"({step.reason})", "dim")
        out.print(Text.assemble(("out of date", "yellow"), f" {step.stage.name} ", reason), soft_wrap=True)
    hint = _next_command(done, sets)
    if hint:
        out.print(Text.assemble(("next:", "dim"), " ", words(hint + where)), soft_wrap=True)


def _next_command(done: Outcome, sets: Sequence[str]) -> str:
    for result in done.results:
        if result.state == "failed":
            return f"pipe diff {result.name}" if result.record else ""
    if done.out_of_date:
        return f"pipe run all {as_options(sets)}".rstrip()
    return "pipe report"


def status(out: Console, steps: Sequence[Step], states: Mapping[str, str]) -> None:
    """Prints which stages are fresh and which would run, and why. Empty columns are left out.

    Args:
        out: where to print.
        steps: the stages, planned.
        states: the state of each stage, by its name.
    """
    rows = [_status_row(step, states[step.stage.name]) for step in steps]
    widths = dict.fromkeys(rows[0], 0)
    for row in rows:
        for heading, cell in row.items():
            widths[heading] = max(widths[heading], cell.cell_len)
    headings = [heading for heading, width in widths.items() if width]
    total = sum(max(widths[heading], cell_len(heading)) + 2 for heading in headings)
    if total > out.width + 2:  # the last column needs no gap behind it
        headings.remove("made")  # the reason tells more
    table = _table({heading: heading != "why" for heading in headings})
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    out.print(table)


def _status_row(step: Step, state: str) -> dict[str, Text]:
    artifact = step.artifact
    row = {
        "stage": Text(step.stage.name),
        "state": Text(state, "green" if artifact else "yellow"),
        "why": Text(),
        "digest": Text(),
        "made": Text(),
        "verdict": Text(),
    }
    if artifact is None:
        row["why"] = words(step.reason)
        return row
    row["digest"] = Text(artifact.digest[:12])
    if step.record:
        row["made"] = words(step.record.created)
        row["verdict"] = _verdict(step.record.passed)
    return row


def _verdict(passed: bool) -> Text:
    return Text("passed", "green") if passed else Text("failed", "red")


def _table(headings: Mapping[str, bool]) -> Table:
    """A table of these columns; the value tells whether a column keeps its width. Only the others wrap."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, fixed in headings.items():
        table.add_column(heading, no_wrap=fixed, overflow="fold")
    return table


def explain(out: Console, step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> None:
    """Prints each part of a stage's key, same or changed, with old and new value, and what its hooks reach."""
    key = step.key[:12] if step.key else "not known yet"
    summary = Text.assemble(words(f"{step.reason}  "), (f"key {key}", "dim"))
    _hanging(out, Text(f"{step.stage.name}  ", "bold"), summary)
    out.print(_parts(step, old))
    for hook, fingerprint in prints.items():
        names = [*fingerprint.whole, *fingerprint.reached]
        # Where a file counts whole, its imports are what explains it; else they are noise.
        if not fingerprint.whole:
            names = [name for name in names if ":import " not in name]
        _hanging(out, Text(f"{hook}() ", "dim"), _reached(", ".join(names)))
    for note in step.notes:
        _hanging(out, Text("note ", "yellow"), words(note))


def _parts(step: Step, old: Mapping[str, str] | None) -> Table:
    new, before = shown(step.parts), old or {}
    changed, waiting = changes(before, new), awaited(before, new, step.key)
    removed = [name for name in changed if name not in new]
    table = _table({"part": False, "": True, "last run": False, "now": False})
    for name in [*new, *removed]:
        is_changed = name in changed
        if old is None:
            state = "new"
        elif name in waiting:
            state = "may change"
        elif is_changed:
            state = "changed"
        else:
            state = "same"
        now = "not known yet" if name in waiting else new.get(name)
        # An unchanged value is shown once, under `now`.
        then = before.get(name) if is_changed else None
        style = "yellow" if is_changed and before else "dim"
        values = (_value(then, whole=is_changed), _value(now, whole=is_changed))
        table.add_row(words(label(name)), Text(state, style), *values)
    return table


def _value(value: str | None, *, whole: bool) -> Text:
    """A part's value: cut to one line, or `whole` where it changed, because long values may differ at their ends."""
    if whole:
        return words(layers.hashed(value))
    return Text(printable(layers.short(value)), no_wrap=True, overflow="ellipsis")


def _reached(names: str) -> Text:
    if not names:
        return Text("is not defined in the task", "dim")
    return Text.assemble(("reaches ", "dim"), words(names))


def diff(out: Console, report: Report, top: int, order: Order, beside: Beside | None = None) -> None:
    """Prints the per-layer table in an order; with `beside`, another run's figures and what changed since then."""
    report, beside = cleaned(report), cleaned(beside)
    sides = ""
    if report.reference or report.candidate:
        sides = f"{report.reference} against {report.candidate}"
    if beside:
        sides += f"; then: run {beside.run.id}"
    _hanging(out, Text(f"{report.stage}  ", "bold"), Text(sides))
    earlier = None
    if beside:
        earlier = {record.name: record for record in beside.report.records}
        changed = "; ".join(beside.changed) or "nothing that is on record"
        _hanging(out, Text("changed since then  ", "dim"), Text(changed))
    records = report.sorted(order)[:top]
    columns = layers.columns(records, earlier)
    visible = layers.fitting(columns, out.width)
    if records:
        for line in layers.lines(visible):
            out.print(line, soft_wrap=True)
    hidden = len(columns) - len(visible)
    if hidden:
        _dim(out, f"{grid.count(hidden, 'column')} hidden; widen the terminal or use --json")
    if len(report.records) > top:
        _dim(out, f"{top} of {len(report.records)} values, {ORDERS[order]}; --top N shows more")
    findings(out, report, beside.report if beside else None)


def _dim(out: Console, text: str) -> None:
    out.print(words(text, "dim"), soft_wrap=True)


def runs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a list of runs, newest first: what each ran and kept, what changed since the run before, and its figures.

    Settings that differ from their defaults are shown of the oldest run alone: for the others `changed` tells what
    became of them.
    """
    for row in rows:
        out.print(Text.assemble(words(row["id"], "bold"), "  ", words(row["time"]), "  ", _verdict(row["passed"])))
        kept = [stage for stage in row["stages"] if stage not in row["ran"]]
        facts = {
            "ran": [" ".join(row["ran"])],
            "kept": [" ".join(kept)],
            "error": [_error(stage, error) for stage, error in row["errors"].items()],
            "--set": row["sets"],
            "changed": row["changed"],
            "settings": _settings(row) if row is rows[-1] else [],
            "figures": _figures_of_run(row),
        }
        for name, items in facts.items():
            if any(items):
                _hanging(out, Text(f"  {name:8}  ", "dim"), words("; ".join(items)))


def _error(stage: str, error: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (stage, error["where"], error["error"]) if part)


def _settings(row: Mapping[str, Any]) -> list[str]:
    lines = []
    for stage, fields in row["settings"].items():
        lines += [f"{stage}.{name}={value}" for name, value in fields.items()]
    return lines


def _figures_of_run(row: Mapping[str, Any]) -> list[str]:
    texts = []
    for stage, metrics in row["metrics"].items():
        figures = lines.figures(metrics)[:FIGURES]
        if figures and stage in row["ran"]:
            texts.append(f"{stage}: {', '.join(figures)}")
    return texts


def findings(out: Console, report: Report, then: Report | None = None) -> None:
    """Prints a report's gates, figures and notes; with `then`, the figures of another run beside."""
    for gate in report.gates:
        mark = Text("✓ ", "green") if gate.passed else Text("✗ ", "red")
        _hanging(out, mark, words(f"{gate.name}: {gate.seen}, expected {gate.expected}"))
    if then is not None:
        out.print(_figures_beside(report.metrics, then.metrics))
    else:
        figures = [f"{grid.heading(name)} {grid.amount(name, value)}" for name, value in report.metrics.items()]
        for line in _filled(figures, out.width):
            _dim(out, line)
    for note in report.notes:
        _hanging(out, Text("note ", "yellow"), words(note))


def _figures_beside(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> Table:
    table = _table({"figure": False, "now": False, "then": False})
    for name in {**now, **then}:
        cells = (grid.heading(name), grid.amount(name, now.get(name)), grid.amount(name, then.get(name)))
        table.add_row(*map(words, cells))
    return table


def _filled(items: Sequence[str], width: int) -> list[str]:
    """Packs items into lines that fit the width; no item is broken in two."""
    full: list[str] = []
    for item in items:
        if full and cell_len(f"{full[-1]}  {item}") <= width:
            full[-1] = f"{full[-1]}  {item}"
        else:
            full.append(item)
    return full


def _hanging(out: Console, head: Text, body: Text) -> None:
    """Prints a paragraph whose further lines are indented to where its first words begin."""
    indent = head.cell_len
    first: Text | str = head
    for line in body.wrap(out, max(out.width - indent, 20)):
        line.rstrip()
        out.print(Text.assemble(first, line), soft_wrap=True)
        first = " " * indent
