"""Writes files so that a crash leaves the old one or the new one, never a piece; nothing is written through a link."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.untrusted import printable

# Begins the name of a folder whose removal was cut short.
GONE = ".gone-"
# The name of a file that `write_atomic` has not finished: process and moment behind the real name.
_PARTIAL = re.compile(r"\..+\.\d+\.\d{6,}")


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replaces a file's content in one step: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def check_replaceable(path: Path) -> None:
    """Refuses a folder, a device or a link as a file to write: a rename would put a file in the place of /dev/null."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise ConfigError(
            "it is a folder, a device or a link, expected a file",
            where=printable(str(path)),
            hint="for example: -o report.html",
        )


def write_own(path: Path, text: str, root: Path, *, durable: bool = True) -> None:
    """As `write_atomic` in the state, at or below `root`; what lies in the way and is not ours goes."""
    own_folder(path.parent, root)
    if path.is_dir():
        remove(path)
    write_atomic(path, text, durable=durable)


def remove(path: Path) -> None:
    """Takes a file, link or folder away; one that another process has taken already is no fault.

    A folder is renamed first, so that nobody can open half of it under its real name. Of a link only the link goes.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        name = path.name.removeprefix(GONE)
        shutil.rmtree(path.rename(path.with_name(f"{GONE}{name}-{os.getpid()}-{time.monotonic_ns()}")))
    except FileNotFoundError:
        return


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """What lies in a folder of the state, in order; nothing where a link stands in its place."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(folder.glob(pattern))


def own_folder(path: Path, root: Path) -> None:
    """Makes a folder of the state below `root`; a link or file in its place, which is not ours, goes."""
    for folder in reversed([p for p in (path, *path.parents) if p.is_relative_to(root) and p != root]):
        if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
            remove(folder)
    path.mkdir(parents=True, exist_ok=True)


def sync(path: Path) -> None:
    """Asks the system to put a file's bytes, or a folder's names, on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows can't open a folder; its renames are journalled
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(state: Path) -> None:
    """Makes a project's state folder, and keeps it out of the project's git."""
    state.mkdir(parents=True, exist_ok=True)
    ignore = state / ".gitignore"
    if not os.path.lexists(ignore):  # a link that leads nowhere is not followed
        ignore.write_text("*\n", "utf-8")


def is_partial(name: str) -> bool:
    """Whether a name is that of a file that a process which was killed had written so far."""
    return _PARTIAL.fullmatch(name) is not None


def check_link(state: Path) -> None:
    """Refuses a link in the place of the state: one in somebody else's project may lead to the user's own files."""
    if state.is_symlink():
        target = printable(str(state.readlink()), 200)
        raise ConfigError(
            f"it is a link to '{target}', so layerline writes and removes nothing there",
            where=state.name,
            hint="put a folder in its place, or remove it; a project as a whole may lie on another disk",
        )
