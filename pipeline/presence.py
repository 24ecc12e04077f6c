"""Who is at work on a project, so that nothing is cleaned away under a run that may need it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


def claim(state: Path) -> None:
    """Makes a project's state folder; whoever makes it first keeps it out of the project's git."""
    state.mkdir(parents=True, exist_ok=True)
    ignore = state / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", "utf-8")


@contextmanager
def at_work(state: Path) -> Iterator[None]:
    """Held by a run from its first look at the store to its last; waits for a collection under way."""
    folder = _folder(state)
    mark = folder / f"{os.getpid()}-{secrets.token_hex(4)}.lock"
    with ExitStack() as held:
        with suppress(OSError):  # a project that can't be written can't be cleaned either
            claim(state)
            folder.mkdir(exist_ok=True)
            with FileLock(folder / "gate"):
                held.callback(_forget, mark)
                held.enter_context(FileLock(mark))
        yield


@contextmanager
def alone(state: Path) -> Iterator[bool]:
    """Whether no run is going on; none begins before this ends."""
    folder = _folder(state)
    claim(state)
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "gate"):
        yield not any(_is_held(mark) for mark in folder.glob("*.lock"))


def _is_held(mark: Path) -> bool:
    try:
        with FileLock(mark, timeout=0):
            _forget(mark)  # its run was killed
    except Timeout:
        return True
    return False


def _forget(mark: Path) -> None:
    with suppress(OSError):  # what is left of it is free to be locked, and says nothing
        mark.unlink()


def _folder(state: Path) -> Path:
    return state / "running"
