"""New files of a project: all of them or none, never over a file that is there, never through a link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs.untrusted import check_utf8


def write(folder: Path, contents: Mapping[Path, bytes | Path]) -> list[Path]:
    """Writes a project's files, and gives their paths; on any failure, Ctrl-C too, what was made is taken away again.

    `contents` are bytes, or the file to copy: onnx takes linked data files for an attack.

    Raises:
        ConfigError: a file is there already, or a link or a file is in the way; nothing is written.
    """
    targets = {folder / name: content for name, content in contents.items()}
    _check(folder, list(targets))
    made: list[Path] = []
    try:
        for target, content in targets.items():
            _make_folder(target.parent, made)
            made.append(target)
            _put(target, content, made)
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # someone else has put a file there by now: that stays
                path.rmdir() if path.is_dir() else path.unlink()
        raise
    return list(targets)


def check_folder(folder: Path) -> None:
    """Refuses a project's folder, or one in it, that is a link or a file. Raises ConfigError: it is one."""
    if folder.is_symlink():
        raise ConfigError(
            f"it is a link to {folder.readlink()}, and new projects are not written through links",
            where=str(folder),
            hint="name the folder that it leads to, or another",
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    check_utf8(folder)


def _check(folder: Path, targets: list[Path]) -> None:
    for path in sorted({p for t in targets for p in t.parents if p == folder or folder in p.parents}):
        check_folder(path)
    for path in targets:
        if os.path.lexists(path):
            raise ConfigError("it is there already", where=str(path), hint="choose another folder; nothing was written")


def _make_folder(folder: Path, made: list[Path]) -> None:
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir()
        made.append(path)


def _put(target: Path, content: bytes | Path, made: list[Path]) -> None:
    try:
        file = target.open("xb")  # refuses whatever has come to lie there since it was looked at, a link too
    except FileExistsError:
        made.remove(target)
        raise ConfigError("it is there already", where=str(target), hint="choose another folder") from None
    with file:
        if isinstance(content, bytes):
            file.write(content)
            return
        with content.open("rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
