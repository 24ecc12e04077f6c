"""The text of pipe.yaml with the place of every field, and what `--set` puts over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.config.bounded_yaml import plain
from layerline.pipeline.errors import ConfigError, located
from layerline.pipeline.untrusted import is_number, printable, storable

Place = tuple[str | int, ...]


class Document:
    """pipe.yaml, read; ConfigError where there is none, or it is no YAML within the bounds of `bounded_yaml`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._overridden: dict[Place, str] = {}
        self.tree = bounded_yaml.parse(_text(path), path.name)  # the parser's own types, with places
        if self.tree is None:
            self.tree = {}
        if not isinstance(self.tree, Mapping):
            shown = repr(self.tree)
            if isinstance(self.tree, list):
                shown = "a list"
            raise ConfigError(f"expected fields such as `train:`, saw {shown:.80}", where=f"{path.name}:1:1")
        self.content: dict[Any, Any] = plain(self.tree)  # with overrides applied

    def override(self, text: str) -> None:
        """Applies one `key.path=value`. Raises ConfigError: it is none, or there is no such place."""
        path, equals, value = text.partition("=")
        keys = tuple(int(k) if is_number(k) else k for k in path.strip().split("."))
        if not equals or "" in keys:
            raise ConfigError(
                f"expected key=value, saw {text!r:.80}", where="--set", hint="for example: --set train.epochs=2"
            )
        where = _option(text)
        if storable(text) != text:
            raise ConfigError("it holds bytes that are not UTF-8", where=printable(where), hint="type it again")
        try:
            parsed = None
            if value.strip():
                parsed = plain(bounded_yaml.parse(value, where))
        except bounded_yaml.NotYamlError:
            parsed = value  # a text that YAML would have in quotes
        # Goes down along the keys, and makes the tables that are not there yet.
        target: Any = self.content
        for depth, key in enumerate(keys, 1):
            if isinstance(target, dict) and key not in target and str(key) in target:
                key = str(key)  # `--set` can't tell the name "0" from the number 0
            if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
                raise ConfigError(f"{_dotted(keys[:depth])} is not there: the list has {len(target)}", where=where)
            if depth == len(keys):
                target[key] = parsed
                break
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}
            target = target[key]
            if not isinstance(target, dict | list):
                raise ConfigError(f"{_dotted(keys[:depth])} is {target!r:.80} and has no fields", where=where)
        self._overridden[keys] = text

    def error(self, loc: Place, what: str, hint: str = "") -> ConfigError:
        """A ConfigError that points at a field."""
        field = _dotted(loc)
        position, is_in_file = self._position(loc)
        # A value that came from --set has its place on the command line, not in the file.
        for keys, text in self._overridden.items():
            if keys == loc[: len(keys)] or (keys[: len(loc)] == loc and not is_in_file):
                return ConfigError(f"{field}: {what}", where=_option(text), hint=hint)
        where = f"{self.path.name}:{position[0] + 1}:{position[1] + 1}"
        return ConfigError(located(field, what), where=where, hint=hint)

    def _position(self, loc: Place) -> tuple[Sequence[int], bool]:
        """Line and column, from 0, of the field or of what holds it; and whether the file has the field."""
        node: Any = self.tree
        position: Sequence[int] = (0, 0)
        for key in loc:
            # ruamel keeps the places of keys and items in `lc`.
            marks = getattr(getattr(node, "lc", None), "data", None) or {}
            if key not in marks:
                return position, False
            position, node = marks[key], node[key]
        return position, True


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ConfigError("it is no file", where=path.name, hint="pipe.yaml is a text file")
    try:
        with path.open("rb") as file:
            return file.read(4 * bounded_yaml.SIZE + 1).decode("utf-8")  # a character takes four bytes at most
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path.name} in {path.parent.resolve()}", hint="make a project: pipe init DIR"
        ) from None
    except UnicodeDecodeError as error:
        if error.start > 4 * bounded_yaml.SIZE - 4:
            raise ConfigError(f"it is larger than {4 * bounded_yaml.SIZE} bytes", where=path.name) from None
        raise ConfigError(f"it is not UTF-8 text: {error}", where=path.name) from None


def _dotted(loc: Place) -> str:
    return ".".join(printable(str(part), 80) for part in loc)


def _option(text: str) -> str:
    return f"--set {printable(text, 200)}"
