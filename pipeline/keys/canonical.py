"""One canonical encoding of plain values, so that a key is the same in every process, on every day, in every folder.

Every value is written as a one-letter type tag, a length and its bytes, so no two values share an encoding:

- `1`, `1.0`, `True` and `"1"` are four different values; `None` is a fifth.
- `0.0` and `-0.0` differ (dividing by them does); every NaN is the same NaN.
- A list and a tuple with the same items are the same: YAML knows only one of them.
- Sets and mappings are ordered by the encoding of their items: iteration order never matters.
- A dataclass or pydantic model is its class name and its fields; an enum member its class name and value.
- An array or a numpy scalar is its dtype, shape and bytes (little-endian, C order).
- A path is its POSIX form and must be relative: nothing absolute belongs in a key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from pathlib import PurePath
from typing import Any


def digest(value: Any) -> str:
    """SHA-256 of the canonical encoding, in hex."""
    return hashlib.sha256(encode(value)).hexdigest()


def encode(value: Any) -> bytes:
    """The canonical encoding; TypeError names the type of a value that has none, ValueError an absolute path."""
    if isinstance(value, Enum):
        return _tagged(b"e", encode(type(value).__name__) + encode(value.value))
    if value is None or isinstance(value, bool | int | float | str | bytes | PurePath):
        return _scalar(value)
    if isinstance(value, list | tuple):
        return _tagged(b"l", b"".join(map(encode, value)))
    if isinstance(value, Set):
        return _tagged(b"S", b"".join(sorted(map(encode, value))))
    if isinstance(value, Mapping):
        return _tagged(b"m", _sorted_pairs(value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return _tagged(b"o", encode(type(value).__name__) + _sorted_pairs(fields))
    if hasattr(type(value), "model_fields"):  # a pydantic model, without importing pydantic here
        fields = ((name, getattr(value, name)) for name in type(value).model_fields)
        return _tagged(b"o", encode(type(value).__name__) + _sorted_pairs(fields))
    if hasattr(value, "__array_interface__"):  # a numpy array or scalar, without importing numpy here
        return _array(value)
    raise TypeError(f"{type(value).__qualname__} has no canonical form: {value!r:.80}")


def _scalar(value: bool | float | str | bytes | PurePath | None) -> bytes:
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"t", str(int(value)).encode())
    if isinstance(value, int):
        return _tagged(b"i", f"{int(value):x}".encode())
    if isinstance(value, float):
        if math.isnan(value):
            return _tagged(b"f", b"nan")
        return _tagged(b"f", struct.pack(">d", value))
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"b", value)
    if value.is_absolute():
        raise ValueError(f"an absolute path has no place in a key: {value}")
    return _tagged(b"p", value.as_posix().encode("utf-8", "surrogateescape"))


def _array(value: Any) -> bytes:
    # Objects are addresses; records and long doubles have padding bytes, which can hold anything.
    if value.dtype.hasobject or value.dtype.names or value.dtype.char in "gG":
        raise TypeError(f"an array of {value.dtype} has no canonical form")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return _tagged(b"a", encode(value.dtype.name) + encode(value.shape) + encode(little.tobytes(order="C")))


def _sorted_pairs(pairs: Iterable[tuple[Any, Any]]) -> bytes:
    encoded = sorted((encode(key), encode(value)) for key, value in pairs)
    return b"".join(key + value for key, value in encoded)


def _tagged(tag: bytes, body: bytes) -> bytes:
    return tag + str(len(body)).encode() + b":" + body
