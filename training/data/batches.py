"""Batches whose order is a function of (seed, epoch, position): training can go on anywhere, with any workers.

Random draws inside a sample (augmentation) are seeded per batch as well, so 0 workers and 2 workers give the same data
and a worker has no state that a checkpoint would need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import form, mapped, rows, split, with_arrays
from layerline.pipeline.inputs.input_checks import checked_cast
from layerline.pipeline.task import Task
from layerline.training.randomness.rng_state import mix, seeded


class Batches:
    """Batches of a data hook's result, from any position on.

    Args:
        source: (x, y) arrays, a map-style Dataset of (input, target), or a re-iterable of batches.
        batch_size: samples a batch; batches that come ready-made keep their size.
        seed: orders the samples of each epoch anew; None keeps their order.
        workers: processes that load samples of a Dataset; they change nothing but the speed.
        hook: what to call the source in errors.
        rank, ranks: of each batch this process has every `ranks`-th sample from `rank` on, so that the batches are the
            same however many ranks share them.

    Attributes:
        epoch: of the next batch.
        position: of the next batch within its epoch.
        counted: samples that count in the batch that was handed out last; 0 where a rank got no share of a short batch
            and has its first sample instead, for there must be something to run.
        waited: seconds spent waiting for data so far.
    """

    def __init__(self, source: Any, *, batch_size: int, seed: int | None = 0, workers: int = 0,
                 hook: str = "train_data", rank: int = 0, ranks: int = 1) -> None:  # fmt: skip
        self.form = form(source, hook)
        if hasattr(source, "__next__"):
            raise TaskError(
                f"{hook}() gave an iterator, which cannot be replayed",
                where=hook,
                hint="give a list or a DataLoader: something that can be iterated more than once",
            )
        self.source = _in_tensors(source, hook) if self.form == "columns" else source
        self.batch_size, self.seed, self.workers, self.hook = batch_size, seed, workers, hook
        self.share = _Share(rank, ranks)
        self.epoch = self.position = self.counted = 0
        self.waited = 0.0

    @property
    def per_epoch(self) -> int | None:
        """Batches in an epoch; None where an iterable does not tell its length."""
        if self.form == "batches":
            return len(self.source) if hasattr(self.source, "__len__") else None
        return -(-self._samples // self.batch_size)

    @property
    def samples(self) -> int | None:
        """Samples in an epoch; None where the data comes in batches."""
        return None if self.form == "batches" else self._samples

    @property
    def _samples(self) -> int:
        return rows(self.source) if self.form == "columns" else len(self.source)

    def forever(self) -> Iterator[Any]:
        """Batch after batch, epoch after epoch, from the current position; `epoch` and `position` are already
        those of the batch after the one that was handed out."""
        make = {"columns": self._from_columns, "samples": self._from_samples, "batches": self._from_batches}[self.form]
        batches = make()
        while True:
            start = time.perf_counter()
            epoch, position, last, self.counted, batch = next(batches)
            self.waited += time.perf_counter() - start
            self.epoch, self.position = (epoch + 1, 0) if last else (epoch, position + 1)
            yield batch

    def one_epoch(self) -> Iterator[Any]:
        """The rest of the current epoch."""
        epoch = self.epoch
        for batch in self.forever():
            yield batch
            if self.epoch != epoch:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def _places(self) -> Iterator[tuple[int, int, bool]]:
        """(epoch, position, whether it is the epoch's last) of every batch to come."""
        per_epoch = self.per_epoch
        assert per_epoch is not None
        epoch, position = self.epoch, self.position
        while True:
            yield epoch, position, position + 1 == per_epoch
            position += 1
            if position >= per_epoch:
                epoch, position = epoch + 1, 0

    def _from_columns(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        order, ordered = _order(self._samples, self.seed, self.epoch), self.epoch
        for epoch, position, last in self._places():
            if epoch != ordered:
                order, ordered = _order(self._samples, self.seed, epoch), epoch
            chosen, counted = self.share.of(order[position * self.batch_size : (position + 1) * self.batch_size])
            yield epoch, position, last, counted, each_tensor(self.source, partial(_chosen, chosen))

    def _from_samples(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        loaded = _Seeded(self.source, self.batch_size, self.seed, self.share)
        # Its own generator: the loader must not draw its workers' seed from the model's random numbers.
        loader = DataLoader(loaded, batch_size=None, sampler=_Places(self._places), num_workers=self.workers,
                            generator=torch.Generator())  # fmt: skip
        yield from loader

    def _from_batches(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        # An iterable has no position: the batches before it are drawn again, each under its own seed.
        epoch, skipped = self.epoch, self.position
        while True:
            position, batch = 0, None
            for position, following in enumerate(self._drawn(epoch)):  # one ahead: the last batch is known as such
                if batch is not None and position > skipped:
                    yield epoch, position - 1, False, *self.share.of_batch(_in_tensors(batch))
                batch = following
            if batch is None:
                raise TaskError(
                    f"{self.hook}() gave no batches in epoch {epoch}",
                    where=self.hook,
                    hint="it must be iterable more than once",
                )
            yield epoch, position, True, *self.share.of_batch(_in_tensors(batch))
            epoch, skipped = epoch + 1, 0

    def _drawn(self, epoch: int) -> Iterator[Any]:
        with seeded(mix(self.seed or 0, epoch)):
            batches = iter(self.source)
        for position in count():
            with seeded(mix(self.seed or 0, epoch, position)):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


@dataclass(frozen=True)
class _Share:
    """What one of several ranks has of each batch."""

    rank: int
    ranks: int

    def of(self, rows: Tensor) -> tuple[Tensor, int]:
        """Its rows, and how many count."""
        if self.ranks == 1:
            return rows, len(rows)
        own = rows[self.rank :: self.ranks]
        return (own, len(own)) if len(own) else (rows[:1], 0)

    def of_batch(self, batch: Any) -> tuple[int, Any]:
        """The same of a batch that came ready-made: every tensor with the batch's first dimension is cut."""
        samples = size(batch)
        rows, counted = self.of(torch.arange(samples))
        if self.ranks == 1:
            return counted, batch

        return counted, each_tensor(batch, lambda t: t[rows] if t.ndim and len(t) == samples else t)


class _Places:
    """A sampler that never ends."""

    def __init__(self, places: Callable[[], Iterator[tuple[int, int, bool]]]) -> None:
        self._iterate = places

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        return self._iterate()


class _Seeded(Dataset[Any]):
    """A dataset of whole batches, indexed by their places, each drawn under its own seed."""

    def __init__(self, samples: Any, batch_size: int, seed: int | None, share: _Share) -> None:
        self.samples, self.batch_size, self.seed, self.share = samples, batch_size, seed, share
        self._order: tuple[int, Tensor] | None = None

    def __getitem__(self, place: tuple[int, int, bool]) -> tuple[int, int, bool, int, Any]:
        epoch, position, last = place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, _order(len(self.samples), self.seed, epoch)
        whole = self._order[1][position * self.batch_size : (position + 1) * self.batch_size]
        chosen, counted = self.share.of(whole)
        own = (self.share.rank,) if self.share.rank else ()  # ranks draw apart, and rank 0 as one process does
        with seeded(mix(self.seed or 0, epoch, position, *own)):
            return (
                epoch,
                position,
                last,
                counted,
                _in_tensors(default_collate([with_arrays(self.samples[i]) for i in chosen.tolist()])),
            )


def _order(samples: int, seed: int | None, epoch: int) -> Tensor:
    if seed is None:
        return torch.arange(samples)
    return torch.randperm(samples, generator=torch.Generator().manual_seed(mix(seed, epoch)))


def as_tensor(value: Any, where: str = "batch") -> Tensor:
    """A tensor; float64 becomes torch's default type: it is what numpy gives when nobody chose.

    Raises:
        TaskError: an array of objects or strings, or of another type that torch has not.
        ConfigError: a float64 beyond torch's default type; names its index and value.
    """
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"an array of type {value.dtype} and shape {tuple(value.shape)} cannot become a tensor",
            where=where,
            hint="give numbers in one array: .astype(np.float32), or np.int64 for classes",
        ) from error
    if tensor.dtype != torch.float64 or torch.get_default_dtype() == torch.float64:
        return tensor
    narrow = tensor.to(torch.get_default_dtype())
    if not bool(torch.isfinite(narrow).all()):
        checked_cast(tensor.detach().cpu().numpy(), np.float32, "array", where)
    return narrow


def _in_tensors(batch: Any, where: str = "batch") -> Any:
    """Arrays and lists of numbers as tensors; what is neither stays."""
    return mapped(with_arrays(batch), lambda v: as_tensor(v, where) if hasattr(v, "shape") else v)


def _chosen(chosen: Tensor, column: Tensor) -> Tensor:
    """Rows of a column; one number holds for all samples."""
    return column.index_select(0, chosen.to(column.device)) if column.ndim else column


def size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first input that has one."""
    args, kwargs, _ = split(batch)
    return rows((args, kwargs))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on `device`."""
    return each_tensor(batch, lambda t: t if t.device == device else t.to(device, non_blocking=True))


def each_tensor(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with `change` applied to its tensors; lists and tuples become tuples, mappings dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {k: each_tensor(v, change) for k, v in batch.items()}
    return tuple(each_tensor(v, change) for v in batch) if isinstance(batch, tuple | list) else batch


def example_inputs(
    task: Task, n: int = 2, forward: Callable[..., Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments for forward: the task's own example, else the first `n` samples of its eval or
    training data, read as `forward` takes them.

    Raises:
        TaskError: there is neither.
    """
    if task.has("example_inputs"):
        given = task.call("example_inputs")
        if isinstance(given, Mapping):
            return (), {k: _argument(v) for k, v in given.items()}
        return tuple(map(_argument, given if isinstance(given, tuple) else (given,))), {}
    hook = next((h for h in ("eval_data", "train_data", "calib_data") if task.has(h)), None)
    if hook is None:
        raise TaskError(
            "there is nothing to run the model on",
            where=task.path.name,
            hint="define example_inputs(), or eval_data() or train_data()",
        )
    source = task.call(hook)
    with task.blaming(f"drawing a batch of {hook}()"):
        return first_samples(source, n, hook, forward)


def _argument(given: Any) -> Any:
    """Arrays as tensors, also those in dicts, lists and tuples."""
    return pytree.tree_map(lambda v: as_tensor(v) if hasattr(v, "shape") else v, given)


def first_samples(
    source: Any, n: int, hook: str, forward: Callable[..., Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first `n` samples of a data hook's result as arguments for forward."""
    batches = Batches(source, batch_size=n, seed=None, hook=hook)
    args, kwargs, _ = split(next(iter(islice(batches.forever(), 1))), forward)

    def head(value: Any) -> Any:
        return each_tensor(value, lambda t: t[:n] if t.ndim else t)

    return tuple(map(head, args)), {k: head(v) for k, v in kwargs.items()}
