"""Sources of feeds for an imported model: samples from a file, or numbers drawn with a fixed seed.

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
"""Integers without a known range are drawn up to this number, and down to its negative if their type is signed."""


class Source(Protocol):
    """Makes feeds."""

    def feed(self, sizes: Mapping[str, int], turn: int = 0) -> Feed:
        """Arrays by input name, at the given sizes by dimension; another `turn`, other numbers where there are any."""


def shape(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input at the given sizes."""
    numbers: list[int] = []
    for dim in value.shape:
        if isinstance(dim, str):
            dim = sizes[dim]
        numbers.append(dim)
    return tuple(numbers)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Standard normal floats, booleans, and integers over a range, both ends included.

    Numbers that the graph compares an integer input with (`special`) are among those drawn.
    """

    inputs: tuple[Value, ...]
    ranges: Mapping[str, tuple[int, int]]
    special: Mapping[str, tuple[int, ...]]

    def feed(self, sizes: Mapping[str, int], turn: int = 0) -> Feed:
        arrays: dict[str, Array] = {}
        for index, value in enumerate(self.inputs):
            # Seeded by turn and input, so that one input's numbers do not depend on the sizes of another.
            rng = np.random.default_rng((turn, index))
            arrays[value.name] = self._array(value, shape(value, sizes), turn, rng)
        return arrays

    def _array(self, value: Value, size: tuple[int, ...], turn: int, rng: np.random.Generator) -> Array:
        dtype = np.dtype(value.dtype)
        if dtype.kind == "b":
            return np.asarray(rng.random(size) < 0.5)
        if dtype.kind in "iu":
            array = drawn(np.zeros(size, dtype), *self.ranges[value.name], rng)
            return _with(array, self.special.get(value.name, ()), turn)
        return np.asarray(rng.standard_normal(size)).astype(dtype)


def _with(array: Array, special: tuple[int, ...], turn: int) -> Array:
    """Puts special numbers into an array. A single element takes one of them each turn, while there are any."""
    if array.size == 1:
        if turn < len(special):
            return np.full_like(array, special[turn])
        return array
    room = max(array.size - 2, 0)  # both ends of the range stay
    array.reshape(-1)[1 : 1 + min(len(special), room)] = special[:room]
    return array


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """Arrays by input name, whose first axis counts samples.

    Attributes:
        inputs: inputs of the model.
        arrays: in the model's types. An array has the input's rank if the input's first axis counts samples too, and
            one more if a sample is a whole input.
        whole: names of inputs of the second kind. With one of them, a feed is one sample.
        count: number of samples.
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
        """Sizes of a feed of that many samples. Raises ConfigError: two arrays give one dimension different sizes."""
        sizes: dict[str, int] = {}
        for value in self.inputs:
            array = self.arrays[value.name]
            sample_shape = array.shape
            if value.name in self.whole:
                sample_shape = array.shape[1:]
            for axis, dim in enumerate(value.shape):
                if not isinstance(dim, str):
                    continue
                size = sample_shape[axis]
                if axis == 0 and self.stacked(value):
                    # Beside a whole input a feed is one sample.
                    size = batch
                    if self.whole:
                        size = 1
                if sizes.setdefault(dim, size) != size:
                    what = f"the array gives the dimension {dim!r} the size {size}, another gives it {sizes[dim]}"
                    raise ConfigError(what, where=f"data: {value.name}")
        return sizes

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
        elif self.stacked(value) and turn:
            # Behind the last sample the first ones follow.
            array = np.roll(array, -turn, 0)
        for axis, length in enumerate(size):
            if array.shape[axis] != length:
                array = resized(array, axis, length)
        return np.asarray(array, order="C")


def samples(arrays: Mapping[str, Array], inputs: Sequence[Value], where: str) -> SampleArrays:
    """Checks arrays against the model's inputs and casts them to their types. The answers are left out.

    Raises ConfigError: an unknown or missing name, a rank, size or type that does not fit, a number beyond the
    type, NaN or Inf, arrays (answers included) of different length, no sample.
    """
    names = [value.name for value in inputs]
    label = answers(arrays, names)
    array_names = [name for name in arrays if name != label]
    takes = f"the model takes {', '.join(names)}; the answers go under {' or '.join(LABELS)}"
    for name in array_names:
        if name not in names:
            raise ConfigError(f"there is no input {name!r}", where=where, hint=takes)
    for name in names:
        if name not in arrays:
            present = ", ".join(array_names) or "none"
            raise ConfigError(f"there is no array {name!r}; found {present}", where=where, hint=takes)
    check_samples(arrays, where)
    if label:
        check_answers(arrays[label], where, label)
    cast: dict[str, Array] = {}
    numbers: dict[str, Array] = {}
    whole: set[str] = set()
    for value in inputs:
        array = _cast(arrays[value.name], value, where)
        # A number that never changes does not force feeds of single samples.
        if not value.shape and array.ndim and (array == array[0]).all():
            array = array[0]
            numbers[value.name] = array
        if array.ndim == len(value.shape) + 1:
            whole.add(value.name)
        cast[value.name] = array
    # `check_samples` made sure that all arrays have one length. Arrays without axes alone are one sample.
    lengths = [len(arrays[name]) for name in array_names if arrays[name].ndim]
    count = 1
    if lengths:
        count = lengths[0]
    return SampleArrays(inputs=tuple(inputs), arrays=cast, whole=frozenset(whole), count=count, numbers=numbers)


def _cast(array: Array, value: Value, where: str) -> Array:
    place = f"{where}: {value.name}"
    dtype = np.dtype(value.dtype)
    if not _fits(array, value):
        shape = ", ".join(map(str, value.shape))
        what = f"the array has the shape {array.shape}, the model takes ({shape})"
        hint = "stack samples along the first axis, or give whole inputs with one axis more in front"
        raise ConfigError(what, where=place, hint=hint)
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ConfigError(f"the array holds {array.dtype}, the model takes {dtype}", where=place)
    return checked_cast(array, dtype, value.name, where)


def _fits(array: Array, value: Value) -> bool:
    """Whether an array is one input, samples along its first axis, or whole inputs with one axis more in front."""
    rank = len(value.shape)
    shape = array.shape
    stacked = array.ndim == rank
    if array.ndim == rank + 1:
        shape = array.shape[1:]
    if len(shape) != rank:
        return False
    for axis, (dim, size) in enumerate(zip(value.shape, shape, strict=True)):
        counts_samples = stacked and axis == 0
        if isinstance(dim, int) and dim != size and not counts_samples:
            return False
    return True
