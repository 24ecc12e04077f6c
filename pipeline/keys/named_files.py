"""Which files the strings of a hook's code name: in one piece, joined from folder and name, or by a pattern."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import canonical
from layerline.pipeline.keys.patterns import has_wildcard, matches, size_and_time
from layerline.pipeline.untrusted import storable

# No data: what Layerline and git keep, and files that the kernel makes up when they are read.
_NO_DATA = (".git", ".layerline", "/dev", "/proc", "/sys")
# So many files of one pattern count by content, any more by name, size and time: hashing millions takes too long.
_MATCHES = 10_000
# Functions that look for files by a pattern, in one folder and in all below it.
_SEARCHES = frozenset({"glob", "glob1", "iglob"})
_DEEP_SEARCHES = frozenset({"fnmatch", "fnmatchcase", "fwalk", "rglob", "walk"})
_FOLDERS = 1_000  # in more of them no file is looked for by a name joined from folder and name
# A choice in a pattern (`*.{csv,txt}`), which some readers of data expand. It counts like a `*`.
_BRACES = re.compile(r"\{[^{}]*,[^{}]*\}")
_NAME_LENGTH = 255


class NamedFiles:
    """The data files of one hook.

    Args:
        root: the project's folder.
        hasher: gives the digests.
        script: called with each Python file that is named; it counts as code.
    """

    def __init__(self, root: Path, hasher: Hasher, script: Callable[[Path], None]) -> None:
        self._root, self._hasher, self._script = root, hasher, script
        self.digests: dict[str, str] = {}  # by the name that keys hold
        self.paths: dict[str, Path] = {}  # where those lie that count by content
        # Where a string may name a file: folders of imported modules ("place"), folders that the code names ("named"),
        # and those that a pattern matches ("matched").
        self._folders = {root: "place"}
        self._searches: set[str] = set()
        self._looked_up: set[tuple[object, ...]] = set()

    def __len__(self) -> int:
        """Grows whenever something new is learnt: the same strings may then name more."""
        return len(self.digests) + len(self._folders) + len(self._searches)

    def add_place(self, folder: Path) -> None:
        """A folder of an imported module, which its code may read files from."""
        self._folders[folder] = "place"

    def add_names(self, names: set[str]) -> None:
        """Names that the code uses: those of functions that search for files matter."""
        self._searches |= names & (_SEARCHES | _DEEP_SEARCHES)

    def named_folders(self) -> list[str]:
        """The folders of the project that the code names."""
        return sorted(self.relative(folder) for folder, kind in self._folders.items() if kind == "named")

    def relative(self, path: Path) -> str:
        """A path as reports and keys hold it: below the project's folder, never absolute."""
        return storable(path.relative_to(self._root).as_posix())

    def look_up(self, text: str) -> None:
        """Counts the files that a string names, from each folder that it may start from."""
        for folder in list(self._folders):
            self._file(folder, text)
            self._pattern(folder, text)

    def count(self, path: Path) -> None:
        """A file's content counts."""
        name = self.relative(path)
        self.digests[name] = self._hasher.file(path)
        self.paths[name] = path

    def _file(self, folder: Path, text: str) -> None:
        """A string that names a file: its content counts. One that names a folder is a place to look for more files."""
        if len(text) > _NAME_LENGTH or not text.strip("./") or not self._is_new("file", folder, text):
            return
        for name in dict.fromkeys((text, text.lstrip("/"))):  # f"{folder}/train.npy" leaves "/train.npy"
            path = Path(os.path.normpath(folder / name))
            if any(path.is_relative_to(p) or p in path.parts for p in _NO_DATA):
                continue
            with suppress(OSError):  # too long for a file's name, or not readable
                if path.is_file():
                    self._data(path)
                elif path.is_dir() and path.is_relative_to(self._root) and self._folders.get(path) != "place":
                    self._folders[path] = "named"

    def _pattern(self, folder: Path, text: str) -> None:
        """A string with wildcards: the files that it matches in the project count, also when they come and go."""
        deep = bool(self._searches & _DEEP_SEARCHES)
        text = _BRACES.sub("*", text).strip("/")  # f"{folder}/*.txt" leaves "/*.txt"
        if not has_wildcard(text) or len(text) > _NAME_LENGTH or not text.isprintable():
            return
        if not self._searches and not text.strip("*?/") and self._folders[folder] == "place":
            return  # as in print("*"): in code that searches for no files, a star alone is no pattern
        if not self._is_new("pattern", folder, text, deep):
            return
        parts = text.split("/")
        if deep and parts[0] != "**":
            parts = ["**", *parts]
        matching_paths = matches(folder, parts, self._root)
        for path in islice(matching_paths, _MATCHES):
            with suppress(OSError):  # deleted meanwhile, or not readable
                if path.is_file() and self.relative(path) not in self.digests:
                    self._data(path)
                elif path.is_dir() and len(self._folders) < _FOLDERS:
                    self._folders.setdefault(path, "matched")
        rest = [(self.relative(path), *size_and_time(path)) for path in matching_paths]
        if rest:
            self.digests[f"{len(rest)} more files that {text} matches"] = canonical.digest(sorted(rest))

    def _data(self, path: Path) -> None:
        if path.is_relative_to(self._root):
            if path.suffix == ".py":
                self._script(path)
            else:
                self.count(path)
            return
        # Outside of the project a path says whose machine this is: only a hash of it is kept.
        place = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
        name = f"{path.name} outside the project ({place[:8]})"
        self.digests[name] = self._hasher.file(path)
        self.paths[name] = path

    def _is_new(self, *lookup: object) -> bool:
        """Whether something is looked up for the first time."""
        is_new = lookup not in self._looked_up
        self._looked_up.add(lookup)
        return is_new
