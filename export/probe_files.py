"""Real feeds that travel with every ONNX artifact, so that each later stage proves itself on the same inputs.

`probes.safetensors` holds `<i>/<input name>`: feed 0 is the example, the others are samples and other sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from layerline.backends.base import Array, Feed
from layerline.pipeline.errors import StageError

FILE = "probes.safetensors"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One feed that models are compared on, and what the module itself gives for it.

    `label` says what is special about it: "example", "batch=5"; `sizes` are the axes that differ from the
    example's.
    """

    label: str
    feed: Feed
    outputs: Mapping[str, Array]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def gate(self) -> str:
        """Name of the gate that this probe becomes."""
        return f"module itself, {self.label}"


def save(folder: Path, feeds: Iterable[Feed]) -> None:
    """Writes the feeds, the same bytes for the same content."""
    tensors: dict[str, Array] = {}
    for index, feed in enumerate(feeds):
        for name, array in feed.items():
            # safetensors writes the memory as it lies, so it must be in order.
            tensors[f"{index}/{name}"] = np.asarray(array, order="C")
    save_file(tensors, str(folder / FILE))


def load(folder: Path) -> list[Feed]:
    """The feeds in order. Raises StageError if the file is missing or damaged."""
    path = folder / FILE
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise StageError(f"cannot read the probe feeds ({error})", where=path.name) from error
    feeds: dict[int, dict[str, Array]] = {}
    for key in tensors:
        index, _, name = key.partition("/")
        # By number: as text, 10 would come before 2.
        feeds.setdefault(int(index), {})[name] = tensors[key]
    return [feeds[index] for index in sorted(feeds)]


def resized(array: Array, axis: int, size: int) -> Array:
    """`array` with another size along one axis: cut, or repeated from its start."""
    out: Array = np.take(array, np.arange(size) % max(array.shape[axis], 1), axis)
    return out


def drawn(array: Array, low: int, high: int, rng: np.random.Generator) -> Array:
    """Integers over [low, high], both bounds among them where there is room, in the shape and type of `array`."""
    values: npt.NDArray[np.int64] = rng.integers(low, high, array.shape, np.int64, endpoint=True)
    if values.size > 1:
        # The ends are where a table lookup fails.
        values.flat[0], values.flat[-1] = low, high
    return values.astype(array.dtype)
