"""The state folder of a project. It may be a link to a folder on another disk, which then is this project's alone.

A link may also come with somebody else's project and lead to the user's own files. So it is followed only to a folder
that holds nothing but a state, and `pipe gc` removes nothing whose name has not the form that Layerline gives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs.untrusted import printable, read_bytes

_IGNORE, _OWNER = ".gitignore", "project"
_FOLDERS = frozenset({"cache", "ledger", "running", "store", "work"})
_PARTIAL = re.compile(r"\..+\.\d+\.\d{6,}")
_PROJECTS = (".git", "pipe.yaml")


def claim(state: Path) -> None:
    """Makes a project's state folder and keeps it out of the project's git; a linked one notes down its project."""
    state.mkdir(parents=True, exist_ok=True)
    ignore = state / _IGNORE
    if not os.path.lexists(ignore):  # a link that leads nowhere is not followed
        ignore.write_text("*\n", "utf-8")
    owner = state / _OWNER
    if state.is_symlink() and not os.path.lexists(owner):
        owner.write_text(os.path.realpath(state.parent), "utf-8")


def is_partial(name: str) -> bool:
    """Whether a name is that of a file that a process which was killed had written so far."""
    return _PARTIAL.fullmatch(name) is not None


def check_link(state: Path) -> None:
    """Refuses a link in the place of the state that leads to anything but a state folder of this project.

    Raises:
        ConfigError: says where it leads, and why nothing is written there.
    """
    if not state.is_symlink():
        return
    problem = _problem(state, Path(os.path.realpath(state)))
    if problem:
        target = printable(str(state.readlink()), 200)
        raise ConfigError(
            f"it is a link to '{target}', {problem}, so layerline writes and removes nothing there",
            where=state.name,
            hint="link it to an empty folder of your own outside of any project, or remove the link",
        )


def _problem(state: Path, target: Path) -> str:
    """Why a folder is no state folder for this project; empty where it is one."""
    if not target.is_dir():
        return "which is no folder"
    if os.name != "nt" and target.stat().st_uid != os.getuid():
        return "a folder of another user"
    for folder in (target, *target.parents):
        for name in _PROJECTS:
            if os.path.lexists(folder / name):
                return f"which lies in the project {printable(str(folder), 200)}"
    entries = sorted(target.iterdir())
    if entries and not _is_claimed(target):
        return f"which holds files that are not layerline's ({printable(entries[0].name, 80)!r})"
    for path in entries:
        is_own = path.name in (_IGNORE, _OWNER) or is_partial(path.name)
        if not is_own and not (path.name in _FOLDERS and path.is_dir() and not path.is_symlink()):
            return f"which holds files that are not layerline's ({printable(path.name, 80)!r})"
    owner = _text(target / _OWNER)
    if owner not in ("", os.path.realpath(state.parent)):
        return f"the state of {printable(owner, 200)} (if that project was moved here, remove {_OWNER!r} there)"
    return ""


def _is_claimed(folder: Path) -> bool:
    return _text(folder / _IGNORE) == "*\n"


def _text(path: Path) -> str:
    """A file's text; empty where there is none that could be ours."""
    try:
        return read_bytes(path, 1 << 16).decode()
    except (OSError, ValueError):
        return ""
