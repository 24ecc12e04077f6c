"""Terminal output: a line for each stage, a progress bar while it works, and tables that rich lays out.

`report_output.py` prints reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

from layerline.pipeline.commands.housekeeping import Garbage, Problem, counted
from layerline.pipeline.config.project import as_options
from layerline.pipeline.errors import StageError, located
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.reasons import as_written, awaited, changes, label
from layerline.pipeline.run.check import Checked
from layerline.pipeline.run.outcome import Outcome, Result
from layerline.pipeline.run.plan import Step, shown
from layerline.pipeline.stage import Stage
from layerline.pipeline.untrusted import printable
from layerline.pipeline.wording import quantity
from layerline.views import formatting, lines
from layerline.views.formatting import heading, outcome
from layerline.views.screen import console, hanging, words
from layerline.views.tables import PAGE_ONLY, Column, TableView, filled

FIGURES = 2  # of a stage, in the list of runs
SETTINGS = 6  # of a run there
_GAP = 2  # columns between two cells
_STYLES = {
    "passed": "green",
    outcome(False): "red",
    "fresh": "green",
    "would run": "yellow",
    "may run": "yellow",
    "ok": "green",
    "warning": "yellow",
    "error": "red",
}
_REPAIR = "pipe run all makes them again"


class Live:
    """A listener that draws a bar for the stage at work, and a line for each stage that is done."""

    def __init__(self, out: Console, width: int) -> None:
        self._out = out
        self._width = width
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        hanging(self._out, Text("  "), words(text, "dim"))

    def started(self, stage: Stage, reason: str) -> None:
        if not self._out.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
        # The last column takes the width that the others leave, so that no text pushes the bar out.
        rest = RichColumn(ratio=1, no_wrap=True, overflow="ellipsis")
        detail = TextColumn("{task.fields[detail]}", style="dim", markup=False, table_column=rest)
        self._bar = Progress(*columns, TimeRemainingColumn(), detail, console=self._out, transient=True, expand=True)
        self._bar.start()
        self._task = self._bar.add_task(f"{stage.name:{self._width}}", total=None, detail=printable(reason))

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, completed=done, total=total)
        if fields:
            figures = "  ".join(f"{heading(name)} {formatting.figure(value)}" for name, value in fields.items())
            self._bar.update(self._task, detail=printable(figures))

    def row(self, figures: Mapping[str, float]) -> None:
        """The bar shows enough of a training."""

    def finished(self, result: Result) -> None:
        self.close()
        hanging(self._out, *lines.stage_line(result, self._width))

    def close(self) -> None:
        """Removes the bar, also after an interrupt."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Silent(Live):
    """A listener for `--json`: prints nothing."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True, force_terminal=False), 0)


def listener(stages: Sequence[Stage], *, silent: bool) -> Live:
    """The listener that draws the work on these stages, or prints nothing."""
    if silent:
        return Silent()
    return Live(console(), width=max((len(stage.name) for stage in stages), default=0))


def run_outcome(
    out: Console, done: Outcome, where: str, sets: Sequence[str] = (), *, note_advises: bool = False
) -> None:
    """Prints the stages that are now out of date and, where there is one, the next useful command.

    With `note_advises` a note of the report has said what to do next, unless the run failed.

    The command repeats `where` (` -C DIR`) and the `--set` overrides of the run: without them it means other settings.
    """
    for step in done.out_of_date:
        reason = words(f"({step.reason})", "dim")
        out.print(Text.assemble(("out of date", "yellow"), f" {step.stage.name} ", reason), soft_wrap=True)
    if note_advises and done.passed:
        return
    command = _next_command(done, sets)
    if command:
        out.print(Text.assemble(("next:", "dim"), " ", words(command + where)), soft_wrap=True)


def _next_command(done: Outcome, sets: Sequence[str]) -> str:
    for result in done.results:
        if result.state == "failed" and result.record:
            if result.name == "quantize":
                return "pipe why"
            return f"pipe diff {result.name}"
        if result.state == "failed":
            return ""
    if done.out_of_date:
        return f"pipe run all {as_options(sets)}".rstrip()
    return "pipe report"


def table(out: Console, view: TableView) -> list[str]:
    """Prints a table, and returns the columns that a narrow terminal has no room for.

    The least important columns are dropped until a row fits. Where the others still don't, their texts are wrapped.
    """
    # What only the page shows is never measured here.
    indexes = [i for i, column in enumerate(view.columns) if column.drop != PAGE_ONLY]
    widths = [cell_len(column.label) + _GAP for column in view.columns]
    for row in view.rows:
        widths = [max(width, cell_len(cell) + _GAP) for width, cell in zip(widths, row, strict=True)]
    hidden: list[str] = []
    # The last column needs no gap behind it.
    while sum(widths[i] for i in indexes) > out.width + _GAP:
        droppable = [i for i in indexes if view.columns[i].drop is not None]
        if not droppable:
            break
        least = min(droppable, key=lambda i: view.columns[i].drop or 0)
        indexes.remove(least)
        hidden.append(view.columns[least].label)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for i in indexes:
        column = view.columns[i]
        justify: Literal["left", "right"] = "right"
        if column.kind in ("text", "verdict"):
            justify = "left"
        # A cell that is too long is folded, not cut: nothing that a reader needs is lost.
        drawn.add_column(Text(column.label), justify=justify, no_wrap=not column.wrap, overflow="fold")
    for row in view.rows:
        cells = [words(row[i]) for i in indexes]
        for i, cell in zip(indexes, cells, strict=True):
            if view.columns[i].kind == "verdict":
                # Colour repeats what the word says, for those who see it.
                cell.style = _STYLES.get(row[i], "")
        drawn.add_row(*cells)
    out.print(drawn)
    return hidden


def status(out: Console, steps: Sequence[Step], states: Mapping[str, str]) -> None:
    """Prints which stages are fresh and which would run, and why. Empty columns are left out."""
    rows = []
    for step in steps:
        row = [step.stage.name, states[step.stage.name], step.reason, "", "", ""]
        if step.artifact and step.record:
            # A fresh stage needs no reason.
            row[2:] = ["", step.artifact.digest[:12], step.record.created, outcome(step.record.passed)]
        rows.append(row)
    columns = (
        Column("stage"),
        Column("state", "verdict"),
        Column("why", wrap=True),
        Column("digest"),
        Column("made", drop=0),  # the reason tells more
        Column("verdict", "verdict"),
    )
    table(out, filled(columns, rows))


def check(out: Console, done: Checked) -> None:
    """Prints the findings of `pipe check` in the order of the stages, and how many are errors and warnings.

    Without advice there is no column for it.
    """
    columns = (Column("item"), Column("", "verdict"), Column("seen", wrap=True), Column("what to do", wrap=True))
    rows = [[f.item, f.state, located(f.where, f.seen), f.hint] for f in done.findings]
    table(out, filled(columns, rows))
    states = [finding.state for finding in done.findings]
    counts = [quantity(states.count(state), state) for state in ("error", "warning") if state in states]
    out.print(Text(", ".join(counts) or "nothing is wrong"), soft_wrap=True)


def explain(out: Console, step: Step, old: Mapping[str, str] | None, prints: Mapping[str, Fingerprint]) -> None:
    """Prints each part of a stage's key, same or changed, with old and new value, and what its hooks reach."""
    key = step.key[:12] if step.key else "not known yet"
    summary = Text.assemble(words(f"{step.reason}  "), (f"key {key}", "dim"))
    hanging(out, Text(f"{step.stage.name}  ", "bold"), summary)
    out.print(_parts(step, old))
    for hook, fingerprint in prints.items():
        names = [*fingerprint.whole, *fingerprint.reached]
        # Where a file counts whole, its imports are what explains it; else they are noise.
        if not fingerprint.whole:
            names = [name for name in names if ":import " not in name]
        reached = Text("is not defined in the task", "dim")
        if names:
            reached = Text.assemble(("reaches ", "dim"), words(", ".join(names)))
        hanging(out, Text(f"{hook}() ", "dim"), reached)
    for note in step.notes:
        hanging(out, Text("note ", "yellow"), words(note))


