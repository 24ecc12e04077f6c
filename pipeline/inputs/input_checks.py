"""Files that somebody hands over, looked at before anything is built on them: samples, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.untrusted import read_json

Array = npt.NDArray[Any]
_INDEX_BYTES = 1 << 26  # of an index of shards; the largest have some hundred thousand tensors


def check_samples(arrays: Mapping[str, Array], where: str) -> None:
    """Refuses arrays whose first axes don't count the same samples, and the first element that is no finite number."""
    counts = {k: len(a) for k, a in arrays.items() if a.ndim}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"expected equally many samples along every first axis, saw {lengths}", where=where)
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise ConfigError(f"the array holds {array.dtype}, expected numbers", where=f"{where}: {name}")
        # 0 and -inf are added to scores to hide some.
        is_mask = array.dtype.kind == "f" and bool(((array == 0) | np.isneginf(array)).all())
        if array.dtype.kind in "fc" and not is_mask:
            _refuse(array, ~np.isfinite(array), name, where, "a finite number")


def check_answers(array: Array, where: str, name: str) -> None:
    """Refuses one number in place of an answer for each sample."""
    if not array.ndim:
        raise ConfigError(f"{name} is a single number, expected one answer for each sample", where=where)


def checked_cast(array: Array, dtype: npt.DTypeLike, name: str, where: str, rows: Sequence[int] | None = None) -> Array:
    """The array in another type; ConfigError names the first number that the type can't hold.

    `rows` are the numbers of its samples in the whole data, where the array is a part of it.
    """
    wanted = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Array = array.astype(wanted, copy=False)
    if wanted.kind in "fc":
        info = np.finfo(wanted)
        lost = np.isfinite(array) & ~np.isfinite(out)
        _refuse(array, lost, name, where, f"{wanted}, at most {info.max:.4g}", rows)
    elif wanted.kind in "iu" and wanted != array.dtype:
        span = np.iinfo(wanted)
        _refuse(array, out != array, name, where, f"{wanted}, {span.min} to {span.max}", rows)
    return out


def check_checkpoint(path: Path) -> None:
    """Refuses what its first bytes show to be no checkpoint: nothing, an index of shards, text, a git-lfs pointer."""
    with path.open("rb") as file:
        head = file.read(256)
    if not head:
        raise StageError("the file is empty (0 bytes)", where=path.name, hint="save it or download it again")
    if head.startswith(b"version https://git-lfs"):
        raise StageError("a pointer of git-lfs, not the file itself", where=path.name, hint="git lfs pull")
    # No checkpoint is text: a zip, a pickle and safetensors all have control characters among their first bytes.
    if all(c in "\t\r\n" or c.isprintable() for c in head.decode("utf-8", "ignore")) and head[:1] != b"\x80":
        raise _text(path, head)


def _text(path: Path, head: bytes) -> StageError:
    try:
        shards = sorted(set(read_json(path, size=_INDEX_BYTES)["weight_map"].values()))
        first = shards[0]
    except (ValueError, LookupError, TypeError, AttributeError):
        start = " ".join(head.decode("utf-8", "replace").split())
        return StageError(f"it is text, expected a checkpoint; it begins {start[:60]!r}", where=path.name)
    kind = "torch.load(f)"
    if str(first).endswith(".safetensors"):
        kind = "safetensors.torch.load_file(f)"
    files = ", ".join(map(str, shards[:4]))
    if len(shards) > 4:
        files += ", …"
    return StageError(
        f"an index, which says in which file each tensor lies; they lie in {len(shards)} files: {files}",
        where=path.name,
        hint=f"join them: torch.save({{k: t for f in files for k, t in {kind}.items()}}, 'weights.pt')",
    )


def _refuse(
    array: Array,
    bad: npt.NDArray[np.bool_],
    name: str,
    where: str,
    expected: str,
    rows: Sequence[int] | None = None,
) -> None:
    if not bad.any():
        return
    at = np.unravel_index(int(bad.argmax()), bad.shape)
    places = [int(i) for i in at]
    if rows is not None and places:
        places[0] = int(rows[places[0]])
    index = ""
    if places:
        index = f"[{', '.join(map(str, places))}]"
    raise ConfigError(
        f"{name}{index} is {array[at]}, expected {expected}; {int(bad.sum())} of {bad.size} elements are not that",
        where=where,
        hint="leave such samples out, or put right what made them",
    )
