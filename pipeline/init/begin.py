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
class StartingPoint:
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


def begin(folder: Path, start: StartingPoint) -> Begun:
    """Writes a project.

    Raises:
        ConfigError: options that don't go together, or what they name can't be used; nothing is overwritten.
        StageError: a model or checkpoint that can't be read.
    """
    written = _write(folder, start)
    needs_inputs = start.weights is not None and start.data is None
    first = f"add example_inputs() to {folder / 'task.py'}: two samples for forward(); then " if needs_inputs else ""
    return Begun(tuple(written), f"{first}cd {shlex.quote(str(folder))} && pipe run all")


def _write(folder: Path, start: StartingPoint) -> list[Path]:
    named = [x for x in (start.template, start.onnx, start.weights) if x is not None]
    if len(named) > 1:
        raise ConfigError("a project starts from one thing: --template, --from-onnx or --from-checkpoint")
    if start.weights is not None and start.model is not None:
        return from_files.from_checkpoint(folder, start.weights, start.model, start.data, trust=start.trust)
    if start.weights is not None or start.model is not None or start.trust:
        raise ConfigError("--from-checkpoint and --model go together, and --trust with them")
    if start.onnx is not None:
        return from_files.from_onnx(folder, start.onnx, start.data)
    if start.data is not None:
        raise ConfigError("--data goes with --from-onnx or --from-checkpoint")
    return housekeeping.init(folder, start.template or TEMPLATE)
