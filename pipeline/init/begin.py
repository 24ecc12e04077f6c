"""`pipe init`: what a project starts from, and what is still to be done before it runs."""

from __future__ import annotations

import shlex
from pathlib import Path

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.init import from_files
from layerline.pipeline.records import housekeeping

TEMPLATE = "mnist"


def begin(
    folder: Path,
    *,
    template: str | None = None,
    onnx: Path | None = None,
    weights: Path | None = None,
    model: str | None = None,
    data: Path | None = None,
    trust: bool = False,
) -> tuple[list[Path], str]:
    """Writes a project that starts from a template, an ONNX model, or weights.

    Returns:
        The files that were written, and the next step in words.

    Raises:
        ConfigError: options that don't go together, or what they name can't be used; nothing is overwritten.
        StageError: a model or checkpoint that can't be read.
    """
    if [template, onnx, weights].count(None) < 2:
        raise ConfigError("a project starts from one thing: --template, --from-onnx or --from-checkpoint")
    step = f"cd {shlex.quote(str(folder))} && pipe run all"
    if weights is not None and model is not None:
        written = from_files.from_checkpoint(folder, weights, model, data, trust=trust)
        if data is None:
            step = f"add example_inputs() to {folder / 'task.py'}: two samples for forward(); then {step}"
        return written, step
    if weights is not None or model is not None or trust:
        raise ConfigError("--from-checkpoint and --model go together, and --trust with them")
    if onnx is not None:
        return from_files.from_onnx(folder, onnx, data), step
    if data is not None:
        raise ConfigError("--data goes with --from-onnx or --from-checkpoint")
    return housekeeping.init(folder, template or TEMPLATE), step
