"""Which files of the project a string with wildcards matches, as glob and pathlib would, bounded to the project."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from layerline.pipeline.keys.imports import is_foreign_folder

_KEPT_BY_TOOLS = frozenset({".git", ".layerline"})


def has_wildcard(text: str) -> bool:
    """Whether a string may be a pattern."""
    return any(sign in text for sign in "*?[")


def _is_new(folder: Path) -> bool:
    """Whether going through a folder leads anywhere else than through what holds it: a link may lead back."""
    return not (folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve()))


def matches(
    folder: Path, parts: Sequence[str], project: Path, enters: Callable[[Path], bool] = _is_new
) -> Iterator[Path]:
    """Files and folders below `folder` that the parts of a pattern match, in a fixed order; "**" is any depth.

    Nothing outside `project` is matched, nor what git, Layerline or an environment keeps there.

    Args:
        folder: where the pattern starts.
        parts: of the pattern, at its slashes.
        project: its folder.
        enters: asked for each folder that a wildcard comes across, before it is looked into.
    """
    if not folder.is_relative_to(project):
        return
    if not parts:
        yield folder
        return
    head, rest = parts[0], parts[1:]
    if head == "**":
        yield from matches(folder, rest or ["*"], project, enters)
        for path in _inside(folder):
            if os.path.isdir(path) and enters(path):  # noqa: PTH112 - Path.is_dir raises where it can't look
                yield from matches(path, parts, project, enters)
    elif has_wildcard(head):
        for path in _inside(folder):
            if fnmatchcase(path.name, head) and (not rest or (os.path.isdir(path) and enters(path))):  # noqa: PTH112
                yield from matches(path, rest, project, enters)
    else:
        path = Path(os.path.normpath(folder / head))
        if os.path.exists(path) and path.name not in _KEPT_BY_TOOLS:  # noqa: PTH110
            yield from matches(path, rest, project, enters)


def inside(folder: str | Path) -> list[os.DirEntry[str]]:
    """What is in a folder, but for what git, Layerline or an environment keeps there."""
    with suppress(OSError), os.scandir(folder) as entries:  # OSError: not ours to read
        return [entry for entry in entries if not _is_kept(entry)]
    return []


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link that leads to one."""
    with suppress(OSError):  # a link that leads to itself
        return entry.is_dir()
    return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file, or a link that leads to one."""
    with suppress(OSError):
        return entry.is_file()
    return False


def _is_kept(entry: os.DirEntry[str]) -> bool:
    return entry.name in _KEPT_BY_TOOLS or (is_folder(entry) and is_foreign_folder(Path(entry.path)))


def size_and_time(path: Path) -> tuple[int, int]:
    """In bytes and nanoseconds; zeros for a link that leads nowhere."""
    with suppress(OSError):
        state = path.stat()
        return state.st_size, state.st_mtime_ns
    return 0, 0


def _inside(folder: Path) -> list[Path]:
    return sorted(Path(entry.path) for entry in inside(folder))
