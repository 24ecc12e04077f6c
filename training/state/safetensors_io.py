"""safetensors files: written atomically, with a checksum, and read without a memory map. The safetensors library writes
and parses the format. Our files hold one metadata entry, a JSON text: the caller's metadata with a checksum over it and
over every tensor, so that a damaged checkpoint is refused."""

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
from layerline.training.model.tensor_forms import check_dense

ENTRY = "layerline"
_SUM = "checksum"
_BLOCK = 4096


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Writes atomically: a temporary file beside `path`, fsync, rename. The same content gives the same bytes. Tensors
    that share memory are written out each."""
    # The specifications hold addresses only: this dict keeps the memory alive until the file is written.
    contents: dict[str, Tensor] = {}
    for name in sorted(tensors):
        check_dense(name, tensors[name])
        contents[name] = tensors[name].detach().cpu().contiguous()
    specs: dict[str, TensorSpec] = {}
    for name, tensor in contents.items():
        dtype, address = str(tensor.dtype).removeprefix("torch."), tensor.data_ptr()
        try:
            specs[name] = TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=address, data_len=tensor.nbytes)
        except (SafetensorError, ValueError, TypeError) as error:
            raise StageError(f"{tensor.dtype} cannot be stored in a safetensors file ({error})", where=name) from error
    entry = dict(meta or {})
    entry[_SUM] = _checksum(entry, contents)
    text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        serialize_file(specs, temporary, metadata={ENTRY: text})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:  # the library raises its own for a full disk or a read-only folder
        raise Unavailable(f"cannot write: {getattr(error, 'strerror', error)}", where=str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, on the CPU, and the metadata entry; empty for a file that is not ours."""
    if not path.is_file():
        raise StageError("cannot read: a folder" if path.is_dir() else "cannot read: missing", where=str(path))
    try:
        # "pread" gives each tensor its own memory. A memory map would stay whole as long as any tensor is alive.
        with safe_open(str(path), "pt", backend="pread") as file:
            stored: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = file.get_tensors()
    except MemoryError as error:
        raise Unavailable(f"{path.stat().st_size} bytes do not fit into memory", where=path.name) from error
    except Exception as error:  # the library raises many types on a file that it can't parse
        reason = str(error).partition("\n")[0]
        raise StageError(f"not a readable safetensors file ({reason})", where=path.name) from error
    # A damaged file must not pass as someone else's, which has no checksum: either of two words marks it as ours.
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


def _checksum(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 over the metadata, then the name, type, shape and content of each tensor, sorted by name. Of the content
    it is that of the sums of 4 KiB blocks read as 64-bit words: any changed bit shows."""
    text = json.dumps(meta, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}".encode(), crc)
        data = np.frombuffer(raw_bytes(tensor), np.uint8)
        whole = len(data) // _BLOCK * _BLOCK
        sums = data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(1, dtype=np.uint64)
        crc = zlib.crc32(data[whole:].tobytes(), zlib.crc32(sums.tobytes(), crc))
    return f"{crc:08x}"


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's content in row-major order; not a copy where the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)
