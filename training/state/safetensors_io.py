"""safetensors files: written atomically, with a checksum, and read into memory of their own.

The safetensors library writes and parses the format. A file of ours holds one metadata entry of its own: a JSON text
with what the caller notes down and a checksum over it and over every tensor, so that a damaged checkpoint is refused.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from layerline.pipeline.errors import StageError, Unavailable
from layerline.pipeline.files import sync

ENTRY = "layerline"
_SUM = "checksum"
_BLOCK = 4096


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Writes atomically: a temporary file beside `path`, fsync, rename. The same content gives the same bytes.

    Tensors that share memory are each written out; leave a tied one out and record its alias in `meta`. A contiguous
    tensor on the CPU is not copied.

    Raises:
        StageError: a dtype that the format has not, a sparse tensor, or one on the meta device.
        Unavailable: the disk is full or cannot be written.
    """
    # The specifications below hold addresses: this keeps what lies there alive until the file is written.
    contents = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    specs = {name: _spec(name, tensor) for name, tensor in contents.items()}
    noted = dict(meta or {})
    noted[_SUM] = _checksum(noted, contents)
    text = json.dumps(noted, separators=(",", ":"), allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, specs, text)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise Unavailable(f"cannot write: {error.strerror}", where=str(path)) from error
    except SafetensorError as error:  # the library's word for a full disk or a folder that can't be written
        raise Unavailable(f"cannot write: {error}", where=str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, on the CPU, each in memory of its own, and the metadata entry.

    Raises:
        StageError: missing, refused by the safetensors library, or its content does not match its checksum.
    """
    if not path.is_file():
        what = "a folder" if path.is_dir() else "missing"
        raise StageError(f"cannot read: {what}", where=str(path))
    try:
        # "pread" reads each tensor into memory of its own; a memory map would stay whole as long as one of them.
        with safe_open(str(path), "pt", backend="pread") as file:
            stored: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = file.get_tensors()
    except MemoryError as error:
        raise Unavailable(f"{path.stat().st_size} bytes do not fit into memory", where=path.name) from error
    except Exception as error:  # whatever the library says of a file that it can't read
        reason = str(error).partition("\n")[0]
        raise StageError(f"not a readable safetensors file ({reason})", where=path.name) from error
    # Ours even where the damage is in one of the two words that say so.
    ours = ENTRY in stored or any(f'"{_SUM}"' in text for text in stored.values())
    if not ours:
        return tensors, {}
    try:
        meta: dict[str, Any] = json.loads(stored.get(ENTRY, "{}"))
        written = meta.pop(_SUM, "")
        sound = written == _checksum(meta, tensors)
    except (ValueError, AttributeError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise StageError("damaged: the content does not match its checksum", where=path.name)
    return tensors, meta


def _write(path: Path, specs: dict[str, TensorSpec], text: str) -> None:
    serialize_file(specs, path, metadata={ENTRY: text})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor in row-major order on the CPU."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the meta device, without numbers" if tensor.is_meta else f"of layout {tensor.layout}"
        raise StageError(f"a tensor {kind} cannot be stored", where=name)
    return tensor.detach().cpu().contiguous()


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
    except (SafetensorError, ValueError, TypeError) as error:
        raise StageError(f"{tensor.dtype} cannot be stored in a safetensors file ({error})", where=name) from error


def _checksum(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 over the metadata and each tensor's name, type, shape and content, in the order of the names."""
    text = json.dumps(meta, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}".encode(), crc)
        crc = _content_crc(tensor, crc)
    return f"{crc:08x}"


def _content_crc(tensor: Tensor, crc: int) -> int:
    """CRC-32 of the sums of 4 KiB blocks as 64-bit words: any changed bit shows, at the speed of memory."""
    data = np.frombuffer(raw_bytes(tensor), np.uint8)
    whole = len(data) // _BLOCK * _BLOCK
    sums = data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(1, dtype=np.uint64)
    return zlib.crc32(data[whole:].tobytes(), zlib.crc32(sums.tobytes(), crc))


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's content in row-major order; no copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
