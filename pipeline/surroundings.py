"""What a command does to its process for as long as user code runs: the folder it is in, and where its output goes."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerline.pipeline.untrusted import is_number, printable

_FORMAT = warnings.formatwarning
_WIDEST = 10_000  # columns and lines of a terminal


def prepare() -> None:
    """Before any command: what it prints can be encoded, and variables that libraries trip over are put right."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ✓ shows a ? instead
    # Read when torch loads OpenMP: threads that spin while they wait made training 8 times slower beside other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("COLUMNS", "LINES"):  # rich takes them for numbers, and fails where they aren't
        value = os.environ.get(name, "0")
        if not is_number(value) or int(value) > _WIDEST:
            del os.environ[name]
    # Warnings and log records hold names as well, and reach the terminal past the views.
    warnings.formatwarning = _warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


def _warning(*arguments: Any, **named: Any) -> str:
    return printable(_FORMAT(*arguments, **named), keep="\n")


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Hooks open the project's files by their relative names, wherever the command was given."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Keeps standard output for the JSON document, whatever task.py, a library or a child process prints."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()  # what is still held back belongs there too
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Writes out what Python and the C library hold back for standard output."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
