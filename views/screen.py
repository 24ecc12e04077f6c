"""All output to the terminal goes through here, so that no text acts as a command to rich or to the terminal.

Names of modules, tensors, files and metrics are untrusted. Markup (`[red]`) and emoji codes (`:bug:`) in them are
printed as they are, and control characters become escapes (`\\x1b`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from layerline.pipeline.errors import PipeError
from layerline.pipeline.untrusted import printable

# Columns where the width is unknown: enough for tables not to wrap in a pipe.
PIPE_WIDTH = 160
_Value = TypeVar("_Value")


class Screen(Console):
    """A console that prints control characters as escapes, whatever the output was made from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own cursor movements
                yield segment
            else:
                yield segment._replace(text=printable(segment.text, keep="\n"))


def console() -> Screen:
    """Standard output, with the width of the terminal, else that of COLUMNS, else PIPE_WIDTH."""
    screen = Screen()
    if screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return screen
    return Screen(width=PIPE_WIDTH)


def words(value: str, style: str = "") -> Text:
    """Untrusted text, escaped before it is measured, so that columns keep their width."""
    return Text(printable(value, keep="\n"), style)


def dim(out: Console, text: str) -> None:
    """Prints a remark."""
    out.print(words(text, "dim"), soft_wrap=True)


def hanging(out: Console, head: Text, body: Text) -> None:
    """Prints a paragraph whose further lines are indented to where its first words begin."""
    indent = head.cell_len
    first: Text | str = head
    for line in body.wrap(out, max(out.width - indent, 20)):
        line.rstrip()
        out.print(Text.assemble(first, line), soft_wrap=True)
        first = " " * indent


def error(problem: PipeError) -> None:
    """Prints an error on standard error: where it is, what failed, and what to do."""
    out = Screen(stderr=True, soft_wrap=True)
    place = Text()
    if problem.where:
        place = Text.assemble(words(problem.where, "bold"), ": ")
    out.print(Text.assemble(("error", "red"), " ", place, words(problem.what)))
    if problem.hint:
        out.print(Text.assemble("  ", words(problem.hint, "dim")))


def cleaned(value: _Value) -> _Value:
    """A copy of a report, a record or a part of one, with every text in it escaped, line breaks included."""
    clean: Any = value
    if isinstance(value, str):
        clean = printable(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: cleaned(getattr(value, f.name)) for f in dataclasses.fields(value)}
        clean = dataclasses.replace(value, **fields)
    elif isinstance(value, Mapping):
        clean = {cleaned(key): cleaned(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        clean = type(value)(map(cleaned, value))
    return clean  # type: ignore[no-any-return]
