"""Reads a checkpoint file of any trainer: safetensors files and pickles, which run no code unless they are trusted."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from layerline.pipeline.errors import StageError
from layerline.pipeline.inputs.input_checks import check_checkpoint
from layerline.training.model import tensor_forms
from layerline.training.state import checkpoint, lane_checkpoint, safetensors_io

_SHOWN = 8
_ADVICE = re.compile(r"In PyTorch 2\.6.*?trusted source\.|Please use `torch\.serialization.*", re.DOTALL)


def read(path: Path, *, trust: bool) -> tuple[Any, tuple[str, ...]]:
    """Reads a file: mappings, lists and modules with tensors as leaves; and notes for the report. With `trust` a
    pickle may run code where it needs to; otherwise the error names the classes that it would create."""
    check_checkpoint(path)
    if path.suffix == checkpoint.SUFFIX:
        stored, meta = safetensors_io.load(path)
        tensors = tensor_forms.from_file(stored, meta)
        if "lanes" not in meta:
            return tensors, ()
        models: dict[str, Any] = {}
        for name in meta["lanes"]:
            online, averages = lane_checkpoint.of_model(tensors, meta, name)
            models[name] = {"online": online, "ema": averages}
        return models.get("", models), ()  # a model that is the only one has the empty name
    _refuse_packed(path)
    try:
        return _load(path, weights_only=True), ()
    except Exception as error:
        if not trust:
            raise _refusal(path, error) from error
    try:
        return _load(path, weights_only=False), (f"unpickled {path.name} as trusted code",)
    except Exception as error:
        raise StageError(f"torch can't read it: {type(error).__name__}: {error}", where=path.name) from error


def _refuse_packed(path: Path) -> None:
    """Refuses a zip bomb before any of it is unpacked: torch.save never compresses, so a real file can't grow."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # not an archive, or a damaged one, for which torch has a message
    size = path.stat().st_size
    if unpacked > size:
        what = f"its entries unpack to {unpacked} bytes, but the file has {size} bytes; torch.save never compresses"
        raise StageError(what, where=path.name, hint="if you trust it, load it and save it again with torch.save")


def _load(path: Path, *, weights_only: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on other ways to load, which the user can't choose here
        return torch.load(path, map_location="cpu", weights_only=weights_only)


def _refusal(path: Path, error: Exception) -> StageError:
    """Why a file can't be read without running the code that is pickled in it, or can't be read at all."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception as reason:  # noqa: BLE001 - torch raises many types on a file that it can't parse
        unsafe = []
        if "torchscript" in str(reason).lower():
            unsafe = ["a TorchScript program"]
    if unsafe:
        what = f"it holds more than weights: {', '.join(sorted(unsafe)[:_SHOWN])}; reading that runs code from the file"
        hint = "save the state dict alone; or, if you trust the source: `trust: true` (pipe init … --trust)"
        return StageError(what, where=path.name, hint=hint)
    # torch's text advises to run the pickle's code, and says where to file an issue.
    words = _ADVICE.sub(" ", str(error)).rpartition("WeightsUnpickler error:")[2]
    words = words.partition("Check the documentation")[0]
    words = " ".join(words.partition("Please file an issue")[0].split()) or "no message"
    what = f"torch can't read it as weights: it is damaged, or not a checkpoint: {type(error).__name__}: {words:.300}"
    return StageError(what, where=path.name, hint="expected a .safetensors file, or a state dict written by torch.save")
