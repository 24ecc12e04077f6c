"""The content-addressed store: a folder per artifact, published in one rename, never changed, verified when read."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StrictStr, ValidationError

from layerline.pipeline.errors import StageError
from layerline.pipeline.files import entries, own_folder, remove, sync, write_atomic
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import canonical
from layerline.pipeline.records.ledger import Name
from layerline.pipeline.untrusted import is_digest, is_inside, read_json

MANIFEST = "artifact.json"
# What file browsers leave in a folder that somebody looked into; no stage reads these.
_OF_THE_DESKTOP = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


class _Entry(BaseModel):
    sha256: Name
    size: Annotated[int, Field(ge=0)]


class _Manifest(BaseModel):
    """What an artifact.json holds; it may come from anywhere, as all of the state."""

    kind: StrictStr
    digest: Name
    files: dict[str, _Entry]
    side: tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """What a stage left: a folder in the store."""

    kind: str  # what it is ("onnx"), matched against the ports of later stages
    digest: str  # SHA-256 over kind and content, side files left out; the folder's name
    size: int  # bytes of all files
    path: Path


class DamagedError(StageError):
    """An artifact whose files are not what its manifest says; the message names the file and the fault."""


class Store:
    """Artifacts by digest, under one folder, which is made on the first write."""

    def __init__(self, root: Path, hasher: Hasher) -> None:
        self.root, self._hasher = root, hasher

    def seal(self, folder: Path, kind: str, side: frozenset[str] = frozenset()) -> Artifact:
        """Hashes a finished folder, each file read once, and writes its manifest; StageError where it holds a link."""
        inside = sorted(folder.rglob("*"))
        for path in inside:
            if path.is_symlink() or not (path.is_file() or path.is_dir()) or path == folder / MANIFEST:
                what = f"it left {path.relative_to(folder).as_posix()}"
                raise StageError(f"{what}: an artifact holds plain files, and its {MANIFEST} is written for it")
        files = {p.relative_to(folder).as_posix(): p for p in inside if p.is_file()}
        for path in files.values():
            path.chmod(0o444)  # before hashing: it changes the stamp that the hasher remembers
        listed = {n: _Entry(sha256=self._hasher.file(p), size=p.stat().st_size) for n, p in files.items()}
        digest = _digest(kind, listed, side)
        manifest = _Manifest(kind=kind, digest=digest, files=listed, side=tuple(sorted(side & set(listed))))
        for path in inside:
            # On the disk before the manifest says that they are whole.
            sync(path)
        write_atomic(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1, sort_keys=True) + "\n")
        return _artifact(folder, manifest)

    def move_in(self, sealed: Artifact) -> Artifact:
        """Moves a sealed folder into the store in one rename; its old path is gone afterwards.

        Content that is there already, whole, is kept and the sealed folder dropped. The folder must lie on the store's
        file system: it is never copied.
        """
        own_folder(self.root, self.root.parent)
        target = self.root / sealed.digest
        for _ in range(3):
            if target.is_symlink() or (os.path.lexists(target) and not target.is_dir()):
                remove(target)  # no artifact of ours
            try:
                sealed.path.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
            else:
                sync(self.root)
                return dataclasses.replace(sealed, path=target)
            try:
                if present := self.get(sealed.digest):
                    shutil.rmtree(sealed.path)
                    return present
            except DamagedError:
                self.remove(sealed.digest)
        raise OSError(f"could not move {sealed.digest[:12]} in: another process keeps changing {self.root}")

    def sealed(self, folder: Path) -> Artifact | None:
        """The artifact in a folder that was sealed and is still whole, else None."""
        try:
            return self._read(folder)
        except DamagedError:
            return None

    def get(self, digest: str) -> Artifact | None:
        """The artifact, every file checked; None when it isn't there. Raises DamagedError where it is not whole."""
        folder = self.root / digest
        if self.root.is_symlink() or not os.path.lexists(folder):
            return None
        if folder.is_symlink() or not folder.is_dir():
            raise DamagedError("what lies in its place is no folder")
        artifact = self._read(folder)
        if artifact.digest != digest:
            raise DamagedError(f"{MANIFEST} is that of {artifact.digest[:12]}")
        return artifact

    def digests(self) -> Iterator[str]:
        """Every artifact present, damaged ones included."""
        yield from (path.name for path in entries(self.root) if is_digest(path.name))

    def remove(self, digest: str) -> None:
        """Takes an artifact away; readers see all of it or nothing."""
        remove(self.root / digest)

    def _read(self, folder: Path) -> Artifact:
        try:
            manifest = _Manifest.model_validate(read_json(folder / MANIFEST))
        except (OSError, ValidationError, ValueError):
            raise DamagedError(f"{MANIFEST} is damaged or missing") from None
        # The digest is computed anew: a manifest may come from anywhere.
        sound = manifest.digest == _digest(manifest.kind, manifest.files, manifest.side)
        if not sound or not all(map(is_inside, manifest.files)):
            raise DamagedError(f"{MANIFEST} is damaged or missing")
        _refuse_unlisted(folder, manifest.files)
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise DamagedError(f"{name} is missing")
            size = path.stat().st_size
            if size != entry.size:
                raise DamagedError(f"{name} has {size} bytes, not {entry.size}")
            if self._hasher.file(path) != entry.sha256:
                raise DamagedError(f"{name} has changed since it was written")
        return _artifact(folder, manifest)


def _refuse_unlisted(folder: Path, listed: Collection[str]) -> None:
    """Refuses what the manifest does not list: a stage would read a file that somebody added, as floor.json."""
    pending = [folder]
    while pending:
        for path in pending.pop().iterdir():
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                raise DamagedError(f"{name} is a link, expected a plain file")
            if path.is_dir():
                pending.append(path)
            elif name not in listed and name != MANIFEST and path.name not in _OF_THE_DESKTOP:
                raise DamagedError(f"{name} is not listed in its {MANIFEST}")


def _artifact(folder: Path, manifest: _Manifest) -> Artifact:
    size = sum(entry.size for entry in manifest.files.values())
    return Artifact(manifest.kind, manifest.digest, size, folder)


def _digest(kind: str, listed: Mapping[str, _Entry], side: Collection[str]) -> str:
    content = {name: entry.sha256 for name, entry in listed.items() if name not in side}
    return canonical.digest({"kind": kind, "files": content})
