"""Which feeds to compare on: the example, real samples, other sizes of every dynamic axis, integers over a range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.export import ExportedProgram

from layerline.backends.base import Array, Feed
from layerline.layers.axes import Axes
from layerline.layers.calls import Call
from layerline.layers.parity import Probe
from layerline.layers.probes import drawn
from layerline.layers.signature import Dim
from layerline.layers.tracing import Traced
from layerline.pipeline.errors import ConfigError, StageError

MEMORY = 64 << 20
"""Bytes that the inner values of one probe should stay within; greater sizes of an axis are not run."""
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
        example = Probe(label="example", feed=self.call.feed, outputs=self.call.results)
        return [example, *self._samples(real, count), *self._sizes(), *self._integers()]

    def narrower(self, failed: Sequence[Probe]) -> list[Probe]:
        """For probes that vary several axes at once, one probe per axis: which of them is at fault?"""
        several = {(n, s) for p in failed if len(p.sizes) > 1 for n, s in p.sizes.items()}
        alone = [self._sized({n: s}) for n, s in sorted(several) if s != self.axes.size(self.call.feed, n)]
        return [p for p in alone if isinstance(p, Probe)]

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

    def _sizes(self) -> list[Probe]:
        """All axes at their least and one step above, each at its greatest with the others least, what lies beyond."""
        seen = {n: self.axes.size(self.call.feed, n) for n in self.axes.bounds}
        low, high, beyond = {}, {}, {}
        for name, bounds in self.axes.bounds.items():
            holds = self._holds(name)
            low[name] = bounds.min or self._least(name)
            high[name] = bounds.max or min(BEYOND * seen[name], holds or BEYOND * seen[name])
            if bounds.max is None and holds is not None:
                # Does the module itself end there, or only what was traced of it?
                beyond[name] = holds + bounds.multiple
        next_up = {n: low[n] + b.multiple * (1 + (low[n] + b.multiple == seen[n])) for n, b in self.axes.bounds.items()}
        up = {n: size for n, size in next_up.items() if size <= high[n]}
        top = {n: self._top(n, seen, low, high[n]) for n in seen}
        wanted = [low, up, *({**low, n: top[n]} for n in seen)]
        wanted += [{n: s} for n, s in beyond.items() if s <= self._room(n, seen, seen)]
        found = self._each(wanted, seen)
        for name, bounds in self.axes.bounds.items():
            ran = [seen[name], *(p.sizes[name] for p in found if name in p.sizes)]
            if high[name] > max(ran):
                self.notes.append(f"{name} was run up to {max(ran)} of {high[name]}: more would take too much memory")
            most = bounds.max or self._holds(name) or max(ran)
            self.dims[name] = Dim(min=low[name], max=most, multiple=bounds.multiple)
        return found

    def _holds(self, name: str) -> int | None:
        """The greatest size the traced program holds for; None where it has no end."""
        holds, declared = self.traced.ranges.get(name, (0, None))[1], self.axes.bounds[name].max
        if declared is not None and holds is not None and declared > holds:
            raise StageError(
                f"{name} is declared up to {declared}, but the traced model only holds up to {holds}",
                where="input {}, axis {}".format(*self.axes.places(name)[0]),
                hint=f"forward() branches on this size; make it branch on values instead, or declare max: {holds}",
            )
        return holds

    def _least(self, name: str) -> int:
        """The smallest size that the module itself takes: one step, two, four, …"""
        seen, size = self.axes.size(self.call.feed, name), self.axes.bounds[name].multiple
        while size < seen and isinstance(refused := self._sized({name: size}), str):
            self.notes.append(f"forward() itself refuses {name}={size}: {refused}")
            size *= 2
        return min(size, seen)

    def _top(self, name: str, seen: Mapping[str, int], low: Mapping[str, int], high: int) -> int:
        """The greatest size that memory allows while the other axes are at their least; the next one up in any case."""
        step = self.axes.bounds[name].multiple
        room = max(self._room(name, seen, low), seen[name] + step)
        return min(high, room) // step * step

    def _room(self, name: str, seen: Mapping[str, int], others: Mapping[str, int]) -> int:
        rest = math.prod(others[n] / seen[n] for n in seen if n != name)
        return int(seen[name] * MEMORY / max(activation_bytes(self.traced.program) * rest, 1))

    def _each(self, wanted: Sequence[Mapping[str, int]], seen: Mapping[str, int]) -> list[Probe]:
        """Probes at the wanted sizes, each once; what the module refuses together is tried axis by axis."""
        found: dict[str, Probe] = {}
        pending = [{n: s for n, s in sizes.items() if s != seen[n]} for sizes in wanted]
        while pending:
            sizes = pending.pop(0)
            label = _label(sizes)
            if not sizes or label in found:
                continue
            made = self._sized(sizes)
            if isinstance(made, Probe):
                found[label] = made
            elif len(sizes) > 1:
                pending += [{n: s} for n, s in sizes.items()]
            else:
                self._refused(*next(iter(sizes.items())), made)
        return list(found.values())

    def _refused(self, name: str, size: int, why: str) -> None:
        bounds, seen = self.axes.bounds[name], self.axes.size(self.call.feed, name)
        if (bounds.max if size > seen else bounds.min) is not None:
            raise ConfigError(
                f"{name} is declared from {bounds.min} to {bounds.max}; forward() itself fails at {size}: {why}",
                where="dynamic.{}.{}".format(*self.axes.places(name)[0]),
            )
        self.notes.append(f"forward() itself refuses {name}={size}: {why}")

    def _sized(self, sizes: Mapping[str, int]) -> Probe | str:
        """A probe at these sizes, or what the module raises at them."""
        feed = self.axes.resized(self.call.feed, sizes)
        outputs = self._run(feed)
        if isinstance(outputs, str):
            return outputs
        return Probe(label=_label(sizes), feed=feed, outputs=outputs, sizes=sizes)

    def _integers(self) -> list[Probe]:
        """One probe over all declared ranges, and one for each integer input whose range nobody declared."""
        rng = np.random.default_rng(0)
        whole = {n: a for n, a in self.call.feed.items() if a.dtype.kind in "iu" and a.size}
        unknown = [{n: _widely(a)} for n, a in whole.items() if n not in self.integers]
        found = []
        for ranges in [*([dict(self.integers)] if self.integers else []), *unknown]:
            changed = {n: drawn(whole[n], low, high, rng) for n, (low, high) in ranges.items() if n in whole}
            label = ", ".join(f"{n} over [{low}, {high}]" for n, (low, high) in ranges.items())
            outputs = self._run(feed := {**self.call.feed, **changed})
            if not isinstance(outputs, str):
                found.append(Probe(label=label, feed=feed, outputs=outputs))
            elif ranges.keys() <= self.integers.keys():
                raise ConfigError(f"forward() itself fails on {label}: {outputs}", where="ranges")
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
    return sum(_count(t) * t.element_size() for t in values if isinstance(t, torch.Tensor))


def _count(tensor: torch.Tensor) -> int:
    hints = (size if isinstance(size, int) else size.node.hint for size in tensor.shape)
    return math.prod(1 if h is None else int(h) for h in hints)


def _label(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{n}={s}" for n, s in sizes.items())


def _widely(array: Array) -> tuple[int, int]:
    """A range around what the example holds; with negatives wherever the type has them."""
    top = min(max(int(array.max()), 4), int(np.iinfo(array.dtype).max) - 1)
    return (-top if array.dtype.kind == "i" else 0), top
