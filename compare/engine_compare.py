"""An engine beside ONNX Runtime on the same feeds. Not run on a device yet; the tests run it on stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.tensorrt.builder import TensorRT
from layerline.backends.tensorrt.engine_session import EngineSession
from layerline.backends.tensorrt.profiles import admitting
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff


@dataclass(frozen=True)
class Measured:
    """Distances from ONNX Runtime by value name, summed over the feeds that were run.

    Attributes:
        distances: of everything the engine gives.
        ran: number of feeds run.
        outside: number of feeds whose sizes no profile admits.
    """

    distances: Mapping[str, Distance]
    ran: int
    outside: int


def compare(
    backend: TensorRT,
    model: Path,
    plan: Path,
    feeds: Sequence[Feed],
    records: Sequence[LayerDiff],
    tolerance: float,
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """The records with what this machine's device shows, or as they are with the reason why it shows nothing.

    Outputs are measured on the engine itself and gated by `tolerance`, a relative L2 error. Inner values are measured
    on a second engine that gives them as outputs too; it fuses less than the one that ships, so they are not gated.

    Raises:
        StageError: the engine was built for this device and does not run on it.
    """
    if reason := backend.unavailable_reason():
        return tuple(records), [f"The engine was built but not run here: {reason}."]
    try:
        engine = backend.open(plan)
    except StageError as error:
        if backend.name == "tensorrt":
            raise
        # Built ahead of time, perhaps for other devices than this machine's.
        return tuple(records), [f"The engine was built but not run here: {error.what}."]
    whole = measure(model, engine, feeds)
    inner = [r.name for r in records if r.name not in engine.outputs]
    parts = measure(model, backend.open(model, inner), feeds, inner)
    found = {**parts.distances, **whole.distances}
    gates = dict.fromkeys(engine.outputs, tolerance)
    rows = (
        replace(r, **found[r.name].measures(), tolerance=gates.get(r.name)) if r.name in found else r for r in records
    )
    return tuple(rows), _told(whole)


def measure(model: Path, engine: EngineSession, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> Measured:
    """Runs the ONNX file on onnxruntime, as written, and the engine on every feed that fits one of its profiles.

    Args:
        model: the ONNX file that the engine was built from.
        engine: the loaded engine.
        feeds: arrays by input name.
        taps: inner values that the engine gives beside the outputs.
    """
    reference = OnnxRuntime().open(model, taps)
    fitting = [f for f in feeds if admitting(engine.profiles, {n: a.shape for n, a in f.items()})]
    total: dict[str, Distance] = {}
    for feed in fitting:
        # An engine takes float32 where the model takes float64.
        narrow = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in feed.items()}
        expected, seen = reference.run(feed), engine.run(narrow)
        for name in seen.keys() & expected.keys():
            total[name] = total.get(name, Distance()) + diff_arrays(expected[name], seen[name])
    return Measured(total, len(fitting), len(feeds) - len(fitting))


def _told(whole: Measured) -> list[str]:
    notes = [f"{whole.ran} probes were run; inner values were measured on a second engine, which fuses less."]
    if whole.outside:
        notes.append(f"{whole.outside} probes lie outside of every profile and were not run.")
    return notes
