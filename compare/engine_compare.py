"""Compares an engine with ONNX Runtime on the same feeds. Not run on a device yet; tests run it on stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from layerline.backends.base import Array, Feed
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
    """Adds to the records what the engine computes on this machine's device.

    Where it can't run here, the records stay as they are and a note gives the reason.

    Outputs are measured on the engine itself and gated by `tolerance`, a relative L2 error. Inner values are measured
    on a second engine that gives them as outputs too; it fuses less than the one that ships, so they are not gated.

    Raises:
        StageError: the engine was built for this device and does not run on it.
    """
    reason = backend.unavailable_reason()
    if reason:
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
    distances = {**parts.distances, **whole.distances}
    rows: list[LayerDiff] = []
    for record in records:
        if record.name in distances:
            gate = tolerance if record.name in engine.outputs else None
            record = replace(record, **distances[record.name].measures(), tolerance=gate)
        rows.append(record)
    return tuple(rows), _notes(whole)


def measure(model: Path, engine: EngineSession, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> Measured:
    """Runs the ONNX file on onnxruntime, as written, and the engine on every feed that fits one of its profiles.

    Args:
        model: the ONNX file that the engine was built from.
        engine: the loaded engine.
        feeds: arrays by input name.
        taps: inner values that the engine gives beside the outputs.
    """
    reference = OnnxRuntime().open(model, taps)
    total: dict[str, Distance] = {}
    ran = 0
    for feed in feeds:
        shapes = {name: array.shape for name, array in feed.items()}
        if not admitting(engine.profiles, shapes):
            continue
        ran += 1
        expected = reference.run(feed)
        actual = engine.run(_without_float64(feed))
        for name in actual.keys() & expected.keys():
            total[name] = total.get(name, Distance()) + diff_arrays(expected[name], actual[name])
    return Measured(total, ran, len(feeds) - ran)


def _without_float64(feed: Feed) -> dict[str, Array]:
    """An engine takes float32 where the model takes float64."""
    narrowed = dict(feed)
    for name, array in feed.items():
        if array.dtype == np.float64:
            narrowed[name] = array.astype(np.float32)
    return narrowed


def _notes(whole: Measured) -> list[str]:
    notes = [f"{whole.ran} probes were run; inner values were measured on a second engine, which fuses less."]
    if whole.outside:
        notes.append(f"{whole.outside} probes lie outside of every profile and were not run.")
    return notes
