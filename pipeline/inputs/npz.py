"""Arrays of an .npz file from outside: what it declares is held against what is there before numpy takes memory."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt
from numpy.lib import format as npy

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.untrusted import is_text, printable

Array = npt.NDArray[Any]
ENTRIES = 10_000
AXES = 32
"""numpy before 2.0 takes no more."""
UNPACKED = 1 << 30
"""Bytes that any file may unpack to; a larger file may unpack to `RATIO` times its own size."""
RATIO = 50
_MAGIC = b"\x93NUMPY"


def read(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file, by name; ConfigError where it is none, or declares more than it holds."""
    where = printable(path.name)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            raise ConfigError(
                "a single array (.npy), expected an .npz with one array per input",
                where=where,
                hint="save it with its input's name: np.savez(file, input=array)",
            )
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                return dict(_arrays(archive, path.stat().st_size, where))
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds on damaged files
            message = printable(" ".join(str(error).split()), 200)
            raise ConfigError(f"not an .npz file of plain arrays ({message})", where=where) from error


def _arrays(archive: zipfile.ZipFile, size: int, where: str) -> Iterator[tuple[str, Array]]:
    entries = archive.infolist()
    if len(entries) > ENTRIES:
        raise ConfigError(f"it holds {len(entries)} arrays, expected at most {ENTRIES}", where=where)
    # A zip of a few kilobytes can unpack to terabytes.
    unpacked, allowed = sum(e.file_size for e in entries), max(UNPACKED, RATIO * size)
    if unpacked > allowed:
        raise ConfigError(
            f"a file of {size / 1e6:.0f} MB that unpacks to {unpacked / 1e9:.1f} GB, expected at most "
            f"{allowed / 1e9:.1f} GB",
            where=where,
            hint="save it uncompressed, with np.savez, if that is its real size",
        )
    names: set[str] = set()
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        place = f"{where}: {printable(name, 80)}"
        if not is_text(name) or not name or not entry.filename.endswith(".npy"):
            raise ConfigError("expected an array with a printable name", where=place)
        if name in names:
            raise ConfigError("two arrays of this name", where=place)
        names.add(name)
        with archive.open(entry) as stored:
            # Read twice: numpy takes the memory that the header declares, before it reads a byte of the data.
            check_header(stored, entry.file_size, place)
        with archive.open(entry) as stored:
            array: Array = npy.read_array(stored, allow_pickle=False)
            yield name, array


def check_header(file: IO[bytes], size: int, where: str) -> None:
    """Refuses the header of an .npy, read from its first byte, whose array is not what its `size` bytes hold."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ConfigError(f"it is of .npy format {version}, expected 1.0, 2.0 or 3.0", where=where)
    # Formats 2 and 3 differ in the header's encoding alone, which numpy's reader of 2 takes from latin-1.
    read = npy.read_array_header_2_0
    if version == (1, 0):
        read = npy.read_array_header_1_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ConfigError("it holds Python objects, expected numbers", where=where)
    if len(shape) > AXES or any(n < 0 for n in shape):
        raise ConfigError(f"its shape is {printable(str(shape), 80)}, expected at most {AXES} sizes", where=where)
    expected = math.prod(shape) * dtype.itemsize
    stored = size - file.tell()
    if expected != stored:
        sizes = printable(str(tuple(shape)), 80)
        needed = "more than 10^15"
        if expected < 10**15:  # Python itself refuses to print thousands of digits
            needed = str(expected)
        raise ConfigError(f"its shape {sizes} of {dtype} takes {needed} bytes, it has {stored}", where=where)
