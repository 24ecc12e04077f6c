"""Who is at work on a project, so that nothing is cleaned away under a run that may need it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from filelock import FileLock, Timeout

from layerline.pipeline.files import claim, entries, own_folder, remove

_PREFIX, _HELD = "layerline-", ".held"
_JUST_MADE_S = 60
_RUNNING, _MARKS, _GATE = "running", "[0-9]*-*.lock", "gate"


def lock(path: Path) -> FileLock:
    """A lock on a file of the state; a link or folder in its place was not put there by us, and goes."""
    if path.is_symlink() or path.is_dir():
        remove(path)
    return FileLock(path)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for as long as it is needed; the lock of one that a killed process left behind is free."""
    with TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with FileLock(folder / _HELD):
            yield folder


def abandoned() -> list[Path]:
    """Temporary folders of this user that killed processes left behind."""
    left_behind = []
    for folder in sorted(Path(gettempdir()).glob(f"{_PREFIX}*")):
        with suppress(OSError):  # gone meanwhile, or not ours to read
            is_folder = folder.is_dir() and not folder.is_symlink()
            if is_folder and (os.name == "nt" or folder.stat().st_uid == os.getuid()) and _is_left(folder):
                left_behind.append(folder)
    return left_behind


def _is_left(folder: Path) -> bool:
    mark = folder / _HELD
    if not mark.exists():  # made this very moment, or by a process that was killed before it could lock it
        return time.time() - folder.stat().st_mtime > _JUST_MADE_S
    with suppress(Timeout), FileLock(mark, timeout=0):
        return True
    return False


@contextmanager
def at_work(state: Path) -> Iterator[bool]:
    """A lock that a run holds until it has last used the store. Yields whether an earlier run was killed; each
    killed run is reported once."""
    folder = state / _RUNNING
    mark = folder / f"{os.getpid()}-{secrets.token_hex(4)}.lock"
    broken: list[Path] = []
    with ExitStack() as held:
        with suppress(OSError):  # a project that can't be written can't be cleaned either
            claim(state)
            own_folder(folder, state)
            with lock(folder / _GATE):
                broken = _broken(folder)
                for path in broken:
                    _forget(path)
                held.callback(_leave, mark)
                held.enter_context(FileLock(mark))
        yield bool(broken)


def was_broken_off(state: Path) -> bool:
    """Whether a run was ended by something that left it no time: a signal, a loss of power, or its own code."""
    return bool(_broken(state / _RUNNING))


@contextmanager
def alone(state: Path) -> Iterator[bool]:
    """Whether no run is going on; none begins before this ends."""
    folder = state / _RUNNING
    claim(state)
    own_folder(folder, state)
    with lock(folder / _GATE):
        for path in _broken(folder):
            _forget(path)
        yield not entries(folder, _MARKS)


def going_on(state: Path) -> list[Path]:
    """The file that each run going on here may keep about itself, the newest run first."""
    folder = state / _RUNNING
    held: list[Path] = []
    if folder.is_dir():
        # Behind the gate no run removes its mark: trying the lock of a mark that has just gone would make it again.
        with suppress(OSError), lock(folder / _GATE):
            broken = _broken(folder)
            held = [mark for mark in entries(folder, _MARKS) if mark not in broken]
            held.sort(key=lambda mark: mark.stat().st_mtime_ns, reverse=True)
    return [_about(mark) for mark in held]


def _about(mark: Path) -> Path:
    """What the process that holds a mark writes about its run; the mark begins with the number of the process."""
    return mark.with_name(f"{mark.name.partition('-')[0]}.json")


def _broken(folder: Path) -> list[Path]:
    """Marks of runs that nobody holds any more."""
    broken = []
    for mark in entries(folder, _MARKS):
        with suppress(Timeout), lock(mark).acquire(timeout=0):
            broken.append(mark)
    return broken


def _leave(mark: Path) -> None:
    """Removes the mark of a run that has ended, while nobody looks at the marks."""
    if mark.parent.is_dir():  # the lock would make it again
        with suppress(OSError), lock(mark.with_name(_GATE)):
            _forget(mark)


def _forget(mark: Path) -> None:
    with suppress(OSError):  # what is left of it is free to be locked, and says nothing
        _about(mark).unlink(missing_ok=True)
        mark.unlink()
