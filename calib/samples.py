"""What a task's data hooks return, as batches a model can be fed with.

Accepted: a tuple of columns (arrays or tensors with equal first dimension, inputs first, then the target), a dict of
columns by input name, one array, a map-style Dataset of samples, or an iterable of batches, each a tuple, a dict or an
array. Tensors are told by their `detach`; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError
from layerline.pipeline.given import checked_cast
from layerline.pipeline.task import answers

Array = npt.NDArray[Any]
"""Keys of a dict batch that hold the target, unless the model has an input of that name."""

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
class Batch:
    """One run of the model.

    Attributes:
        feed: arrays by input name, in the model's types.
        target: what the metric compares with; None where the data has none.
        rows: samples in it.
        filler: rows at the end that are no samples: where the model's batch axis is fixed, a short last batch is filled
            up by repeating its first sample.
    """

    feed: dict[str, Array]
    target: Array | None
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
            for batch in self._fit(self._named(raw), f"{self._hook}, batch {number}"):
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
        if isinstance(data, tuple | Mapping) or _is_array(data):
            total = self._rows(self._named(data))
        elif isinstance(data, list):
            total = sum(self._samples_in(self._named(raw)) for raw in data)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            total = self._users(len, data)
        return total if total is None or self._limit is None else min(total, self._limit)

    def _cannot_replay(self, why: str) -> TaskError:
        return TaskError(
            f"the reader that {self._hook}() returned cannot be replayed: {why}, and a second pass is needed",
            where=self._hook,
            hint="return arrays, a list of batches, or an object whose __iter__ starts anew",
        )

    def _raw_batches(self) -> Iterator[Any]:
        data = self._data
        if isinstance(data, tuple | Mapping) or _is_array(data):
            yield from self._slices(self._named(data))
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list):
            yield from self._collated(data)
        elif hasattr(data, "__iter__"):
            batches = self._users(iter, data)
            while (batch := self._users(next, batches, _END)) is not _END:
                yield batch
        else:
            raise TaskError(
                f"{self._hook}() returned {type(data).__name__}",
                where=self._hook,
                hint="return a tuple of arrays (inputs, then target), a Dataset, or an iterable of batches",
            )

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

    def _slices(self, columns: dict[str, Array]) -> Iterator[dict[str, Array]]:
        total = self._rows(columns)
        chosen = _spread(total, self._limit)
        for start in range(0, chosen.size, self._batch_size):
            rows = chosen[start : start + self._batch_size]
            yield {k: self._narrow(k, v[rows], rows) if v.ndim else v for k, v in columns.items()}

    def _collated(self, dataset: Any) -> Iterator[dict[str, Array]]:
        chosen = _spread(self._users(len, dataset), self._limit)
        for start in range(0, chosen.size, self._batch_size):
            rows = [int(i) for i in chosen[start : start + self._batch_size]]
            samples = [self._named(self._users(dataset.__getitem__, i)) for i in rows]
            stacked = {k: self._stack(k, [s[k] for s in samples], rows) for k in samples[0]}
            yield {k: self._narrow(k, v, rows) for k, v in stacked.items()}

    def _narrow(self, name: str, part: Array, rows: Sequence[int] | npt.NDArray[np.int64]) -> Array:
        """An input's samples in the model's type, where that type holds their numbers; `rows` counts them."""
        taken = next((i for i in self._inputs if i.name == name), None)
        if taken is None or not _castable(part, taken):
            return part
        return checked_cast(part, _dtype(taken.dtype), name, self._hook, [int(r) for r in rows])

    def _stack(self, name: str, parts: list[Array], rows: list[int]) -> Array:
        for part, row in zip(parts, rows, strict=True):
            if part.shape != parts[0].shape:
                raise TaskError(
                    f"samples {rows[0]} and {row} of {self._hook}() differ in shape: {parts[0].shape} and {part.shape}",
                    where=f"{self._hook}: {name or 'target'}",
                    hint="return ready batches of equal shapes, or set batch_size: 1",
                )
        return np.stack(parts)

    def _named(self, raw: Any) -> dict[str, Array]:
        """Arrays by input name; the target, if there is one, under the empty name."""
        if isinstance(raw, Mapping):
            return self._by_name(raw)
        flat = _flatten(raw)
        if len(flat) == 2 and isinstance(flat[0], Mapping):
            return {**self._by_name(flat[0]), "": as_array(flat[1])}
        names = [i.name for i in self._inputs]
        if len(flat) not in (len(names), len(names) + 1):
            raise TaskError(
                f"{self._hook}() gives {len(flat)} arrays a batch; the model takes {len(names)}: {', '.join(names)}",
                where=self._hook,
                hint="give the inputs in this order, then optionally the target, or a dict by input name",
            )
        return {name: as_array(value) for name, value in zip([*names, ""], flat, strict=False)}

    def _by_name(self, raw: Mapping[Any, Any]) -> dict[str, Array]:
        names = {i.name for i in self._inputs}
        feed = {str(k): as_array(v) for k, v in raw.items()}
        if label := answers(feed, names):
            feed[""] = feed.pop(label)
        unknown, missing = sorted(set(feed) - names - {""}), sorted(names - set(feed))
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

    def _fit(self, arrays: dict[str, Array], where: str) -> Iterator[Batch]:
        """One batch as it came, or, where the model's batch axis is fixed, as many as it takes.

        Args:
            where: names the batch in errors.
        """
        feed, target = {k: v for k, v in arrays.items() if k}, arrays.get("")
        count = self._samples_in(feed)
        if count == 0:
            return
        if self._fixed is None:
            yield Batch(self._typed(feed, where), target, count)
            return
        total = self._rows(feed)
        for start in range(0, total, self._fixed):
            rows = np.arange(start, min(start + self._fixed, total))
            filler = self._fixed - rows.size
            chosen = np.concatenate([rows, np.full(filler, start)])
            part = {k: v[chosen] if v.ndim else v for k, v in feed.items()}
            yield Batch(self._typed(part, where), None if target is None else target[rows], rows.size, filler)

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


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _flatten(raw: Any) -> list[Any]:
    """((a, b), y) and [a, b, y] alike as [a, b, y]; a plain list of numbers is one leaf."""
    return [leaf for item in raw for leaf in _flatten(item)] if _is_container(raw) else [raw]


def _is_container(raw: Any) -> bool:
    if isinstance(raw, list):
        return any(_is_array(item) or isinstance(item, Mapping) or _is_container(item) for item in raw)
    return isinstance(raw, tuple)


def _fixed_batch(inputs: Sequence[Input]) -> int | None:
    """The size of the batch axis where the model fixes it: the static first dimension all inputs share."""
    sizes = {i.shape[0] for i in inputs if i.shape}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _spread(total: int, limit: int | None) -> npt.NDArray[np.int64]:
    chosen = total if limit is None else min(total, limit)
    return np.arange(chosen, dtype=np.int64) * total // max(chosen, 1)