def _parts(step: Step, old: Mapping[str, str] | None) -> Table:
    # An old record may lack parts that a key has now, and the other way round.
    new, before = shown(step.parts), old or {}
    changed, waiting = changes(before, new), awaited(before, new, step.key)
    drawn = Table("part", "", "last run", "now", box=None, pad_edge=False, header_style="dim")
    for column in drawn.columns:
        column.overflow = "fold"
    for name in dict.fromkeys([*new, *changed]):  # removed parts last
        is_changed = name in changed
        now = new.get(name)
        state, style = "same", "dim"
        if is_changed:
            state = "changed"
        if name in waiting:
            state, now = "may change", "not known yet"
        if old is None:
            state = "new"
        if is_changed and before:
            style = "yellow"
        kind = name.partition(".")[0]
        texts = []
        for side, value in ((before, before.get(name)), (new, now)):
            texts.append(formatting.hashed(as_written(kind, value)) if name in side or value else "")
        if is_changed:  # long values may differ at their ends
            cells = [words(text) for text in texts]
        else:  # shown once, on one line
            cells = [Text(), Text(printable(formatting.short(texts[1])), no_wrap=True, overflow="ellipsis")]
        drawn.add_row(words(label(name)), Text(state, style, no_wrap=True), *cells)
    return drawn


