"""Where the feeds of a foreign model come from: arrays that somebody gave, or numbers drawn with a fixed seed.

Both make a feed for any sizes of the symbolic dimensions, the same feed each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from layerline.backends.base import Array, Feed
from layerline.export.probe_files import drawn, resized
from layerline.export.signature import Value
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs.batches import LABELS, answers
from layerline.pipeline.inputs.input_checks import check_answers, check_samples, checked_cast

WIDE = 8
"""Integers of which nothing is known are drawn up to this, and down to its negative where their type has negatives."""


class Source(Protocol):
    """Makes feeds."""

    def feed(self, sizes: Mapping[str, int], turn: int = 0) -> Feed:
        """Arrays by input name, at the given sizes by dimension; another `turn`, other numbers where there are any."""


def shape(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input at the given sizes."""
    return tuple(d if isinstance(d, int) else sizes[d] for d in value.shape)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Standard normal floats, booleans, and integers over a range, both ends included.

    Attributes:
        ranges: (low, high) of each integer input, by name.
        special: numbers that the graph compares an integer input with, by name; they are among those drawn.
    """

    inputs: tuple[Value, ...]
    ranges: Mapping[str, tuple[int, int]]
    special: Mapping[str, tuple[int, ...]]

    def feed(self, sizes: Mapping[str, int], turn: int = 0) -> Feed:
        return {v.name: self._array(v, shape(v, sizes), turn, i) for i, v in enumerate(self.inputs)}

    def _array(self, value: Value, size: tuple[int, ...], turn: int, place: int) -> Array:
        rng, dtype = np.random.default_rng((turn, place)), np.dtype(value.dtype)
        if dtype.kind == "b":
            return np.asarray(rng.random(size) < 0.5)
        if dtype.kind in "iu":
            array = drawn(np.zeros(size, dtype), *self.ranges[value.name], rng)
            return _with(array, self.special.get(value.name, ()), turn)
        return np.asarray(rng.standard_normal(size)).astype(dtype)


def _with(array: Array, special: tuple[int, ...], turn: int) -> Array:
    """A lone number is a special one, the next each turn, while there are any; larger arrays have them mixed in."""
    if array.size == 1:
        return np.full_like(array, special[turn]) if turn < len(special) else array
    room = max(array.size - 2, 0)  # both ends of the range stay
    array.reshape(-1)[1 : 1 + min(len(special), room)] = special[:room]
    return array


@dataclass(frozen=True, kw_only=True)
class Given:
    """Arrays by input name, whose first axis counts samples.

    Attributes:
        inputs: the model's.
        arrays: in the model's types. Of the input's own rank where its first axis counts samples too; of one rank more
            where a sample is a whole input.
        whole: names of the latter. With one of them, or with a fixed first axis of size 1, a feed is one sample.
        count: samples.
        numbers: inputs of rank 0 that are the same in every sample, with that number.
    """

    inputs: tuple[Value, ...]
    arrays: Mapping[str, Array]
    whole: frozenset[str]
    count: int
    numbers: Mapping[str, Array]

    def feed(self, sizes: Mapping[str, int], turn: int = 0) -> Feed:
        """From sample `turn` on; cut, or repeated from the start, to the sizes."""
        return {v.name: self._array(v, shape(v, sizes), turn) for v in self.inputs}

    def sizes(self, batch: int) -> dict[str, int]:
        """Sizes of a feed of that many samples.

        Raises:
            ConfigError: two arrays give one dimension different sizes.
        """
        found: dict[str, int] = {}
        for value in self.inputs:
            own = self.arrays[value.name].shape[value.name in self.whole :]
            for axis, dim in enumerate(value.shape):
                if isinstance(dim, str):
                    rows = axis == 0 and self.stacked(value)
                    size = (1 if self.whole else batch) if rows else own[axis]
                    if found.setdefault(dim, size) != size:
                        raise ConfigError(
                            f"the array gives the dimension {dim!r} the size {size}, another gives it {found[dim]}",
                            where=f"data: {value.name}",
                        )
        return found

    def batches(self) -> set[str]:
        """Dimensions that count samples."""
        return {str(v.shape[0]) for v in self.inputs if self.stacked(v) and isinstance(v.shape[0], str)}

    def stacked(self, value: Value) -> bool:
        """Whether the input's first axis counts samples."""
        return bool(value.shape) and value.name not in self.whole and self.arrays[value.name].ndim > 0

    def _array(self, value: Value, size: tuple[int, ...], turn: int) -> Array:
        array = self.arrays[value.name]
        if value.name in self.whole:
            array = array[turn % self.count]
        elif self.stacked(value):
            array = np.roll(array, -turn, 0) if turn else array
        for axis, wanted in enumerate(size):
            if array.shape[axis] != wanted:
                array = resized(array, axis, wanted)
        return np.asarray(array, order="C")


def given(arrays: Mapping[str, Array], inputs: Sequence[Value], where: str) -> Given:
    """Arrays checked against the model's inputs and cast to their types; the answers are left out.

    Raises:
        ConfigError: an unknown or missing name, another rank, a size that the model fixes otherwise, a type that can't
            be cast, a number beyond that type, NaN or Inf, arrays (answers included) of different length, no sample.
    """
    inputs, names = tuple(inputs), [v.name for v in inputs]
    label = answers(arrays, names)
    held = [k for k in arrays if k != label]
    takes = f"the model takes {', '.join(names)}; the answers go under {' or '.join(LABELS)}"
    if unknown := [k for k in held if k not in names]:
        raise ConfigError(f"there is no input {unknown[0]!r}", where=where, hint=takes)
    if missing := [n for n in names if n not in arrays]:
        raise ConfigError(
            f"there is no array {missing[0]!r}; found {', '.join(held) or 'none'}", where=where, hint=takes
        )
    check_samples(arrays, where)
    if label:
        check_answers(arrays[label], where, label)
    counts = {k: len(arrays[k]) for k in held if arrays[k].ndim}
    cast = {v.name: _cast(arrays[v.name], v, where) for v in inputs}
    # A number that never changes need not part the samples.
    numbers = {v.name: a[0] for v in inputs if not v.shape and (a := cast[v.name]).ndim and (a == a[0]).all()}
    cast |= numbers
    whole = frozenset(v.name for v in inputs if cast[v.name].ndim == len(v.shape) + 1)
    return Given(inputs=inputs, arrays=cast, whole=whole, count=next(iter(counts.values()), 1), numbers=numbers)


def _cast(array: Array, value: Value, where: str) -> Array:
    place, rank, dtype = f"{where}: {value.name}", len(value.shape), np.dtype(value.dtype)
    own = array.shape[1:] if array.ndim == rank + 1 else array.shape
    stacked = array.ndim == rank and rank > 0
    fits = len(own) == rank and all(
        isinstance(d, str) or d == n or (stacked and axis == 0)
        for axis, (d, n) in enumerate(zip(value.shape, own, strict=True))
    )
    if not fits:
        shown = ", ".join(map(str, value.shape))
        raise ConfigError(
            f"the array has the shape {array.shape}, the model takes ({shown})",
            where=place,
            hint="stack samples along the first axis, or give whole inputs with one axis more in front",
        )
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ConfigError(f"the array holds {array.dtype}, the model takes {dtype}", where=place)
    return checked_cast(array, dtype, value.name, where)
