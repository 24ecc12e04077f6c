"""What comes from outside: text, names, numbers and JSON of files that somebody else wrote, bounded and checked.

Names of an ONNX file, keys of a checkpoint, records under the state folder, fields of pipe.yaml and environment
variables are only data: none of them may become code, a path outside of the project, or a command to the terminal.
YAML is read by `bounded_yaml`, arrays by `npz`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from layerline.pipeline.errors import ConfigError

DIGITS = 40
"""The longest number that is read: enough for every 128-bit integer, in decimal or in hex."""
JSON_BYTES = 1 << 28
JSON_DEPTH = 64
_RANKS = 1 << 20
_NAME_BYTES = 255  # what common file systems take for one name
_CODE = (".py", ".pyc", ".pyo", ".pyw", ".pyd", ".so", ".dll", ".dylib", ".pth")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INTEGER = re.compile(r"[+-]?[0-9]+")


def printable(text: str, limit: int | None = None, keep: str = "") -> str:
    """Text that a terminal shows and does not obey.

    Everything that is not printable becomes an escape, as in a Python literal: ESC and other control characters, line
    and paragraph separators (U+0085, U+2028, U+2029), characters that change the direction of writing, and surrogates.

    Args:
        limit: at most so many characters come back; what is cut off becomes "…".
        keep: characters that stay although they are not printable, such as a line break.
    """
    if limit is not None:
        text = text[: limit + 1]  # an escape is never shorter than what it stands for
    shown = text
    if not text.isprintable():
        shown = "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)
    if limit is not None and len(shown) > limit:
        return shown[: max(limit - 1, 0)] + "…"
    return shown


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def storable(name: str) -> str:
    """A name of a file as UTF-8 can hold it: bytes that are none become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def check_utf8(folder: Path) -> None:
    """Raises ConfigError on a folder that is no UTF-8, links followed: onnxruntime and TensorRT could not open it."""
    path = os.path.realpath(folder)
    if storable(path) != path:
        raise ConfigError(
            "the path of this folder is no UTF-8, and onnxruntime can't open files in it",
            where=storable(path),
            hint="rename the folder, or move the project elsewhere",
        )


def is_digest(text: object) -> bool:
    """Whether it has the form of a SHA-256 in hex, as keys, digests and names of reports have."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_text(text: object) -> bool:
    """Whether it is text that can be stored as UTF-8 and shown as it is: no control character, no surrogate."""
    return isinstance(text, str) and text.isprintable()


def is_file_name(text: object) -> bool:
    """Whether it names a file in a folder, and can do nothing else: no separator, no control character, not `..`."""
    if not isinstance(text, str) or not is_text(text) or text in ("", ".", ".."):
        return False
    return not set(text) & set("/\\") and len(text.encode()) <= _NAME_BYTES


def is_inside(text: object, folder: Path | None = None) -> bool:
    """Whether it is a relative path, on every system, that leads nowhere above the folder it starts from; with
    `folder`, links on the way are followed, and must not lead out of it either."""
    if not isinstance(text, str) or "\0" in text:
        return False
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts or not path.parts:
            return False
    if folder is None:
        return True
    root = os.path.realpath(folder)
    try:
        return os.path.commonpath([root, os.path.realpath(folder / text)]) == root
    except ValueError:  # on another drive
        return False


def integer(text: str, low: int, high: int) -> int:
    """A decimal integer from `low` to `high`, else a ValueError with what was expected and seen.

    `str.isdigit` is true for characters such as "²" that `int` does not take, and `int` refuses thousands of digits.
    """
    short = text.strip()
    if len(short) <= DIGITS and _INTEGER.fullmatch(short) and low <= (value := int(short)) <= high:
        return value
    digits = f" ({len(short)} characters)" if len(short) > DIGITS else ""
    raise ValueError(f"expected an integer from {low} to {high}, saw '{printable(short, DIGITS)}'{digits}")


def launched() -> tuple[int, int]:
    """(rank, ranks) as a launcher (torchrun) sets them, (0, 1) without one; ConfigError where they make no sense."""
    rank = os.environ.get("RANK") or "0"
    size = os.environ.get("WORLD_SIZE") or "1"
    try:
        ranks = integer(size, 1, _RANKS)
        return integer(rank, 0, ranks - 1), ranks
    except ValueError:
        raise ConfigError(
            f"RANK is '{printable(rank, DIGITS)}' and WORLD_SIZE '{printable(size, DIGITS)}'",
            where="environment",
            hint="start with torchrun, or unset both",
        ) from None


def is_number(text: str) -> bool:
    """Whether it is a non-negative integer in decimal digits, short enough to be read."""
    return len(text) <= DIGITS and text.isascii() and text.isdecimal()


def read_json(path: Path, *, size: int = JSON_BYTES, depth: int = JSON_DEPTH) -> Any:
    """A JSON document from a file, bounded as by `parse_json`; OSError where it is a pipe or a device."""
    return parse_json(read_bytes(path, size), size=size, depth=depth)


def read_bytes(path: Path, size: int) -> bytes:
    """A file's content. Raises OSError: it is a pipe or a device; ValueError: it has more than `size` bytes."""
    with open(path, "rb", opener=open_file) as file:
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"it is larger than {size} bytes")
    return content


def open_file(path: str, flags: int) -> int:
    """An `opener` of Python's `open` that refuses named pipes, which wait for a writer, and endless devices."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def parse_json(text: str | bytes, *, size: int = JSON_BYTES, depth: int = JSON_DEPTH) -> Any:
    """A JSON document of at most `size` bytes, `depth` levels and DIGITS digits a number; else ValueError."""
    if len(text) > size:
        raise ValueError(f"it is larger than {size} bytes")
    try:
        document = json.loads(text, parse_int=_json_integer, parse_constant=_json_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {depth} levels deep") from None
    if _is_deeper(document, depth):
        raise ValueError(f"it is nested more than {depth} levels deep")
    return document


def _json_constant(text: str) -> float:
    """NaN and Infinity are no JSON, although Python reads them."""
    raise ValueError(f"it holds {text}")


def _json_integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"it holds an integer of {len(text)} digits")
    return int(text)


def _is_deeper(document: Any, depth: int) -> bool:
    """Level by level, not by recursion: what is too deep must not end it."""
    level = [document]
    for _ in range(depth):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [v for v in value.values() if isinstance(v, dict | list)]
            elif isinstance(value, list):
                inner += [v for v in value if isinstance(v, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def is_importable(name: str) -> bool:
    """Whether Python, or its installer, takes a file of this name in a folder for code."""
    return name.lower().endswith(_CODE)
