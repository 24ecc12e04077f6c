"""YAML from outside, bounded before anything is built from it.

A few lines of aliases stand for billions of values, thousands of brackets exhaust the parser's stack, and a date that
is none ends in an error of the datetime module. The events of the parser are counted first; it yields them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerline.pipeline.errors import ConfigError, first_line
from layerline.pipeline.untrusted import DIGITS, printable

if TYPE_CHECKING:
    from ruamel.yaml import YAML
    from ruamel.yaml.events import Event

SIZE = 1 << 17
"""Characters of a document. ruamel.yaml reads about 50,000 a second."""
DEPTH = 24
"""Levels of nesting; Layerline's own fields take six."""
VALUES = 20_000
"""Values of a document, what aliases stand for counted in."""
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F_]+|0[bo][0-7_]+|[0-9][0-9_:]*)")


class NotYamlError(ConfigError):
    """Text that is within the bounds, and no YAML."""


class _Count:
    """Counts what a document stands for, from its events."""

    def __init__(self) -> None:
        # Of each collection that has begun: its anchor, and values and levels inside it up to now.
        self.open: list[tuple[str | None, int, int]] = []
        # Values and levels of what each anchor stands for.
        self.whole: dict[str, tuple[int, int]] = {}

    def take(self, event: Event) -> str:
        """What is wrong with the document up to this event; empty while nothing is."""
        from ruamel.yaml import events

        anchor = getattr(event, "anchor", None)
        if isinstance(event, events.CollectionStartEvent):
            self.open.append((anchor, 1, 1))
            return self._bounds(0, len(self.open))
        if isinstance(event, events.CollectionEndEvent):
            name, values, levels = self.open.pop()
            return self._add(name, values, levels)
        if isinstance(event, events.ScalarEvent):
            if "\0" in event.value or any("\ud800" <= c <= "\udfff" for c in event.value):
                return "a text with a NUL character or half of a surrogate pair, which no file or key can hold"
            if event.implicit[0] and len(event.value) > DIGITS and _INTEGER.fullmatch(event.value):
                return f"an integer of {len(event.value)} characters, expected at most {DIGITS}"
            return self._add(anchor, 1, 0)
        if isinstance(event, events.AliasEvent):
            if any(name == anchor for name, _, _ in self.open):
                return "an alias in it stands for itself"
            values, levels = self.whole.get(anchor or "", (1, 0))  # an unknown one: the parser says so
            return self._add(None, values, levels)
        return ""

    def _add(self, anchor: str | None, values: int, levels: int) -> str:
        if anchor is not None:
            self.whole[anchor] = values, levels
        if self.open:
            name, inside, deepest = self.open[-1]
            self.open[-1] = name, inside + values, max(deepest, levels + 1)
        return self._bounds(values, len(self.open) + levels)

    def _bounds(self, values: int, levels: int) -> str:
        if levels > DEPTH:
            return f"it is nested more than {DEPTH} levels deep"
        if max([values, *(inside for _, inside, _ in self.open)]) > VALUES:
            return f"it stands for more than {VALUES} values"
        return ""


def parse(text: str, where: str) -> Any:
    """A document as ruamel.yaml's round-trip types, which know the place of every field; `where` is its name in errors.

    Raises NotYamlError, or ConfigError where it is larger, deeper or of more values than the bounds.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > SIZE:
        raise ConfigError(f"it has {len(text)} characters, expected at most {SIZE}", where=where)
    try:
        count = _Count()
        for event in YAML(typ="rt").parse(text):
            if problem := count.take(event):
                raise ConfigError(problem, where=_place(where, event.start_mark))
        return _loader().load(text)
    except MarkedYAMLError as error:
        problem = first_line(str(error.problem or error.context))
        raise NotYamlError(
            f"not valid YAML: {printable(problem, 200)}", where=_place(where, error.problem_mark or error.context_mark)
        ) from None
    except YAMLError as error:
        raise NotYamlError(f"not valid YAML: {printable(first_line(str(error)), 200)}", where=where) from None
    except RecursionError:  # how the parser takes a mapping that is merged into itself
        raise ConfigError("an alias in it stands for itself", where=where) from None
    except ConfigError:
        raise
    except Exception as error:  # ruamel reads numbers of directives and escapes with int() and chr(), and asserts
        message = f"{type(error).__name__}: {printable(first_line(str(error)), 200)}"
        raise NotYamlError(f"not valid YAML: {message}", where=where) from error


def plain(value: Any) -> Any:
    """Plain Python values in place of the parser's own types, which carry comments and formatting."""
    if isinstance(value, Mapping):
        return {plain(k) if isinstance(k, str | int | float) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    for cls in (bool, int, float, str):
        if isinstance(value, cls):
            return cls(value)
    return value


def _loader() -> YAML:
    """The round-trip loader. Errors name the line of a text that is no valid value, such as a date in a 13th month."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
    from ruamel.yaml.error import YAMLError

    class Constructor(RoundTripConstructor):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (YAMLError, RecursionError):
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {first_line(str(error))}"
                raise ConstructorError(None, None, message, node.start_mark) from error

    loader = YAML(typ="rt")
    loader.Constructor = Constructor
    return loader


def _place(where: str, mark: Any) -> str:
    if not mark:
        return where
    return f"{where}:{mark.line + 1}:{mark.column + 1}"
