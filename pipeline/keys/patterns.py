"""Which files a pattern matches, as glob and pathlib would: one of `data:`, or a string of the user's code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath

from layerline.pipeline.folders import is_foreign_folder
from layerline.pipeline.untrusted import printable

_KEPT_BY_TOOLS = frozenset({".git", ".layerline"})
FILES = 1_000_000
"""So many files a pattern may match, and so many folders it may go through."""


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

    Nothing outside `project` is matched, nor what git, Layerline or an environment keeps there. `enters` is asked for
    each folder that a wildcard comes across, before it is looked into.
    """
    if not folder.is_relative_to(project):
        return
    if not parts:
        yield folder
        return
    head, rest = parts[0], parts[1:]
    paths = sorted(Path(path) for path, _ in _inside(folder)) if has_wildcard(head) else []
    if head == "**":
        yield from matches(folder, rest or ["*"], project, enters)
        for path in paths:
            if os.path.isdir(path) and enters(path):  # noqa: PTH112 - Path.is_dir raises where it can't look
                yield from matches(path, parts, project, enters)
    elif has_wildcard(head):
        for path in paths:
            if fnmatchcase(path.name, head) and (not rest or (os.path.isdir(path) and enters(path))):  # noqa: PTH112
                yield from matches(path, rest, project, enters)
    else:
        path = Path(os.path.normpath(folder / head))
        if os.path.exists(path) and path.name not in _KEPT_BY_TOOLS:  # noqa: PTH110
            yield from matches(path, rest, project, enters)


def _inside(folder: str | Path) -> list[tuple[str, str]]:
    """What is in a folder, each a "folder", a "file" (or a link to one) or neither; without what tools keep there."""
    kept = []
    with suppress(OSError), os.scandir(folder) as entries:  # OSError: not ours to read
        for entry in entries:
            kind = ""
            with suppress(OSError):  # a link that leads to itself
                if entry.is_dir():
                    kind = "folder"
                elif entry.is_file():
                    kind = "file"
            if entry.name not in _KEPT_BY_TOOLS and not (kind == "folder" and is_foreign_folder(Path(entry.path))):
                kept.append((entry.path, kind))
    return kept


def size_and_time(path: Path) -> tuple[int, int]:
    """In bytes and nanoseconds; zeros for a link that leads nowhere."""
    with suppress(OSError):
        state = path.stat()
        return state.st_size, state.st_mtime_ns
    return 0, 0


def expand(project: Path, pattern: str) -> list[str]:
    """Files that a pattern matches, and all those in a folder that it does; sorted, relative to the project.

    What git, Layerline or an environment keeps is left out. A folder that the pattern names itself may be a link to
    anywhere; one that a wildcard comes across may be a link to another place in the project only, else a ValueError.
    """
    parts = PurePosixPath(pattern).parts
    if any("**" in part and part != "**" for part in parts):
        raise ValueError("'**' can only be a whole part of a path")
    plain = list(takewhile(lambda part: not has_wildcard(part), parts))
    if parts[len(plain) :] in (("**",), ("**", "*")):  # all there is in the folder, which one look at each part finds
        parts = tuple(plain)
    named = project.joinpath(*plain)
    walk = _Walk(project, named)
    files: set[str] = set()
    try:
        for match in matches(project, parts, project, walk.enters):
            for path in walk.files(match):
                files.add(path)
                if len(files) > FILES:
                    raise ValueError(f"more than {FILES} files match")
    except RecursionError:
        raise ValueError("its folders lie too deep in each other") from None
    return sorted(os.path.relpath(path, project).replace(os.sep, "/") for path in files)


class _Walk:
    """Which folders of a project are gone through; `named` is what a pattern names before its first wildcard."""

    def __init__(self, project: Path, named: Path) -> None:
        self._project, self._named, self._entered = project, named, 0
        self._walked: set[Path] = set()
        self._allowed = [project.resolve(), named.resolve()]
        if named != project and self._allowed[0].is_relative_to(self._allowed[1]):
            raise ValueError(f"it leads to {self._allowed[1]}, which holds the project itself")

    def files(self, match: Path) -> Iterator[str]:
        """The match, or all files in it; none where it lies in an earlier match."""
        if not self._walked.isdisjoint(match.parents):
            return
        pending: list[str] = []
        if match.is_file():
            yield str(match)
        elif match.is_dir() and (match == self._named or self.enters(match)):
            self._walked.add(match)
            pending.append(str(match))
        while pending:
            for path, kind in _inside(pending.pop()):
                if kind == "file":
                    yield path
                elif kind and self.enters(Path(path)):
                    pending.append(path)

    def enters(self, folder: Path) -> bool:
        """Whether to look into a folder that a wildcard came across; not where it leads back."""
        self._entered += 1
        if self._entered > FILES:
            raise ValueError(f"it goes through more than {FILES} folders")
        if not folder.is_symlink():
            return True
        target = folder.resolve()
        if not any(target.is_relative_to(place) for place in self._allowed):
            name = printable(folder.relative_to(self._project).as_posix(), 80)
            raise ValueError(f"{name!r} is a link to {target}, out of the project: name it itself, or match less")
        return not any(parent.resolve().is_relative_to(target) for parent in folder.parents)
