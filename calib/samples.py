"""What a task's data hooks return, as batches a model can be fed with, each array under its input's name.

pipeline/inputs/batches.py says what is accepted, and what it means. Tensors are told by their `detach`; torch is not
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import (
    answers,
    collate,
    form,
    is_array,
    leaves,
    mapped,
    outlined,
    rows,
    with_arrays,
)
from layerline.pipeline.inputs.input_checks import checked_cast

Array = npt.NDArray[Any]

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
    """A batch, a sample or columns: arrays by input name, and the target; None where there is none."""

    feed: dict[str, Array]
    target: Any

    def taken(self, chosen: npt.NDArray[np.int64]) -> _Named:
        """Those rows; an array without axes holds for all."""
        return _Named({k: _taken(v, chosen) for k, v in self.feed.items()}, self.target_of(chosen))

    def target_of(self, chosen: npt.NDArray[np.int64]) -> Any:
        """The target of those rows."""
        return None if self.target is None else mapped(self.target, lambda v: _taken(v, chosen))


@dataclass(frozen=True, eq=False)
class Batch:
    """One run of the model.

    Attributes:
        feed: arrays by input name, in the model's types.
        target: what the metric compares with: an array, or arrays in tuples and dicts; None where the data has none.
        rows: samples in it.
        filler: rows at the end that are no samples: where the model's batch axis is fixed, a short last batch is filled
            up by repeating its first sample.
    """

    feed: dict[str, Array]
    target: Any
    rows: int
    filler: int = 0

    def real(self, array: Array) -> Array:
        """An array that this batch gave, without the filler."""
        fed = self.rows + self.filler
        return array[: self.rows] if self.filler and array.ndim and array.shape[0] == fed else array


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
    ) -> None:
        self._data, self._inputs, self._hook = data, tuple(inputs), hook
        self._limit, self._purpose = limit, purpose
        self._fixed = _fixed_batch(self._inputs)
        self._batch_size = self._fixed or batch_size
        self._seen: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        one_shot = isinstance(self._data, Iterator)
        if one_shot and self._seen is not None:
            raise self._cannot_replay("it is used up")
        rows = 0
        for number, raw in enumerate(self._raw_batches()):
            for batch in self._fit(raw, f"{self._hook}, batch {number}"):
                yield batch
                rows += batch.rows
            if self._limit is not None and rows >= self._limit:
                break
        if rows == 0:
            if self._seen:
                raise self._cannot_replay("the second pass gave nothing")
            raise TaskError(
                f"0 {self._purpose} samples: {self._hook}() gave none",
                where=self._hook,
                hint="return arrays, a Dataset or batches with at least one sample",
            )
        self._seen = rows

    def count(self) -> int | None:
        """How many samples there will be, told without running through them; None where only that would tell.

        Raises:
            TaskError: as on iterating.
        """
        data, total = self._data, None
        if isinstance(data, list) and not data:
            total = 0
        elif (kind := form(data, self._hook)) == "columns":
            total = rows(with_arrays(data))
        elif kind == "samples":
            total = self._users(len, data)
        elif isinstance(data, list):
            total = sum(self._samples_in(self._named(with_arrays(raw)).feed) for raw in data)
        return total if total is None or self._limit is None else min(total, self._limit)

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
            yield from self._slices(self._named(with_arrays(data)), rows(with_arrays(data)))
        elif kind == "samples":
            yield from self._collated(data)
        else:
            batches = self._users(iter, data)
            while (batch := self._users(next, batches, _END)) is not _END:
                yield self._named(with_arrays(batch))

    def _users(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls into the user's code, whose exceptions become TaskErrors that name the hook."""
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

    def _slices(self, columns: _Named, total: int) -> Iterator[_Named]:
        chosen = _spread(total, self._limit)
        for start in range(0, chosen.size, self._batch_size):
            numbers = chosen[start : start + self._batch_size]
            yield self._narrow(columns.taken(numbers), numbers)

    def _collated(self, dataset: Any) -> Iterator[_Named]:
        chosen = _spread(self._users(len, dataset), self._limit)
        for start in range(0, chosen.size, self._batch_size):
            numbers = [int(i) for i in chosen[start : start + self._batch_size]]
            samples = [self._named(with_arrays(self._users(dataset.__getitem__, i))) for i in numbers]
            feed = {k: self._stack(k, [s.feed[k] for s in samples], numbers) for k in samples[0].feed}
            yield self._narrow(_Named(feed, self._stacked_targets([s.target for s in samples], numbers)), numbers)

    def _narrow(self, named: _Named, numbers: Sequence[int] | npt.NDArray[np.int64]) -> _Named:
        """The inputs in the model's types, where those hold their values; `numbers` are those of the samples."""
        samples, feed = [int(n) for n in numbers], dict(named.feed)
        for taken in self._inputs:
            part = feed[taken.name]
            if part.ndim and _castable(part, taken):
                feed[taken.name] = checked_cast(part, _dtype(taken.dtype), taken.name, self._hook, samples)
        return _Named(feed, named.target)

    def _stacked_targets(self, targets: list[Any], numbers: list[int]) -> Any:
        if targets[0] is None:
            return None
        try:
            return collate(targets, lambda parts: self._stack("", parts, numbers))
        except (KeyError, ValueError, TypeError) as error:
            raise TaskError(
                f"the targets of {self._hook}() differ in structure: {outlined(targets[0])} and others",
                where=f"{self._hook}: target",
                hint="give each sample a target of the same keys",
            ) from error

    def _stack(self, name: str, parts: list[Array], rows: list[int]) -> Array:
        for part, row in zip(parts, rows, strict=True):
            if part.shape != parts[0].shape:
                raise TaskError(
                    f"samples {rows[0]} and {row} of {self._hook}() differ in shape: {parts[0].shape} and {part.shape}",
                    where=f"{self._hook}: {name or 'target'}",
                    hint="return ready batches of equal shapes, or set batch_size: 1",
                )
        return np.stack(parts)

    def _named(self, raw: Any) -> _Named:
        """Arrays by input name, and the target."""
        if isinstance(raw, Mapping):
            names = {i.name for i in self._inputs}
            label = answers([str(k) for k in raw], names)
            target = _arrays(raw[label]) if label else None
            return _Named(self._by_name({k: v for k, v in raw.items() if str(k) != label}), target)
        items = list(raw) if isinstance(raw, tuple | list) else [raw]
        if items and len(items) <= 2 and isinstance(items[0], Mapping):
            return _Named(self._by_name(items[0]), _arrays(items[1]) if len(items) == 2 else None)
        names_in_order = [i.name for i in self._inputs]
        for inputs, target in ((items, None), (items[:-1], items[-1] if items else None)):
            flat = list(leaves(inputs))
            if len(flat) == len(names_in_order) > 0 or (not names_in_order and not flat):
                feed = {n: as_array(v) for n, v in zip(names_in_order, flat, strict=True)}
                return _Named(feed, None if target is None else _arrays(target))
        raise TaskError(
            f"{self._hook}() gives {len(list(leaves(items)))} arrays a batch, {outlined(raw)}; "
            f"the model takes {len(names_in_order)}: {', '.join(names_in_order)}",
            where=self._hook,
            hint="give the inputs in this order, then optionally the target, or a dict by input name",
        )

    def _by_name(self, raw: Mapping[Any, Any]) -> dict[str, Array]:
        names = [i.name for i in self._inputs]
        held = {str(k): v for k, v in raw.items()}
        # What a forward() that takes a whole dict is exported with: its parameter's name comes before each key.
        prefixes = {n.removesuffix(k) for n in names for k in held if n != k and n.endswith(f"_{k}")}
        whole = next((p for p in sorted(prefixes) if {p + k for k in held} == set(names)), "")
        feed = {whole + k: as_array(v) for k, v in held.items()}
        unknown, missing = sorted(set(feed) - set(names)), sorted(set(names) - set(feed))
        if unknown or missing:
            raise TaskError(
                f"unknown input {unknown[0]!r}" if unknown else f"input {missing[0]!r} is missing",
                where=self._hook,
                hint=f"the model takes {', '.join(sorted(names))}; a target goes under 'label'",
            )
        return feed

    def _rows(self, arrays: Mapping[str, Array]) -> int:
        sizes = {k: v.shape[0] for k, v in arrays.items() if v.ndim}
        if len(set(sizes.values())) > 1:
            seen = ", ".join(f"{k or 'target'} {n}" for k, n in sizes.items())
            raise TaskError(f"the columns of {self._hook}() differ in length: {seen}", where=self._hook)
        return next(iter(sizes.values()), 1)

    def _samples_in(self, feed: Mapping[str, Array]) -> int:
        """Samples of a batch: the first dimension of the first input that has one."""
        first = next((feed[i.name] for i in self._inputs if i.shape and feed[i.name].ndim), None)
        return 1 if first is None else int(first.shape[0])

    def _fit(self, named: _Named, where: str) -> Iterator[Batch]:
        """One batch as it came, or, where the model's batch axis is fixed, as many as it takes.

        Args:
            where: names the batch in errors.
        """
        count = self._samples_in(named.feed)
        if count == 0:
            return
        if self._fixed is None:
            yield Batch(self._typed(named.feed, where), named.target, count)
            return
        total = self._rows(named.feed)
        for start in range(0, total, self._fixed):
            numbers = np.arange(start, min(start + self._fixed, total))
            filler = self._fixed - numbers.size
            part = named.taken(np.concatenate([numbers, np.full(filler, start)])).feed
            yield Batch(self._typed(part, where), named.target_of(numbers), numbers.size, filler)

    def _typed(self, feed: Mapping[str, Array], where: str) -> dict[str, Array]:
        return {i.name: _checked(feed[i.name], i, self._hook, where) for i in self._inputs}


