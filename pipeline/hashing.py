"""Hashes files, and remembers the result for as long as the file system shows that a file is untouched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerline.pipeline.files import write_own
from layerline.pipeline.untrusted import is_digest, open_file, read_json

if sys.platform == "linux":
    import fcntl

_CHUNK = 1 << 20
_MEMO_ENTRIES = 4096
# A file changed this recently may change again within one tick of the file system's clock, unseen by its stamp.
_SETTLED_NS = 2_000_000_000


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read once in constant memory."""
    state = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=open_file) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()


def copied(source: Path, target: Path) -> str:
    """Copies a file's bytes; SHA-256 in hex of what was copied, read once."""
    state = hashlib.sha256()
    with open(source, "rb", buffering=0, opener=open_file) as original, target.open("wb") as copy:
        while chunk := original.read(_CHUNK):
            state.update(chunk)
            copy.write(chunk)
    return state.hexdigest()


def is_open_for_writing(path: Path) -> bool:
    """Whether some process can write to a file, a writable memory map included: its stamp doesn't show every change.

    False where the system can't tell: on Windows and macOS, on some network file systems, for files of another user.
    """
    if sys.platform != "linux":
        return False
    descriptor = open_file(str(path), os.O_RDONLY)
    try:
        # A lease for reading is refused while anyone has the file open for writing. Who opens it in the instant that
        # we hold one waits, and the signal that tells us so is one that is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True)
class HashedFile:
    """A file as it was when it was hashed."""

    stamp: str  # what the file system said; empty where it changed meanwhile
    digest: str  # SHA-256 of the bytes that were read
    settled: bool  # whether any change from then on shows in the stamp


class Hasher:
    """Hashes files and remembers the result for as long as the file system says that the file is untouched.

    The stamp is device, inode, size, mtime and ctime. ctime is what makes it sound: no program can set it, so a byte
    changed under an unchanged size and mtime is still seen. A copied or touched file only costs one more read. Where
    ctime is the time of creation (Windows), for a file changed a moment ago, and for one that is open for writing (a
    memory map changes a page without a trace once it has changed it before), nothing is remembered.

    Args:
        memo: where results are kept between processes; losing it costs time, never correctness. None keeps none.
    """

    def __init__(self, memo: Path | None) -> None:
        self._path = memo
        self._old: dict[str, str] = {}
        self._used: dict[str, str] = {}
        self._hashed: dict[Path, HashedFile] = {}
        if memo is None:
            return
        with suppress(OSError, ValueError):  # absent or torn: start from nothing
            loaded = read_json(memo)
            if isinstance(loaded, dict):
                self._old = {k: v for k, v in loaded.items() if isinstance(v, str)}

    def file(self, path: Path) -> str:
        """SHA-256 of the file's bytes, in hex."""
        before, settled = _stamp(path)
        value = self._used.get(before, self._old.get(before))
        if value is None or not settled or not is_digest(value):
            value = sha256(path)
            if _stamp(path)[0] != before:  # it is being written
                before, settled = "", False
        if settled:
            self._used[before] = value
        hashed = self._hashed.get(path)
        if hashed is None or hashed.digest != value:
            self._hashed[path] = HashedFile(before, value, settled)
        return value

    def changed(self, path: Path) -> str:
        """What happened to a file since `file` first gave its digest, in words; empty where nothing did.

        One that was replaced and put back has changed: its bytes are the same, its inode or ctime is not.
        """
        hashed = self._hashed.get(path)
        if hashed is None:
            return ""
        try:
            now, settled = _stamp(path)
            if not hashed.stamp:
                return "was being written when it was read"
            # The stamp doesn't show everything of a file that somebody can write to.
            if (now != hashed.stamp or not hashed.settled or not settled) and sha256(path) != hashed.digest:
                return "was changed"
        except OSError:
            return "was removed"
        if now != hashed.stamp:
            return "was replaced, touched or put back"
        return ""

    def recall(self, name: str, compute: Callable[[], str]) -> str:
        """A text that costs time to compute, from the memo where it is there."""
        if name not in self._used:
            self._used[name] = self._old.get(name) or compute()
        return self._used[name]

    def save(self) -> None:
        """Writes the memo for the next process: the entries that this process used, and the newest of the others."""
        if self._path is None or self._used.keys() <= self._old.keys():
            return
        others = [(stamp, value) for stamp, value in self._old.items() if stamp not in self._used]
        kept = dict(others[-_MEMO_ENTRIES:]) | self._used
        with suppress(OSError):  # a read-only project is still a usable one
            write_own(self._path, json.dumps(kept), self._path.parent.parent, durable=False)
            self._old = kept


def _stamp(path: Path) -> tuple[str, bool]:
    """What changes whenever the file does, and whether that holds of any change from now on."""
    now, s = time.time_ns(), path.stat()
    # A clock that was set back makes a file younger than now; such a file may change again in the same tick as well.
    settled = os.name != "nt" and now - s.st_ctime_ns > _SETTLED_NS and not is_open_for_writing(path)
    return f"{s.st_dev}.{s.st_ino}.{s.st_size}.{s.st_mtime_ns}.{s.st_ctime_ns}", settled
