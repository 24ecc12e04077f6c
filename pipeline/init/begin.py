"""`pipe init`: what a project starts from, and what is still to be done before it runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.init import from_files
from layerline.pipeline.records import housekeeping

TEMPLATE = "mnist"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What was asked for; at most one of `template`, `onnx` and `weights` is set."""

    template: str | None = None
    onnx: Path | None = None
    weights: Path | None = None
    model: str | None = None
    data: Path | None = None
    trust: bool = False


@dataclass(frozen=True)
class Begun:
    """The files that were written, and the next step in words."""

    written: tuple[Path, ...]
    next: str


def begin(folder: Path, origin: Origin) -> Begun:
    """Writes a project.

    Raises:
        ConfigError: options that don't go together, or what they name can't be used; nothing is overwritten.
        StageError: a model or checkpoint that can't be read.
    """
    written = _write(folder, origin)
    needs_inputs = origin.weights is not None and origin.data is None
    first = f"add example_inputs() to {folder / 'task.py'}: two samples for forward(); then " if needs_inputs else ""
    return Begun(tuple(written), f"{first}cd {shlex.quote(str(folder))} && pipe run all")


def _write(folder: Path, origin: Origin) -> list[Path]:
    named = [x for x in (origin.template, origin.onnx, origin.weights) if x is not None]
    if len(named) > 1:
        raise ConfigError("a project starts from one thing: --template, --from-onnx or --from-checkpoint")
    if origin.weights is not None and origin.model is not None:
        return from_files.from_checkpoint(folder, origin.weights, origin.model, origin.data, trust=origin.trust)
    if origin.weights is not None or origin.model is not None or origin.trust:
        raise ConfigError("--from-checkpoint and --model go together, and --trust with them")
    if origin.onnx is not None:
        return from_files.from_onnx(folder, origin.onnx, origin.data)
    if origin.data is not None:
        raise ConfigError("--data goes with --from-onnx or --from-checkpoint")
    return housekeeping.init(folder, origin.template or TEMPLATE)
