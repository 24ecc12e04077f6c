"""Generated files: what comes from outside is written as a literal, and the result is read again before it is used."""

from __future__ import annotations

import ast
import io
from collections.abc import Mapping
from typing import Any

from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs.untrusted import printable

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-+ /")
_FIELD = "field"


def python_literal(text: str) -> str:
    """Text as Python writes it, in double quotes where it holds none of either kind."""
    written = repr(text)
    return f'"{written[1:-1]}"' if not {'"', "'"} & set(text) else written


def in_prose(text: str, other: str) -> str:
    """A name inside of a docstring; `other` where it is long or holds anything but plain ASCII letters and digits."""
    return text if 0 < len(text) <= 80 and _PLAIN.issuperset(text) else other


def yaml_value(value: Any) -> str:
    """A value as ruamel.yaml writes it, on one line."""
    from ruamel.yaml import YAML

    dumper: Any = YAML(typ="safe", pure=True)
    dumper.default_flow_style, dumper.width = True, 1 << 30
    dumper.sort_base_mapping_type_on_output = False
    written = io.StringIO()
    dumper.allow_unicode = all(text.isprintable() for text in _texts(value))
    # As a field: behind a lone value there would be the end of a document.
    dumper.dump({_FIELD: value}, written)
    return written.getvalue().strip()[len(f"{{{_FIELD}: ") : -1]


def comment(text: str) -> str:
    """A comment of one line, whatever it holds."""
    return f"# {printable(text)}"


def check_yaml(text: str, meant: Mapping[str, Any], where: str) -> None:
    """Reads a generated file again.

    Raises:
        ConfigError: it doesn't say what was meant.
    """
    if plain(bounded_yaml.parse(text, where)) != dict(meant):
        raise _unsafe(where)


def check_python(text: str, twin: str, names: Mapping[str, str], where: str) -> None:
    """Holds generated code against the same code for harmless names.

    Args:
        text: the code.
        twin: the code that was generated for the stand-ins.
        names: what each stand-in stands for.
        where: the file, for errors.

    Raises:
        ConfigError: it is no Python, or differs from its twin in anything but a text that is one of the names.
    """
    try:
        same = _same(ast.parse(text), ast.parse(twin), names)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        same = False
    if not same:
        raise _unsafe(where)


def plain(value: Any) -> Any:
    """Plain Python values in place of the YAML parser's own types, which carry comments and formatting."""
    if isinstance(value, Mapping):
        return {plain(k) if isinstance(k, str | int | float) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    for cls in (bool, int, float, str):
        if isinstance(value, cls):
            return cls(value)
    return value


def _same(node: Any, twin: Any, names: Mapping[str, str]) -> bool:
    if type(node) is not type(twin):
        return False
    if isinstance(node, ast.Constant) and isinstance(twin.value, str):
        return bool(node.value == names.get(twin.value, twin.value))
    if isinstance(node, ast.AST):
        return all(_same(getattr(node, f, None), getattr(twin, f, None), names) for f in node._fields)
    if isinstance(node, list):
        return len(node) == len(twin) and all(_same(a, b, names) for a, b in zip(node, twin, strict=True))
    return bool(node == twin)


def _unsafe(where: str) -> ConfigError:
    return ConfigError(
        "a name from the model or the samples can't be written into this file as it is; nothing was written",
        where=where,
        hint="rename its inputs, sizes and arrays, or the file itself",
    )


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []
