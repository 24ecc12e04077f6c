"""The terminal's one door: text is shown as it is, and nothing in it is a command, neither to rich nor to the terminal.

Names of modules, tensors, files and metrics come from elsewhere. Markup (`[red]`) and emoji codes (`:bug:`) in them are
plain characters, and control characters become escapes (`\\x1b`).
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
from layerline.pipeline.inputs.untrusted import printable

PIPE_WIDTH = 160
"""Columns where no terminal says how many: enough for tables not to wrap in a pipe."""
_Value = TypeVar("_Value")


class Screen(Console):
    """A console whose every segment is printable, whatever it was made from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))


def console() -> Screen:
    """Standard output, as wide as the terminal or as COLUMNS says, or wide enough for a pipe not to wrap tables."""
    screen = Screen()
    has_width = screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return screen if has_width else Screen(width=PIPE_WIDTH)


def words(value: str, style: str = "") -> Text:
    """Text from elsewhere: escaped before it is measured, so that columns keep their width."""
    return Text(printable(value, keep="\n"), style)


def error(problem: PipeError) -> None:
    """What went wrong, on standard error: where, what, and what to do."""
    out = Screen(stderr=True, soft_wrap=True)
    place = Text.assemble(words(problem.where, "bold"), ": ") if problem.where else Text()
    out.print(Text.assemble(("error", "red"), " ", place, words(problem.what)))
    if problem.hint:
        out.print(Text.assemble("  ", words(problem.hint, "dim")))


def cleaned(value: _Value) -> _Value:
    """A report, a record or any part of one with every text in it escaped, line breaks too: a name is one line."""
    return _cleaned(value)  # type: ignore[no-any-return]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _cleaned(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return {_cleaned(k): _cleaned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_cleaned(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_cleaned(v) for v in value)
    return value
