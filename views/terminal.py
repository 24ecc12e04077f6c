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

from layerline.pipeline.fingerprint import Fingerprint
from layerline.pipeline.plan import Step, shown
from layerline.pipeline.project import as_options
from layerline.pipeline.reasons import awaited, changes
from layerline.pipeline.report import Report
from layerline.pipeline.runner import Outcome, Result
from layerline.pipeline.stage import Stage
from layerline.pipeline.untrusted import printable
from layerline.views import grid, layers
from layerline.views.lines import stage_line
from layerline.views.screen import cleaned, console, words


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
        table.add_row(words(name), Text(state, "yellow" if whole and before else "dim"), then, _value(now, whole=whole))
    return table


def _value(value: str | None, *, whole: bool) -> Text:
    """A part's value: on one line, but all of what changed, for two long values may differ at their ends."""
    if whole:
        return words(layers.hashed(value))
    return Text(printable(layers.short(value)), no_wrap=True, overflow="ellipsis")


def _reached(names: str) -> Text:
    return Text.assemble(("reaches ", "dim"), words(names)) if names else Text("is not defined in the task", "dim")


def diff(out: Console, report: Report, top: int, other: Report | None, label: str) -> None:
    """The per-layer table, worst first; with another run's report, its SQNR beside."""
    report, other = cleaned(report), cleaned(other)
    sides = f"{report.reference} against {report.candidate}" if report.reference or report.candidate else ""
    past = f"; then: run {label}" if other else ""
    _hanging(out, Text(f"{report.stage}  ", "bold"), Text(sides + past))
    records = report.worst(top)
    then = {r.name: r for r in other.records} if other else None
    found = layers.columns(records, then)
    shown = layers.fitting(found, out.width)
    for line in layers.lines(shown) if records else ():
        out.print(line, soft_wrap=True)
    if hidden := len(found) - len(shown):
        told = f"{grid.count(hidden, 'column')} hidden; widen the terminal or use --json"
        out.print(Text(told, "dim"), soft_wrap=True)
    if len(report.records) > top:
        out.print(Text(f"{top} of {len(report.records)} values; --top N shows more", "dim"))
    findings(out, report)


def runs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A list of runs, newest first: which stages each ran, and which it kept as an earlier run had left them."""
    table = _table({"run": True, "began": True, "verdict": True, "ran": False, "kept": False})
    for row in rows:
        kept = [stage for stage in row["stages"] if stage not in row["ran"]]
        table.add_row(row["id"], row["time"], _verdict(row["passed"]), *(Text(" ".join(s)) for s in (row["ran"], kept)))
    out.print(table)


def findings(out: Console, report: Report) -> None:
    """A report's gates, figures and notes."""
    for gate in report.gates:
        mark = Text("✓ ", "green") if gate.passed else Text("✗ ", "red")
        _hanging(out, mark, words(f"{gate.name}: {gate.seen}, expected {gate.expected}"))
    for line in _filled([f"{grid.heading(k)} {grid.amount(k, v)}" for k, v in report.metrics.items()], out.width):
        out.print(words(line, "dim"), soft_wrap=True)
    for note in report.notes:
        _hanging(out, Text("note ", "yellow"), words(note))


def _filled(items: Sequence[str], width: int) -> list[str]:
    """Lines of as many items as fit; none is broken in two."""
    lines: list[str] = []
    for item in items:
        longer = f"{lines[-1]}  {item}" if lines else item
        lines[-1:] = [longer] if cell_len(longer) <= width else [*lines[-1:], item]
    return lines


def _hanging(out: Console, head: Text, body: Text) -> None:
    """A paragraph whose further lines start where its first words do."""
    indent = head.cell_len
    for i, line in enumerate(body.wrap(out, max(out.width - indent, 20))):
        line.rstrip()
        out.print(Text.assemble(head if i == 0 else " " * indent, line), soft_wrap=True)
