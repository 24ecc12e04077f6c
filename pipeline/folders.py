"""Which folders below a project hold its own files, and which hold what others installed."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

# The package itself: what lies in it is never the user's own code.
_LAYERLINE = Path(__file__).parents[1]
_FOREIGN = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})


def is_own_folder(folder: Path, project: Path) -> bool:
    """Whether a folder holds the project's own modules: below it, and in no environment that lies there."""
    if not folder.is_relative_to(project) or any(folder.is_relative_to(f) for f in (_LAYERLINE, Path(sys.prefix))):
        return False
    return _FOREIGN.isdisjoint(folder.relative_to(project).parts)


def is_foreign_folder(path: Path) -> bool:
    """Whether a folder holds installed packages or compiled code, not the project's own files."""
    with suppress(PermissionError):
        return path.name in _FOREIGN or (path / "pyvenv.cfg").exists()
    return False
