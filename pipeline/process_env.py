"""Protects the process of `pipe` from what user code may do to it: closed streams, prints, signals, `os._exit`.

Only the command line calls `own_process`. A program that imports Layerline keeps its standard output, its signal
handlers and `os._exit`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import hashlib
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from layerline.pipeline.untrusted import is_number, printable

INTERRUPTED = "interrupted; what was finished is kept, and the same command goes on from there"
_RECURSION = sys.getrecursionlimit()
_FORMAT = warnings.formatwarning
# Results are keyed, stored and printed by these: with others in their place they would be wrong without a word.
_KEPT = (
    (builtins, "open", builtins.open),
    (io, "open", io.open),
    (hashlib, "blake2b", hashlib.blake2b),
    (hashlib, "sha256", hashlib.sha256),
    (json, "dumps", json.dumps),
    (json, "loads", json.loads),
)
_WIDEST = 10_000  # columns and lines of a terminal


def prepare() -> None:
    """Sets up output and environment variables before any command runs."""
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
    warnings.formatwarning = lambda *arguments, **named: printable(_FORMAT(*arguments, **named), keep="\n")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")


@dataclass
class _Process:
    """The state of this process, if the command line owns it."""

    output: TextIO | None = None  # a copy of standard output for results; closing standard output does not close it
    code: int | None = None  # the command's exit code; None while the command runs


_PROCESS = _Process()


def own_process() -> None:
    """Gives results a copy of standard output, and guards Ctrl-C and calls that end the process.

    Does nothing if standard output is not that of the process, as under a test runner.
    """
    for descriptor in (0, 1, 2):  # a closed one would be given to the next file that is opened, and written to
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is not sys.__stdout__ or _PROCESS.output is not None:
        return
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Open(
            os.fdopen(os.dup(1), "wb"),
            encoding=sys.stdout.encoding, errors="replace", line_buffering=sys.stdout.line_buffering,
        )  # fmt: skip
    _PROCESS.output = sys.stdout
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Open(
            os.fdopen(os.dup(2), "wb"), encoding=sys.stderr.encoding, errors="replace", line_buffering=True
        )
    for module in [sys.modules[name] for name in ("os", "posix", "nt") if name in sys.modules]:
        for name in ("_exit", "execv", "execve"):  # they end a process without running its exit handlers
            if hasattr(module, name):
                setattr(module, name, _Guarded(getattr(module, name), os.getpid()))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def ended(code: int) -> int:
    """Fixes the exit code: handlers that user code has registered for the exit can't change it any more."""
    _PROCESS.code = code
    if _PROCESS.output is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def output() -> TextIO | None:
    """The stream for documents of `--json`; None for standard output."""
    return _PROCESS.output


def put_right() -> tuple[str, str] | None:
    """Resets global settings of user code with which Layerline can't work; returns what was set, and a hint."""
    if sys.getrecursionlimit() < _RECURSION:
        sys.setrecursionlimit(_RECURSION)
    replaced = []
    for module, name, function in _KEPT:
        if getattr(module, name, None) is not function:
            setattr(module, name, function)
            replaced.append(f"{module.__name__}.{name}")
    if replaced:
        what = f"replaced {' and '.join(replaced)}, by which results are stored"
        return what, "write a function of your own in its place, under another name"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_default_device") and torch.get_default_device().type == "meta":
        torch.set_default_device("cpu")
        return "left torch's default device at meta, where tensors hold no numbers", "use: with torch.device('meta')"
    return None


class _Open(io.TextIOWrapper):
    """A stream that stays open if user code closes it."""

    def close(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            self.flush()


def _interrupt(number: int, _frame: Any) -> NoReturn:
    """Ctrl-C raises KeyboardInterrupt; a second one ends the process at once."""
    signal.signal(number, interrupt_at_once)
    raise KeyboardInterrupt


def interrupt_at_once(_number: int = 0, _frame: Any = None) -> NoReturn:
    """Prints the message of an interrupt and ends the process without cleaning up."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{INTERRUPTED}\n".encode())
    _exit(130)


_exit = os._exit


class _Guarded:
    """Ends a child process as called; in the process of `pipe` it prints an error and exits with code 2."""

    def __init__(self, function: Any, process: int) -> None:
        self.function, self.process = function, process

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if os.getpid() != self.process:
            return self.function(*arguments, **options)
        if _PROCESS.code is not None:  # at exit, when all has been said
            _flush()
            _exit(_PROCESS.code)
        called = f"os.{self.function.__name__}({', '.join(map(repr, arguments))[:80]})"
        sentence = f"error task.py, or a package that it uses, ended the process: {called}; nothing was filed\n"
        with contextlib.suppress(OSError):
            os.write(2, sentence.encode(errors="replace"))
        return _exit(2)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Makes the project's folder the current one, so that hooks find its files by relative names."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects what task.py, libraries and child processes print to standard error, so that only JSON is on stdout.

    In the process of `pipe` this stays until the end, since threads and exit handlers of user code may print later.
    """
    _flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    if _PROCESS.output is not None:
        os.close(kept)
        sys.stdout = sys.stderr
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()  # what is still held back belongs there too
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Flushes the buffers of Python and of the C library."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(ValueError, OSError):  # closed by user code
            if stream is not None:
                stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
