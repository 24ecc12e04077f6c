"""The files that `data:` names: patterns expanded inside of the project, in bounded time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path, PurePosixPath

from layerline.pipeline.inputs.untrusted import printable
from layerline.pipeline.keys.patterns import has_wildcard, inside, is_file, is_folder, matches

FILES = 1_000_000
"""So many files a pattern may match, and so many folders it may go through."""


def expand(project: Path, pattern: str) -> list[str]:
    """Files that a pattern matches, and all those in a folder that it does; sorted, relative to the project.

    What git, Layerline or an environment keeps is left out. A folder that the pattern names itself may be a link to
    anywhere; one that a wildcard comes across may be a link to another place in the project only.

    Raises:
        ValueError: the pattern is none, comes across a link that leads out of the project, or matches too much.
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
    """Which folders are gone through.

    Args:
        project: its folder.
        named: the folder that a pattern names before its first wildcard.
    """

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
        if match.is_file():
            yield str(match)
        elif match.is_dir() and (match == self._named or self.enters(match)):
            self._walked.add(match)
            yield from self._below(match)

    def _below(self, folder: Path) -> Iterator[str]:
        pending = [str(folder)]
        while pending:
            for entry in inside(pending.pop()):
                if is_file(entry):
                    yield entry.path
                elif is_folder(entry) and self.enters(Path(entry.path)):
                    pending.append(entry.path)

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