def as_array(value: Any) -> Array:
    """An array of whatever holds numbers; tensors are detached and brought to the CPU."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16; float32 holds every one of its values.
        value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    return np.asarray(value)


def _checked(array: Array, expected: Input, hook: str, where: str) -> Array:
    fits = array.ndim == len(expected.shape) and all(
        isinstance(want, str) or want == have for want, have in zip(expected.shape, array.shape, strict=True)
    )
    if not fits:
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
    """Whether the types are of one kind; whether each number fits is `checked_cast`'s to say."""
    dtype = _dtype(expected.dtype)
    return array.dtype == dtype or bool(np.can_cast(array.dtype, dtype, "same_kind"))


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        raise TaskError("bfloat16 inputs cannot be fed from numpy", hint="export with float32 inputs")
    return np.dtype(name)


def _arrays(target: Any) -> Any:
    """A target as arrays; tuples and dicts stay, and a list without arrays in it becomes one."""
    if isinstance(target, Mapping):
        return {k: _arrays(v) for k, v in target.items()}
    nested = isinstance(target, list) and any(is_array(v) or isinstance(v, Mapping | tuple) for v in target)
    if isinstance(target, tuple) or nested:
        return tuple(_arrays(v) for v in target)
    return as_array(target)


def _taken(array: Array, chosen: npt.NDArray[np.int64]) -> Array:
    return array[chosen] if array.ndim else array


def _fixed_batch(inputs: Sequence[Input]) -> int | None:
    """The size of the batch axis where the model fixes it: the static first dimension all inputs share."""
    sizes = {i.shape[0] for i in inputs if i.shape}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _spread(total: int, limit: int | None) -> npt.NDArray[np.int64]:
    chosen = total if limit is None else min(total, limit)
    return np.arange(chosen, dtype=np.int64) * total // max(chosen, 1)
