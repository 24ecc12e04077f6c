"""The terminal: one line a stage, a progress bar while it works, tables for status, explain and diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from layerline.pipeline.errors import PipeError
from layerline.pipeline.fingerprint import Fingerprint
from layerline.pipeline.plan import Step, changes, shown
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.runner import Outcome, Result
from layerline.pipeline.stage import Stage
from layerline.views import grid

_MARKS = {"ran": "[green]✓[/]", "cached": "[dim]✓[/]", "failed": "[red]✗[/]", "blocked": "[yellow]–[/]"}


def console() -> Console:
    """Standard output, as wide as the terminal, or wide enough for a pipe not to wrap tables."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def error(problem: PipeError) -> None:
    """What went wrong, on standard error: where, what, and what to do."""
    out = Console(stderr=True, highlight=False, soft_wrap=True)
    place = f"[bold]{escape(problem.where)}[/]: " if problem.where else ""
    out.print(f"[red]error[/] {place}{escape(problem.what)}")
    if problem.hint:
        out.print(f"  [dim]{escape(problem.hint)}[/]")


class Silent:
    """A listener for `--json`: says nothing."""

    def say(self, text: str) -> None: ...

    def progress(self, done: int, total: int, **fields: float | str) -> None: ...

    def started(self, stage: Stage, reason: str) -> None: ...

    def finished(self, result: Result) -> None: ...


class Live:
    """A listener that draws: a bar for the stage at work, a line for each stage that is done."""

    def __init__(self, out: Console, width: int) -> None:
        self._out, self._width = out, width
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        self._out.print(f"  [dim]{escape(text)}[/]")

    def started(self, stage: Stage, reason: str) -> None:
        if not self._out.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeRemainingColumn(), TextColumn("{task.fields[figures]}"), console=self._out, transient=True
        )
        self._bar.start()
        self._task = self._bar.add_task(f"{stage.name:{self._width}} [dim]{escape(reason)}[/]", total=None, figures="")

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        if self._bar is not None and self._task is not None:
            figures = "  ".join(f"{k} {grid.figure(v)}" for k, v in fields.items())
            self._bar.update(self._task, completed=done, total=total, figures=escape(figures))

    def finished(self, result: Result) -> None:
        self.close()
        self._out.print(_stage_line(result, self._width))

    def close(self) -> None:
        """Takes the bar away, also after an interrupt."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def outcome(out: Console, done: Outcome, folder: str) -> None:
    """What a run leaves to say: stages now out of date, and the next useful command."""
    for step in done.out_of_date:
        out.print(f"[yellow]out of date[/] {step.stage.name} [dim]({escape(step.reason)})[/]")
    failed = next((r for r in done.results if r.state == "failed"), None)
    if failed is not None:
        hint = f"pipe diff {failed.name}" if failed.record else f"pipe run {failed.name}"
    elif done.out_of_date:
        hint = "pipe run all"
    else:
        hint = "pipe report" if done.results[-1].state == "ran" else f"pipe diff {done.results[-1].name}"
    out.print(f"[dim]next:[/] {hint}{folder}")


def status(out: Console, steps: Sequence[Step]) -> None:
    """What is fresh, what would run, and why."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("stage", "state", "why", "digest", "made", "verdict"):
        table.add_column(heading, overflow="fold")
    for step in steps:
        fresh, record = step.artifact is not None, step.record
        verdict = "" if not fresh or record is None else ("[green]passed[/]" if record.passed else "[red]failed[/]")
        table.add_row(
            step.stage.name,
            "[green]fresh[/]" if fresh else "[yellow]would run[/]",
            "" if fresh else escape(step.reason),
            step.artifact.digest[:12] if step.artifact else "",
            record.created if fresh and record else "",
            verdict,
        )
    out.print(table)


