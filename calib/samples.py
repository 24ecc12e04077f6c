"""Turns what a task's data hooks return into batches for a model, each array under its input's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerline.calib.named_arrays import Array, Input, NamedArrays, Positions, as_declared, named, samples_in
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import SLICE, collate, form, rows, with_arrays
from layerline.pipeline.outline import outlined

_END = object()


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
        sizes = {declared.shape[0] for declared in self._inputs if declared.shape}
        if len(sizes) == 1:
            size = sizes.pop()
            self._fixed = size if isinstance(size, int) else None
        self._batch_size = self._fixed or batch_size
        self._rows_before: int | None = None  # of the last complete pass

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._data, Iterator) and self._rows_before is not None:
            raise self._cannot_replay("it is used up")
        count = 0
        for batch in self._batches():
            yield batch
            count += batch.rows
        if count == 0:
            if self._rows_before:
                raise self._cannot_replay("the second pass gave nothing")
            raise TaskError(
                f"0 {self._purpose} samples: {self._hook}() gave none",
                where=self._hook,
                hint="return arrays, a Dataset or batches with at least one sample",
            )
        self._rows_before = count

    def count(self) -> int | None:
        """The number of samples, without reading them; None where only reading would tell."""
        if self._picked is not None:
            return self._picked.size
        total = self._total()
        if self._limit is None or total is None:
            return total
        return min(total, self._limit)

    def positions(self, count: int) -> Positions:
        """Positions in the data of the first `count` samples that iterating gives, where `numbers` was not set."""
        total = None
        # Of batches as many are read as the limit needs, from the first on.
        if form(self._data, self._hook) != "batches":
            total = self._total()
        if total is None:
            return np.arange(count, dtype=np.int64)
        return self._spread(total)[:count]

    def _total(self) -> int | None:
        """Samples in the whole data."""
        data = self._data
        if isinstance(data, list):
            if data:
                form(data, self._hook)  # refuses a list of single samples or of columns, as on iterating
            return sum(samples_in(self._named(batch).feed, self._inputs) for batch in data)
        kind = form(data, self._hook)
        if kind == "columns":
            return rows(with_arrays(data))
        if kind == "samples":
            return int(self._call_user(len, data))
        return None

    def _spread(self, total: int) -> Positions:
        """At most `limit` of `total` positions, evenly spread."""
        count = total
        if self._limit is not None:
            count = min(total, self._limit)
        return np.arange(count, dtype=np.int64) * total // max(count, 1)

    def _batches(self) -> Iterator[Batch]:
        if form(self._data, self._hook) != "batches":
            yield from self._chosen()
            return
        count = 0
        for number, part in enumerate(self._ready_made()):
            for batch in self._fit(part, f"{self._hook}, batch {number}"):
                yield batch
                count += batch.rows
            if self._limit is not None and count >= self._limit:
                return

    def _chosen(self) -> Iterator[Batch]:
        """Batches of chosen samples, from columns or a Dataset."""
        columns = None
        if form(self._data, self._hook) == "columns":
            columns = self._named(self._data)
        chosen = self._spread(self._total() or 0) if self._picked is None else self._picked
        for start in range(0, len(chosen), self._batch_size):
            numbers = chosen[start : start + self._batch_size]
            part = self._collated(numbers.tolist()) if columns is None else columns.select(numbers)
            yield from self._fit(part, self._hook, numbers.tolist())

    def _ready_made(self) -> Iterator[NamedArrays]:
        """The data's own batches, or the rows of them that were picked."""
        batches = self._call_user(iter, self._data)
        start = 0
        while (batch := self._call_user(next, batches, _END)) is not _END:
            part = self._named(batch)
            if self._picked is None:
                yield part
                continue
            stop = start + samples_in(part.feed, self._inputs)
            numbers = np.sort(self._picked[(self._picked >= start) & (self._picked < stop)]) - start
            start = stop
            if numbers.size:
                sizes = {array.shape[0] for array in part.feed.values() if array.ndim}
                # One whose arrays differ in length stays whole; of others the targets are not needed.
                if len(sizes) == 1 and numbers.size < max(sizes):
                    part = NamedArrays(part.feed).select(numbers)
                yield part
            if start > self._picked.max():
                return

    def _collated(self, numbers: list[int]) -> NamedArrays:
        """Samples of a Dataset as one batch."""
        samples = [self._named(self._call_user(self._data.__getitem__, number)) for number in numbers]
        feed: dict[str, Array] = {}
        for name in samples[0].feed:
            feed[name] = self._stack(name, [sample.feed[name] for sample in samples], numbers)
        target, slices = None, None
        slices_of = [sample.slices for sample in samples if sample.slices is not None]
        if slices_of:
            slices = self._stack(SLICE, slices_of, numbers)
        targets = [sample.target for sample in samples]
        if targets[0] is not None:
            try:
                target = collate(targets, lambda parts: self._stack("target", parts, numbers))
            except (KeyError, ValueError, TypeError) as error:
                raise TaskError(
                    f"the targets of {self._hook}() differ in structure: {outlined(targets[0])} and others",
                    where=f"{self._hook}: target",
                    hint="give each sample a target of the same keys",
                ) from error
        return NamedArrays(feed, target, slices)

    def _stack(self, name: str, parts: list[Array], numbers: list[int]) -> Array:
        for part, number in zip(parts, numbers, strict=True):
            if part.shape != parts[0].shape:
                shapes = f"{parts[0].shape} and {part.shape}"
                raise TaskError(
                    f"samples {numbers[0]} and {number} of {self._hook}() differ in shape: {shapes}",
                    where=f"{self._hook}: {name}",
                    hint="return ready batches of equal shapes, or set batch_size: 1",
                )
        return np.stack(parts)

    def _fit(self, part: NamedArrays, where: str, numbers: list[int] | None = None) -> Iterator[Batch]:
        """The part as it came, or split into batches of the size that the model fixes."""
        count = samples_in(part.feed, self._inputs)
        if count == 0:
            return
        if self._fixed is None:
            yield Batch(self._typed(part, where, numbers), part.target, count, slices=part.slices)
            return
        sizes = {name: array.shape[0] for name, array in part.feed.items() if array.ndim}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise TaskError(f"the columns of {self._hook}() differ in length: {lengths}", where=self._hook)
        for start in range(0, count, self._fixed):
            real = np.arange(start, min(start + self._fixed, count))
            filler = self._fixed - real.size
            filled = part.select(np.concatenate([real, np.full(filler, start)]))
            batch = part.select(real)
            yield Batch(self._typed(filled, where, numbers), batch.target, real.size, filler, batch.slices)

    def _typed(self, part: NamedArrays, where: str, numbers: list[int] | None) -> dict[str, Array]:
        feed: dict[str, Array] = {}
        for declared in self._inputs:
            feed[declared.name] = as_declared(part.feed[declared.name], declared, self._hook, where, numbers)
        return feed

    def _named(self, raw: Any) -> NamedArrays:
        return named(raw, self._inputs, self._hook)

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

    def _cannot_replay(self, why: str) -> TaskError:
        return TaskError(
            f"the reader that {self._hook}() returned cannot be replayed: {why}, and a second pass is needed",
            where=self._hook,
            hint=f"{self._hook}() is called anew for each pass: open the data inside of it, or return `list(batches)` "
            "made once; arrays and Datasets do as well",
        )
