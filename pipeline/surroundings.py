"""What a command does to its process for as long as user code runs: the folder it is in, and where its output goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path


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