def runs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a list of runs, newest first: what each ran and kept, what changed since the run before, and its figures.

    Settings that differ from their defaults are shown of the oldest run alone: for the others `changed` tells what
    became of them.
    """
    for row in rows:
        verdict = outcome(row["passed"])
        time = words(f"  {row['time']}  ")
        out.print(Text.assemble(words(row["id"], "bold"), time, Text(verdict, _STYLES[verdict])))
        # What a run found cached is not its work.
        kept = [stage for stage in row["stages"] if stage not in row["ran"]]
        facts = {
            "ran": [" ".join(row["ran"])],
            "kept": [" ".join(kept)],
            "error": [f"{stage}: {located(e['where'], e['error'])}" for stage, e in row["errors"].items()],
            "--set": row["sets"],
            "changed": row["changed"],
            "settings": [],
            "figures": [],
        }
        # The oldest run is the one that `changed` has nothing to compare with.
        if row is rows[-1]:
            for stage, fields in row["settings"].items():
                facts["settings"] += [f"{stage}.{name}={formatting.short(value)}" for name, value in fields.items()]
            further = len(facts["settings"]) - SETTINGS
            if further > 0:
                facts["settings"][SETTINGS:] = [f"and {further} more, which --json lists"]
        for stage, metrics in row["metrics"].items():
            figures = lines.figures(metrics)[:FIGURES]
            if figures and stage in row["ran"]:
                facts["figures"].append(f"{stage}: {', '.join(figures)}")
        for name, items in facts.items():
            if any(items):
                hanging(out, Text(f"  {name:8}  ", "dim"), words("; ".join(items)))


def damage(checked: int, problems: Sequence[Problem]) -> StageError | None:
    """The error that `pipe verify` ends with; None where nothing is damaged."""
    if not problems:
        return None
    return StageError(f"{len(problems)} of {checked} are damaged", hint=_REPAIR)


def verified(checked: int, problems: Sequence[Problem]) -> Iterator[str]:
    """The lines of `pipe verify`."""
    for problem in problems:
        yield f"{problem.what}: {problem.fault}"
    summary = f"{checked} checked, {len(problems)} damaged"
    if problems:
        summary += f"; {_REPAIR}"
    yield summary


def collected(garbage: Sequence[Garbage] | None, *, dry_run: bool, verbose: bool) -> Iterator[str]:
    """The lines of `pipe gc`: what was removed, or would be. None means that a run was in progress."""
    if garbage is None:
        yield "a run is in progress in this project: nothing was removed; try again when it is done"
        return
    if not garbage:
        yield "nothing to remove"
        return
    verb = "removed"
    if dry_run:
        verb = "would remove"
    if verbose:
        for item in garbage:
            yield f"{verb} {item.path}"
    megabytes = sum(item.size for item in garbage) / 1e6
    yield f"{verb} {', '.join(counted(garbage))}, {megabytes:.1f} MB"
