"""Which feeds to compare on: the example, real samples, other sizes of every dynamic axis, integers over a range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.export import ExportedProgram

from layerline.backends.base import Array, Feed
from layerline.layers.axes import Axes, Bounds
from layerline.layers.calls import Call
from layerline.layers.parity import Probe
from layerline.layers.probes import drawn, sizes
from layerline.layers.signature import Dim
from layerline.layers.tracing import Traced
from layerline.pipeline.errors import ConfigError, StageError

MEMORY = 64 << 20
"""Bytes that the inner values of one probe may take; an axis is not run at greater sizes."""
BEYOND = 4
"""Where no upper bound is declared, an axis is run at up to this many times the example's size."""


@dataclass(kw_only=True)
class Prober:
    """Makes probes of one exported module.

    Attributes:
        integers: declared (low, high) of integer inputs, by name.
        notes: what was left out, and why.
        dims: bounds of every named axis: as declared, else as found.
    """

    call: Call
    axes: Axes
    traced: Traced
    integers: Mapping[str, tuple[int, int]]
    notes: list[str] = field(default_factory=list)
    dims: dict[str, Dim] = field(default_factory=dict)

    def probes(self, real: Feed, count: int) -> list[Probe]:
        """All probes; the example comes first.

        Args:
            real: samples by input name, along axis 0, the example's own first.
            count: how many to take.

        Raises:
            ConfigError: the module itself refuses a size or integer that is declared.
            StageError: an axis is declared wider than the traced program holds for.
        """
        found = [Probe(label="example", feed=self.call.feed, outputs=self.call.run(self.call.feed))]
        found += self._samples(real, count)
        for name, bounds in self.axes.bounds.items():
            found += self._sizes(name, bounds)
        return found + self._integers()

    def _samples(self, real: Feed, count: int) -> list[Probe]:
        total = min((len(a) for a in real.values() if a.ndim), default=0)
        if total == 0 or count == 0:
            return []
        fixed = {n: a.shape[0] for n, a in self.call.feed.items() if a.ndim and (n, 0) not in self.axes.names}
        size = next(iter(fixed.values()), min(count, total))
        feed = {n: a[total - size :] if a.ndim else a for n, a in real.items()}
        if why := self._misfit(feed):
            self.notes.append(f"samples of the data are not among the probes: {why}")
            return []
        outputs = self._run(feed)
        if isinstance(outputs, str):
            raise StageError(f"forward() itself fails on samples of its own data: {outputs}", where="probes")
        return [Probe(label=f"{size} samples", feed=feed, outputs=outputs)]

    def _misfit(self, feed: Feed) -> str | None:
        if feed.keys() != self.call.feed.keys():
            return f"they have the inputs {', '.join(feed)}, the model takes {', '.join(self.call.feed)}"
        for name, array in self.call.feed.items():
            free = [axis for axis in range(array.ndim) if (name, axis) in self.axes.names]
            same = feed[name].ndim == array.ndim and all(
                axis in free or feed[name].shape[axis] == array.shape[axis] for axis in range(array.ndim)
            )
            if not same or feed[name].dtype != array.dtype:
                return f"{name} is {feed[name].dtype}{feed[name].shape}, the example's {array.dtype}{array.shape}"
        return None

    def _sizes(self, name: str, bounds: Bounds) -> list[Probe]:
        seen, step = self.axes.size(self.call.feed, name), bounds.multiple
        holds = self.traced.ranges.get(name, (0, None))[1]
        if bounds.max is not None and holds is not None and bounds.max > holds:
            raise StageError(
                f"{name} is declared up to {bounds.max}, but the traced model only holds up to {holds}",
                where="input {}, axis {}".format(*self.axes.places(name)[0]),
                hint=f"forward() branches on this size; make it branch on values instead, or declare max: {holds}",
            )
        limit = max(seen, seen * MEMORY // max(activation_bytes(self.traced.program), 1))
        low, high = bounds.min or step, bounds.max or min(BEYOND * seen, holds or BEYOND * seen)
        wanted = sizes(low, high, seen, step, limit)
        if bounds.max is None and holds is not None and holds + step <= limit:
            wanted.append(holds + step)  # does the module itself end there, or only what was traced of it?
        found = [p for size in wanted if (p := self._sized(name, size, bounds)) is not None]
        ran = [self.axes.size(p.feed, name) for p in found] + [seen]
        if high > limit:
            self.notes.append(f"{name} was run up to {max(ran)} of {high}: more would take too much memory")
        self.dims[name] = Dim(min=bounds.min or min(ran), max=bounds.max or holds or max(ran), multiple=step)
        return found

    def _sized(self, name: str, size: int, bounds: Bounds) -> Probe | None:
        feed = self.axes.resized(self.call.feed, {name: size})
        outputs = self._run(feed)
        if not isinstance(outputs, str):
            return Probe(label=f"{name}={size}", feed=feed, outputs=outputs)
        declared = (bounds.min is not None and size >= bounds.min) and (bounds.max is not None and size <= bounds.max)
        if declared or size in (bounds.min, bounds.max):
            raise ConfigError(
                f"{name} is declared from {bounds.min} to {bounds.max}; forward() itself fails at {size}: {outputs}",
                where="dynamic.{}.{}".format(*self.axes.places(name)[0]),
            )
        self.notes.append(f"forward() itself refuses {name}={size}: {outputs}")
        return None

    def _integers(self) -> list[Probe]:
        rng = np.random.default_rng(0)
        found = []
        for name, array in self.call.feed.items():
            if array.dtype.kind not in "iu" or not array.size:
                continue
            low, high = self.integers.get(name) or _widely(array)
            outputs = self._run(feed := {**self.call.feed, name: drawn(array, low, high, rng)})
            label = f"{name} over [{low}, {high}]"
            if not isinstance(outputs, str):
                found.append(Probe(label=label, feed=feed, outputs=outputs))
            elif name in self.integers:
                raise ConfigError(f"forward() itself fails on {label}: {outputs}", where=f"ranges.{name}")
            else:
                self.notes.append(f"forward() itself refuses {label}; declare its range to have it probed: {outputs}")
        return found

    def _run(self, feed: Feed) -> dict[str, Array] | str:
        """The module's outputs, or what it raised."""
        try:
            return self.call.run(feed)
        except Exception as error:  # noqa: BLE001 - which sizes and values the user's module refuses is the question
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def activation_bytes(program: ExportedProgram) -> int:
    """Bytes of all inner values at the example's size."""
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "call_function"]
    tensors: Iterable[torch.Tensor] = (v for v in values if isinstance(v, torch.Tensor))
    return sum(_count(t) * t.element_size() for t in tensors)


def _count(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        hint = size if isinstance(size, int) else size.node.hint
        count *= hint if hint is not None else 1
    return count


def _widely(array: Array) -> tuple[int, int]:
    """A range around what the example holds; with negatives wherever the type has them."""
    top = min(max(int(array.max()), 4), int(np.iinfo(array.dtype).max) - 1)
    return (-top if array.dtype.kind == "i" else 0), top
