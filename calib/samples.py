"""Turns what a task's data hooks return into batches for a model, each array under its input's name.

pipeline/inputs/batches.py says which forms are accepted and what they mean. Tensors are recognised by their `detach`,
so that torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError, first_line
from layerline.pipeline.inputs.batches import (
    SLICE,
    answers,
    collate,
    form,
    leaves,
    mapped,
    rows,
    with_arrays,
)
from layerline.pipeline.inputs.input_checks import checked_cast
from layerline.pipeline.outline import is_array, outlined

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]

_END = object()


class Input(Protocol):
    """One input of the model: its name, numpy's name of its type, and its shape (symbolic sizes by name)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int | str, ...]: ...


@dataclass(frozen=True, eq=False)
class _Named:
    """A batch, a sample or columns: arrays by input name, the target and the slices; None where there are none."""

    feed: dict[str, Array]
    target: Any = None
    slices: Array | None = None

    def select(self, rows: Positions) -> _Named:
        """Some rows; an array without axes stays as it is, for all of them."""
        parts = (self.feed, self.target, self.slices)
        return _Named(*mapped(parts, lambda array: array if array is None or not array.ndim else array[rows]))


@dataclass(frozen=True, eq=False)
class Batch:
    """One run of the model."""

    feed: dict[str, Array]  # arrays by input name, in the model's types
    target: Any  # what the metric compares with: an array, or arrays in tuples and dicts; None where the data has none
    rows: int  # number of samples in it
    # rows at the end that are no samples. Where the model's batch axis is fixed, a short last batch is filled up with
    # copies of its first sample
    filler: int = 0
    slices: Array | None = None  # the part of the data that each sample belongs to; None where the data does not say

    def real(self, array: Array) -> Array:
        """An output of the model for this batch, without the filler."""
        if self.filler and array.ndim and array.shape[0] == self.rows + self.filler:
            return array[: self.rows]
        return array


