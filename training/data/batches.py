"""Batches in an order that depends only on (seed, epoch, position), so that training can resume at any batch. Random
draws inside a sample (augmentation) are seeded per batch, too: the number of workers doesn't change the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import form, mapped, rows, split, with_arrays
from layerline.pipeline.inputs.input_checks import checked_cast
from layerline.pipeline.task import EXAMPLE_HOOKS, Task
from layerline.training.randomness.rng_state import mix, seeded


class Batches:
    """Batches of a data hook's result, from any position on.

    Args:
        source: (x, y) arrays, a map-style Dataset of (input, target), or a re-iterable of ready batches.
        seed: shuffles the samples of each epoch; None keeps their order.
        workers: processes that load samples of a Dataset.
        hook: name of the source in errors.
        rank, ranks: this process gets every `ranks`-th sample of each batch, beginning at `rank`, so that the batches
            don't depend on the number of ranks.
    """

    def __init__(self, source: Any, *, batch_size: int, seed: int | None = 0, workers: int = 0,
                 hook: str = "train_data", rank: int = 0, ranks: int = 1) -> None:  # fmt: skip
        self.form = form(source, hook)
        if hasattr(source, "__next__"):
            hint = "give a list or a DataLoader: something that can be iterated more than once"
            raise TaskError(f"{hook}() gave an iterator, which cannot be replayed", where=hook, hint=hint)
        self.source = source
        self.samples: int | None = None  # in an epoch; None where the data comes in batches
        if self.form == "columns":
            self.source = _in_tensors(source, hook)
            self.samples = rows(self.source)
        elif self.form == "samples":
            self.samples = len(source)
        self.batch_size, self.seed, self.workers, self.hook = batch_size, seed, workers, hook
        self.share = _Share(rank, ranks)
        self.epoch = self.position = 0  # of the next batch
        # Samples in this rank's share of the last batch. A rank without a share gets the first sample and counts 0,
        # since every rank must run a forward pass.
        self.counted = 0
        self.waited = 0.0  # seconds spent waiting for data so far

    @property
    def per_epoch(self) -> int | None:
        """Batches in an epoch; None where an iterable has no length."""
        if self.samples is not None:
            return -(-self.samples // self.batch_size)
        if hasattr(self.source, "__len__"):
            return len(self.source)
        return None

    def forever(self) -> Iterator[Any]:
        """Batches without end from the current position on. While the caller has a batch, `epoch` and `position` are
        those of the batch after it."""
        sources = {"columns": self._from_columns, "samples": self._from_samples, "batches": self._from_batches}
        batches = sources[self.form]()
        while True:
            start = time.perf_counter()
            self.epoch, self.position, last, self.counted, batch = next(batches)
            self.waited += time.perf_counter() - start
            self.position += 1
            if last:
                self.epoch, self.position = self.epoch + 1, 0
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
        """(epoch, position, whether it is the epoch's last one) of the batches to come, without end."""
        per_epoch = self.per_epoch
        assert per_epoch is not None
        epoch, position = self.epoch, self.position
        while True:
            yield epoch, position, position + 1 == per_epoch
            position += 1
            if position >= per_epoch:
                epoch, position = epoch + 1, 0

    def _from_columns(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        assert self.samples is not None
        for epoch, position, last in self._places():
            order = _order(self.samples, self.seed, epoch)
            rows, counted = self.share.of(order[position * self.batch_size : (position + 1) * self.batch_size])
            yield epoch, position, last, counted, selected(self.source, rows)

    def _from_samples(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        loaded = _Seeded(self.source, self.batch_size, self.seed, self.share)
        # With a generator of its own the loader doesn't draw its workers' seed from the model's random numbers.
        loader = DataLoader(loaded, batch_size=None, sampler=self._places(), num_workers=self.workers,
                            generator=torch.Generator())  # fmt: skip
        yield from loader

    def _from_batches(self) -> Iterator[tuple[int, int, bool, int, Any]]:
        # An iterable can't start at a position: the batches before it are drawn again, each under its own seed.
        epoch, skipped = self.epoch, self.position
        while True:
            position, batch = 0, None
            # Drawing is one batch ahead, so that the last batch of an epoch is recognised.
            for position, following in enumerate(self._drawn(epoch)):
                if batch is not None and position > skipped:
                    yield epoch, position - 1, False, *self.share.of_batch(_in_tensors(batch))
                batch = following
            if batch is None:
                hint = "it must be iterable more than once"
                raise TaskError(f"{self.hook}() gave no batches in epoch {epoch}", where=self.hook, hint=hint)
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


class _Share(NamedTuple):
    """One rank's share of each batch."""

    rank: int
    ranks: int

    def of(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rank's rows, and how many of them count."""
        if self.ranks == 1:
            return rows, len(rows)
        share = rows[self.rank :: self.ranks]
        if not len(share):
            return rows[:1], 0
        return share, len(share)

    def of_batch(self, batch: Any) -> tuple[int, Any]:
        """The same of a ready-made batch."""
        samples = size(batch)
        rows, counted = self.of(torch.arange(samples))
        if self.ranks == 1:
            return counted, batch
        return counted, selected(batch, rows, samples)


class _Seeded(Dataset[Any]):
    """A dataset whose items are batches, indexed by their places and drawn under seeds of their own."""

    def __init__(self, samples: Any, batch_size: int, seed: int | None, share: _Share) -> None:
        self.samples, self.batch_size, self.seed, self.share = samples, batch_size, seed, share

    def __getitem__(self, place: tuple[int, int, bool]) -> tuple[int, int, bool, int, Any]:
        epoch, position, last = place
        order = _order(len(self.samples), self.seed, epoch)
        rows, counted = self.share.of(order[position * self.batch_size : (position + 1) * self.batch_size])
        seed_parts = [self.seed or 0, epoch, position]
        if self.share.rank:  # each rank draws its own numbers, and rank 0 those of a single process
            seed_parts.append(self.share.rank)
        with seeded(mix(*seed_parts)):
            samples = [with_arrays(self.samples[i]) for i in rows.tolist()]
            batch = _in_tensors(default_collate(samples))
        return epoch, position, last, counted, batch


@lru_cache(maxsize=2)
def _order(samples: int, seed: int | None, epoch: int) -> Tensor:
    if seed is None:
        return torch.arange(samples)
    return torch.randperm(samples, generator=torch.Generator().manual_seed(mix(seed, epoch)))


def as_tensor(value: Any, where: str = "batch") -> Tensor:
    """A tensor. float64, which is numpy's default and rarely a choice, becomes torch's default type."""
    try:
        if not isinstance(value, Tensor):
            value = torch.from_numpy(np.asarray(value, order="C"))  # ascontiguousarray() makes a list of a number
    except (TypeError, ValueError) as error:
        what = f"an array of type {value.dtype} and shape {tuple(value.shape)} cannot become a tensor"
        hint = "give numbers in one array: .astype(np.float32), or np.int64 for classes"
        raise TaskError(what, where=where, hint=hint) from error
    tensor: Tensor = value
    if tensor.dtype != torch.float64 or torch.get_default_dtype() == torch.float64:
        return tensor
    narrow = tensor.to(torch.get_default_dtype())
    if not bool(torch.isfinite(narrow).all()):
        checked_cast(tensor.detach().cpu().numpy(), np.float32, "array", where)
    return narrow


def _in_tensors(batch: Any, where: str = "batch") -> Any:
    """Arrays and lists of numbers as tensors; other values unchanged."""
    return mapped(with_arrays(batch), partial(_array_as_tensor, where=where))


def _array_as_tensor(value: Any, where: str = "batch") -> Any:
    if hasattr(value, "shape"):  # arrays of numpy and the like
        return as_tensor(value, where)
    return value


def size(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first input that has one."""
    args, kwargs, _ = split(batch)
    return rows((args, kwargs))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on `device`."""
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def each_tensor(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with `change` applied to its tensors; lists and tuples become tuples, mappings dicts."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        return leaf

    return mapped(batch, changed)


def selected(batch: Any, rows: Tensor, samples: int | None = None) -> Any:
    """Rows of every tensor, or of those with so many `samples`. A single number holds for all samples."""

    def select(tensor: Tensor) -> Tensor:
        if not tensor.ndim or (samples is not None and len(tensor) != samples):
            return tensor
        indices = rows.to(tensor.device)
        # index_select is faster, but its result is row-major: channels_last would be lost.
        if tensor.is_contiguous():
            return tensor.index_select(0, indices)
        return tensor[indices]

    return each_tensor(batch, select)


def leading(batch: Any, count: int) -> Any:
    """The first rows of every tensor: fewer where it has fewer, as a mask that holds for all samples."""
    return each_tensor(batch, lambda tensor: tensor[:count] if tensor.ndim else tensor)


def example_inputs(
    task: Task, n: int = 2, forward: Callable[..., Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments for forward: the task's example, or the first `n` samples of its eval or training
    data, in the form that `forward` takes."""
    if task.has("example_inputs"):
        example = task.call("example_inputs")
        # A user's own Mapping is a leaf to pytree, so its values are converted one by one.
        if isinstance(example, Mapping):
            return (), {name: pytree.tree_map(_array_as_tensor, value) for name, value in example.items()}
        if not isinstance(example, tuple):
            example = (example,)
        return tuple(pytree.tree_map(_array_as_tensor, value) for value in example), {}
    hooks = [hook for hook in EXAMPLE_HOOKS if task.has(hook)]
    if not hooks:
        hint = "define example_inputs(), or eval_data() or train_data()"
        raise TaskError("there is nothing to run the model on", where=task.path.name, hint=hint)
    source = task.call(hooks[0])
    with task.blaming(f"drawing a batch of {hooks[0]}()"):
        return first_samples(source, n, hooks[0], forward)


def first_samples(
    source: Any, n: int, hook: str, forward: Callable[..., Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first `n` samples of a data hook's result as arguments for forward."""
    batch = next(Batches(source, batch_size=n, seed=None, hook=hook).forever())
    args, kwargs, _ = split(batch, forward)
    first: tuple[tuple[Any, ...], dict[str, Any]] = leading((args, kwargs), n)
    return first