def explain(out: Console, step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> None:
    """Each part of a stage's key: same or changed, old and new value, and what its hooks reach."""
    new = shown(step.parts)
    changed = changes(old or {}, new)
    key = step.key[:12] if step.key else "not known yet"
    out.print(f"[bold]{step.stage.name}[/]  {escape(step.reason)}  [dim]key {key}[/]")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("part", "", "last run", "now"):
        table.add_column(heading, overflow="fold")
    for name in [*new, *(n for n in changed if n not in new)]:
        before, now = (old or {}).get(name), new.get(name)
        state = "new" if old is None else ("[yellow]changed[/]" if name in changed else "[dim]same[/]")
        table.add_row(escape(name), state, escape(_short(before) if name in changed else ""), escape(_short(now)))
    out.print(table)
    for hook, seen in prints.items():
        reached = ", ".join(r for r in seen.reached if ":import " not in r) or "not defined in the task"
        out.print(
            f"[dim]{hook}() reaches[/] {escape(reached if not seen.whole else ', '.join([*seen.whole, *seen.reached]))}"
        )
    for note in step.notes:
        out.print(f"[yellow]note[/] {escape(note)}")


def diff(out: Console, report: Report, top: int, other: Report | None, label: str) -> None:
    """The per-layer table, worst first; with another run's report, its SQNR beside."""
    out.print(f"[bold]{report.stage}[/]  {escape(report.reference)} against {escape(report.candidate)}")
    extras = _extra_columns(report.records)
    then = {r.name: r for r in other.records} if other else {}
    table = Table(box=None, pad_edge=False, header_style="dim")
    headings = [
        "layer",
        "value",
        "op",
        "shape",
        "SQNR dB",
        *([f"SQNR dB {label}"] if other else []),
        "rel L2",
        "max abs",
        "cosine",
    ]
    for heading in [*headings, *extras, ""]:
        table.add_column(heading, justify="left" if heading in ("layer", "value", "op", "shape", "") else "right")
    for record in report.worst(top):
        past = [grid.decibels(then[record.name].sqnr_db) if record.name in then else ""] if other else []
        row = [
            record.module,
            record.name,
            record.op,
            "x".join(map(str, record.shape)),
            grid.decibels(record.sqnr_db),
            *past,
        ]
        row += [grid.error(record.rel_l2), grid.error(record.max_abs), grid.similarity(record.cosine)]
        row += [_cell(name, record.extra.get(name)) for name in extras]
        table.add_row(*map(escape, row), _verdict(record))
    out.print(table)
    if len(report.records) > top:
        out.print(f"[dim]{top} of {len(report.records)} values; --top N shows more[/]")
    findings(out, report)


def findings(out: Console, report: Report) -> None:
    """A report's gates, figures and notes."""
    for gate in report.gates:
        mark = "[green]✓[/]" if gate.passed else "[red]✗[/]"
        out.print(f"{mark} {escape(gate.name)}: {escape(gate.seen)}, expected {escape(gate.expected)}")
    if report.metrics:
        out.print("  ".join(f"[dim]{escape(k)}[/] {escape(grid.figure(v))}" for k, v in report.metrics.items()))
    for note in report.notes:
        out.print(f"[yellow]note[/] {escape(note)}")


def _stage_line(result: Result, width: int) -> str:
    parts = [f"{_MARKS[result.state]} {result.name:{width}}  {result.state:7}"]
    worked = result.state == "ran" or (result.state == "failed" and result.seconds)
    parts.append(f"{result.seconds:7.1f} s" if worked else " " * 9)
    record = result.record
    parts.append(record.digest[:12] if record else " " * 12)
    if record and record.worst and record.worst.get("sqnr_db") is not None:
        parts.append(f"worst {escape(str(record.worst['layer']))} {grid.decibels(float(record.worst['sqnr_db']))} dB")
    if record:
        parts += [f"{escape(k)} {escape(grid.figure(v))}" for k, v in list(record.metrics.items())[:3]]
    if result.state != "cached" and result.reason:
        parts.append(f"[dim]({escape(result.reason)})[/]")
    return "  ".join(parts)


def _extra_columns(records: Sequence[LayerDiff]) -> list[str]:
    return list(dict.fromkeys(name for r in records for name in r.extra))


def _verdict(record: LayerDiff) -> str:
    if record.one_sided:
        return f"[red]{record.one_sided} NaN/Inf on one side[/]"
    if not record.passed:
        return "[red]beyond tolerance[/]"
    return "[green]ok[/]" if record.tolerance is not None else ""


def _cell(name: str, value: Any) -> str:
    if name.endswith("_db") and value is not None:
        return grid.decibels(float(value))
    return _short(value) if isinstance(value, str) else grid.figure(value)


def _short(value: Any, limit: int = 60) -> str:
    text = "" if value is None else str(value)
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