class Samples:
    """The batches of one data hook. Iterating again starts again, or fails where the data cannot.

    Args:
        data: what the hook returned.
        inputs: the model's inputs, in order.
        hook: name of the hook, for messages ("calib_data").
        batch_size: samples a batch, where the data comes in columns or single samples. A model with a fixed batch axis
            gets its own size. An iterable's batches stay as they are.
        limit: samples wanted. Columns and Datasets give that many, evenly spaced; an iterable stops after the
            batch that reaches it.
        purpose: what the samples are for, for messages.
        numbers: positions in the data of the samples to read, in this order; of batches that come ready-made, in the
            order of the data. None: all, or as many as `limit` says.

    Raises:
        TaskError: on iterating; names the hook, the input, what was seen and expected.
    """

    def __init__(
        self,
        data: Any,
        inputs: Sequence[Input],
        *,
        hook: str,
        batch_size: int = 32,
        limit: int | None = None,
        purpose: str = "calibration",
        numbers: Positions | None = None,
    ) -> None:
        self._data = data
        self._inputs = tuple(inputs)
        self._hook = hook
        self._limit = limit
        self._purpose = purpose
        self._picked = numbers
        self._fixed: int | None = None  # the static first dimension that all inputs share
        sizes = {i.shape[0] for i in self._inputs if i.shape}
        if len(sizes) == 1:
            size = sizes.pop()
            self._fixed = size if isinstance(size, int) else None
        self._batch_size = self._fixed or batch_size
        self._rows_before: int | None = None  # of the last complete pass

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._data, Iterator) and self._rows_before is not None:
            raise self._cannot_replay("it is used up")
        rows = 0
        for number, raw in enumerate(self._raw_batches()):
            for batch in self._fit(raw, f"{self._hook}, batch {number}"):
                yield batch
                rows += batch.rows
            if self._limit is not None and rows >= self._limit:
                break
        if rows == 0:
            if self._rows_before:
                raise self._cannot_replay("the second pass gave nothing")
            raise TaskError(
                f"0 {self._purpose} samples: {self._hook}() gave none",
                where=self._hook,
                hint="return arrays, a Dataset or batches with at least one sample",
            )
        self._rows_before = rows

    def count(self) -> int | None:
        """The number of samples, without reading them; None where only reading would tell."""
        if self._picked is not None:
            return self._picked.size
        total = self._total()
        return total if self._limit is None or total is None else min(total, self._limit)

    def _total(self) -> int | None:
        data = self._data
        if isinstance(data, list):
            if data:
                form(data, self._hook)  # refuses a list of single samples or of columns, as on iterating
            return sum(self._samples_in(self._named(with_arrays(raw)).feed) for raw in data)
        kind = form(data, self._hook)
        if kind == "columns":
            return rows(with_arrays(data))
        if kind == "samples":
            return int(self._call_user(len, data))
        return None

    def _cannot_replay(self, why: str) -> TaskError:
        return TaskError(
            f"the reader that {self._hook}() returned cannot be replayed: {why}, and a second pass is needed",
            where=self._hook,
            hint="return arrays, a list of batches, or an object whose __iter__ starts anew",
        )

    def _raw_batches(self) -> Iterator[_Named]:
        data = self._data
        kind = form(data, self._hook)
        if kind == "columns":
            columns = self._named(with_arrays(data))
            for numbers in self._portions(rows(with_arrays(data))):
                yield self._narrow(columns.select(numbers), numbers)
        elif kind == "samples":
            for numbers in self._portions(self._call_user(len, data)):
                yield self._narrow(self._collated(data, numbers.tolist()), numbers)
        else:
            batches = self._call_user(iter, data)
            start = 0
            while (batch := self._call_user(next, batches, _END)) is not _END:
                named = self._named(with_arrays(batch))
                if self._picked is None:
                    yield named
                    continue
                stop = start + self._samples_in(named.feed)
                rows_picked = np.sort(self._picked[(self._picked >= start) & (self._picked < stop)]) - start
                start = stop
                if rows_picked.size:
                    yield self._part(named, rows_picked)
                if start > self._picked.max():
                    return

    def _call_user(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's code; its exceptions become TaskErrors that name the hook."""
        try:
            return function(*args)
        except (TaskError, MemoryError):
            raise
        except Exception as error:
            raise TaskError(
                f"reading what {self._hook}() returned raised {type(error).__name__}: {error}",
                where=self._hook,
                hint="run again with --debug for the traceback",
            ) from error

    def _part(self, named: _Named, numbers: Positions) -> _Named:
        """Some rows of a ready-made batch, without its target; all of it where its arrays differ in length."""
        sizes = {array.shape[0] for array in named.feed.values() if array.ndim}
        if len(sizes) > 1 or numbers.size == max(sizes, default=1):
            return named
        return _Named(named.feed).select(numbers)

    def positions(self, count: int) -> Positions:
        """Positions in the data of the first `count` samples that iterating gives, where `numbers` was not set."""
        total = None
        if form(self._data, self._hook) != "batches":
            total = self._total()
        if total is None:
            return np.arange(count, dtype=np.int64)
        return self._spread(total)[:count]

    def _spread(self, total: int) -> Positions:
        """At most `limit` of `total` positions, evenly spread."""
        count = total if self._limit is None else min(total, self._limit)
        return np.arange(count, dtype=np.int64) * total // max(count, 1)

    def _portions(self, total: int) -> Iterator[Positions]:
        """Positions of the samples of each batch."""
        chosen = self._picked
        if chosen is None:
            chosen = self._spread(total)
        for start in range(0, len(chosen), self._batch_size):
            yield chosen[start : start + self._batch_size]

    def _collated(self, dataset: Any, numbers: list[int]) -> _Named:
        samples = [self._named(with_arrays(self._call_user(dataset.__getitem__, i))) for i in numbers]
        feed: dict[str, Array] = {}
        for name in samples[0].feed:
            feed[name] = self._stack(name, [sample.feed[name] for sample in samples], numbers)
        targets = [sample.target for sample in samples]
        slices = [sample.slices for sample in samples if sample.slices is not None]
        try:
            target = None if targets[0] is None else collate(targets, lambda p: self._stack("target", p, numbers))
        except (KeyError, ValueError, TypeError) as error:
            raise TaskError(
                f"the targets of {self._hook}() differ in structure: {outlined(targets[0])} and others",
                where=f"{self._hook}: target",
                hint="give each sample a target of the same keys",
            ) from error
        return _Named(feed, target, self._stack(SLICE, slices, numbers) if slices else None)

    def _narrow(self, named: _Named, numbers: Positions) -> _Named:
        """Casts the inputs to the model's types and checks that these hold the values of the samples `numbers`."""
        samples = numbers.tolist()
        feed = dict(named.feed)
        for declared in self._inputs:
            array = feed[declared.name]
            if array.ndim and _castable(array, declared):
                feed[declared.name] = checked_cast(array, _dtype(declared.dtype), declared.name, self._hook, samples)
        return _Named(feed, named.target, named.slices)

    def _stack(self, name: str, parts: list[Array], rows: list[int]) -> Array:
        for part, row in zip(parts, rows, strict=True):
            if part.shape != parts[0].shape:
                raise TaskError(
                    f"samples {rows[0]} and {row} of {self._hook}() differ in shape: {parts[0].shape} and {part.shape}",
                    where=f"{self._hook}: {name}",
                    hint="return ready batches of equal shapes, or set batch_size: 1",
                )
        return np.stack(parts)

    def _named(self, raw: Any) -> _Named:
        """Arrays by input name, and the target."""
        if isinstance(raw, Mapping):
            input_names = {i.name for i in self._inputs}
            label = answers([str(k) for k in raw], input_names)
            target = _arrays(raw[label]) if label else None
            no_inputs = {label, SLICE} - input_names
            slices = as_array(raw[SLICE]) if SLICE in no_inputs and SLICE in raw else None
            return _Named(self._by_name({k: v for k, v in raw.items() if str(k) not in no_inputs}), target, slices)
        items = list(raw) if isinstance(raw, tuple | list) else [raw]
        if items and len(items) <= 2 and isinstance(items[0], Mapping):
            target = _arrays(items[1]) if len(items) == 2 else None
            return _Named(self._by_name(items[0]), target)
        # A tuple holds the inputs alone or, where that is one array too many, the inputs and the target.
        for count in (len(items), len(items) - 1):
            arrays = list(leaves(items[:count]))
            if len(arrays) == len(self._inputs):
                feed = {i.name: as_array(array) for i, array in zip(self._inputs, arrays, strict=True)}
                targets = [_arrays(target) for target in items[count:] if target is not None]
                return _Named(feed, *targets)
        names_in_order = [i.name for i in self._inputs]
        raise TaskError(
            f"{self._hook}() gives {len(list(leaves(items)))} arrays a batch, {outlined(raw)}; "
            f"the model takes {len(names_in_order)}: {', '.join(names_in_order)}",
            where=self._hook,
            hint="give the inputs in this order, then optionally the target, or a dict by input name",
        )

    def _by_name(self, raw: Mapping[Any, Any]) -> dict[str, Array]:
        names = [i.name for i in self._inputs]
        items = {str(key): value for key, value in raw.items()}
        prefix = _dict_prefix(list(items), names)
        feed = {prefix + key: as_array(value) for key, value in items.items()}
        unknown = sorted(set(feed) - set(names))
        missing = sorted(set(names) - set(feed))
        if unknown or missing:
            what = f"unknown input {unknown[0]!r}" if unknown else f"input {missing[0]!r} is missing"
            hint = f"the model takes {', '.join(sorted(names))}; a target goes under 'label'"
            raise TaskError(what, where=self._hook, hint=hint)
        return feed

    def _rows(self, arrays: Mapping[str, Array]) -> int:
        sizes = {k: v.shape[0] for k, v in arrays.items() if v.ndim}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{k or 'target'} {n}" for k, n in sizes.items())
            raise TaskError(f"the columns of {self._hook}() differ in length: {lengths}", where=self._hook)
        return next(iter(sizes.values()), 1)

    def _samples_in(self, feed: Mapping[str, Array]) -> int:
        """Samples of a batch: the first dimension of the first input that has one."""
        for declared in self._inputs:
            array = feed[declared.name]
            if declared.shape and array.ndim:
                return int(array.shape[0])
        return 1

    def _fit(self, named: _Named, where: str) -> Iterator[Batch]:
        """The batch as it came, or split into batches of the size that the model fixes."""
        count = self._samples_in(named.feed)
        if count == 0:
            return
        if self._fixed is None:
            yield Batch(self._typed(named.feed, where), named.target, count, slices=named.slices)
            return
        total = self._rows(named.feed)
        for start in range(0, total, self._fixed):
            numbers = np.arange(start, min(start + self._fixed, total))
            filler = self._fixed - numbers.size
            filled = named.select(np.concatenate([numbers, np.full(filler, start)]))
            part = named.select(numbers)
            yield Batch(self._typed(filled.feed, where), part.target, numbers.size, filler, part.slices)

    def _typed(self, feed: Mapping[str, Array], where: str) -> dict[str, Array]:
        return {i.name: _checked(feed[i.name], i, self._hook, where) for i in self._inputs}


def as_array(value: Any) -> Array:
    """Converts numbers in any container to an array; tensors are detached and copied to the CPU."""
    if hasattr(value, "detach"):
        try:
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":
                value = value.float()  # numpy has no bfloat16; float32 holds all its values
            value = value.numpy()
        except (TypeError, RuntimeError) as error:  # a sparse, nested or quantized tensor, or one without data
            raise TaskError(
                f"a tensor in the data cannot become an array: {first_line(str(error))}",
                hint="give plain tensors with data: .to_dense() of a sparse one, .dequantize() of a quantized one",
            ) from error
    return np.asarray(value)


def _dict_prefix(keys: Sequence[str], names: Sequence[str]) -> str:
    """What the exporter puts before the keys of a dict that forward() takes whole: its parameter's name."""
    prefixes = set[str]()
    for name in names:
        prefixes.update(name.removesuffix(key) for key in keys if name != key and name.endswith(f"_{key}"))
    for prefix in sorted(prefixes):
        if {prefix + key for key in keys} == set(names):
            return prefix
    return ""


def _checked(array: Array, expected: Input, hook: str, where: str) -> Array:
    pairs = zip(expected.shape, array.shape, strict=False)
    if array.ndim != len(expected.shape) or not all(isinstance(want, str) or want == size for want, size in pairs):
        raise TaskError(
            f"{hook}() gives shape {array.shape}; the model takes ({', '.join(map(str, expected.shape))})",
            where=f"{hook}: {expected.name}",
        )
    if not _castable(array, expected):
        raise TaskError(
            f"{hook}() gives {array.dtype}; the model takes {expected.dtype}", where=f"{hook}: {expected.name}"
        )
    return np.ascontiguousarray(checked_cast(array, _dtype(expected.dtype), expected.name, where))


def _castable(array: Array, expected: Input) -> bool:
    """Whether the types are of one kind. `checked_cast` checks that each number fits."""
    dtype = _dtype(expected.dtype)
    return array.dtype == dtype or bool(np.can_cast(array.dtype, dtype, "same_kind"))


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        raise TaskError("bfloat16 inputs cannot be fed from numpy", hint="export with float32 inputs")
    return np.dtype(name)


def _arrays(target: Any) -> Any:
    """Converts a target to arrays. Tuples and dicts stay; a list of numbers becomes one array."""
    if isinstance(target, Mapping):
        return {k: _arrays(v) for k, v in target.items()}
    nested = isinstance(target, list) and any(is_array(v) or isinstance(v, Mapping | tuple) for v in target)
    if isinstance(target, tuple) or nested:
        return tuple(_arrays(v) for v in target)
    return as_array(target)
