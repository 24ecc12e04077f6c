"""safetensors files, written and read in one pass: same content, same bytes; a damaged file is known by its checksum.

The format is the public one (header length, JSON header, raw tensors). Written here because the library's writer copies
every tensor first and orders metadata at random; the checksum lives in the one metadata entry.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from layerline.pipeline.errors import StageError, Unavailable
from layerline.pipeline.files import sync

_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
ENTRY = "layerline"
_NO_CRC = b"00000000"
_BLOCK = 4096


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Writes atomically: a temporary file beside `path`, fsync, rename.

    Tensors that share memory are each written out; leave a tied one out and record its alias in `meta`.

    Raises:
        StageError: a dtype that the format has not.
        Unavailable: the disk is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            _write(file, tensors, meta or {})
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise Unavailable(f"cannot write: {error.strerror}", where=str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name (on the CPU, private mappings of the file) and the metadata entry.

    Raises:
        StageError: missing, not this format, cut short, or its content does not match its checksum.
    """
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            text = file.read(start - 8) if start <= total else b""
    except OSError as error:
        raise StageError(f"cannot read: {error.strerror}", where=str(path)) from error
    try:
        header: dict[str, Any] = json.loads(text)
        stored: dict[str, str] = header.pop("__metadata__", {})
        meta: dict[str, Any] = json.loads(stored.get(ENTRY, "{}"))
        # Ours even where the damage is in one of the two words that say so.
        ours = ENTRY in stored or any("crc32" in value for value in stored.values())
        spans = {n: slice(start + e["data_offsets"][0], start + e["data_offsets"][1]) for n, e in header.items()}
        end = max((s.stop for s in spans.values()), default=start)
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise StageError("not a safetensors file, or its header is damaged", where=path.name) from error
    if end != total:
        raise StageError(f"cut short: {total} bytes of {end}", where=path.name)
    raw = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)
    order = sorted(spans, key=lambda n: (spans[n].start, spans[n].stop))
    crc = str(meta.pop("crc32", ""))
    contents = (raw[spans[n]] for n in order)
    if ours and (not crc or crc != _checksum(text.replace(crc.encode(), _NO_CRC, 1), contents)):
        raise StageError("damaged: the content does not match its checksum", where=path.name)
    tensors = {n: _tensor(raw[spans[n]], header[n], f"{path.name}: {n}") for n in order}
    return tensors, meta


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    entries: dict[str, Any] = {}
    # Widest type first, so that every tensor starts at a multiple of its own item size.
    order = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise StageError(f"{tensor.dtype} cannot be stored", where=name)
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"crc32": _NO_CRC.decode(), **meta}, separators=(",", ":"), allow_nan=False)
    header = json.dumps({"__metadata__": {ENTRY: text}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    contents = [tensors[n].detach().cpu().contiguous() for n in order]
    crc = _checksum(header, contents).encode()
    file.write(len(header).to_bytes(8, "little") + header.replace(_NO_CRC, crc, 1))
    for tensor in contents:
        file.write(raw_bytes(tensor))


def _checksum(header: bytes, contents: Iterable[Tensor]) -> str:
    """CRC-32 of the header (its own place zeroed) and, for each tensor, of the sums of its 4 KiB blocks as 64-bit
    words: any changed bit shows, at the speed of memory."""
    crc = zlib.crc32(header)
    for tensor in contents:
        data = np.frombuffer(raw_bytes(tensor), np.uint8)
        whole = len(data) // _BLOCK * _BLOCK
        sums = data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(1, dtype=np.uint64)
        crc = zlib.crc32(data[whole:].tobytes(), zlib.crc32(sums.tobytes(), crc))
    return f"{crc:08x}"


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's content in row-major order; no copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _tensor(content: Tensor, entry: Mapping[str, Any], where: str) -> Tensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise StageError(f"type {entry['dtype']} is not known", where=where)
    if not content.numel():
        return torch.empty(entry["shape"], dtype=dtype)
    if content.data_ptr() % dtype.itemsize:  # another writer's file: torch needs aligned memory
        content = content.clone()
    return content.view(dtype).reshape(entry["shape"])
