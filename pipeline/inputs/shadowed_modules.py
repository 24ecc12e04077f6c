"""Modules of a project never take the place of Python's own, or of the packages that Layerline itself imports.

The project's folder comes first on the import path, so that `import nets` means the file beside task.py whatever is
installed. A file `queue.py` or `onnx.py` there would also be imported by torch and by Layerline, in place of what they
need: for those names the installed module stays the one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from layerline.pipeline.keys.imports import is_own_folder

_OURS = "layerline"
_DISTRIBUTION = re.compile(r"[A-Za-z0-9._-]+")


class Guard(MetaPathFinder):
    """Looks at every top-level import before the import path does.

    Attributes:
        hidden: files of the project that are not imported, since an installed module has their name.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.hidden: set[Path] = set()

    def protect(self, folder: Path) -> None:
        """Guards against the modules of a project's folder from now on, and no longer against those of another."""
        self._folder, self.hidden = folder, set()
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002  the protocol's
    ) -> ModuleSpec | None:
        """The installed module where the project has one of its name that must not hide it; else None."""
        if path is not None or self._folder is None:
            return None
        own = PathFinder.find_spec(fullname, [str(self._folder)])
        if own is None or own.loader is None or own.origin is None:  # none, or a folder that hides nothing
            return None
        installed = PathFinder.find_spec(fullname, [e for e in sys.path if not self._is_own(e)])
        if installed is None or installed.loader is None:
            return None
        if fullname not in sys.stdlib_module_names and fullname not in _needed():
            return None
        self.hidden.add(Path(own.origin))
        return installed

    def _is_own(self, entry: str) -> bool:
        assert self._folder is not None
        return is_own_folder(Path(entry or ".").resolve(), self._folder)


GUARD = Guard()


@cache
def _needed() -> frozenset[str]:
    """Top-level modules of Layerline's distribution, of what it requires, and of what that requires."""
    wanted, pending = {_OURS}, [_OURS]
    while pending:
        name = pending.pop()
        for requirement in _requirements(name):
            needed = _normal(requirement)
            optional = "extra" in requirement.partition(";")[2]
            if needed not in wanted and (name == _OURS or not optional):
                wanted.add(needed)
                pending.append(needed)
    modules = {_OURS}
    for module, owners in metadata.packages_distributions().items():
        if not wanted.isdisjoint(map(_normal, owners)):
            modules.add(module)
    return frozenset(modules)


def _requirements(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # required on another platform, or for an extra that is not installed
        return []


def _normal(requirement: str) -> str:
    name = _DISTRIBUTION.match(requirement)
    if name is None:
        return ""
    return re.sub(r"[-_.]+", "-", name[0]).lower()
