"""Which feeds to compare on: the example, real samples, other sizes of every dynamic axis, integers over a range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from layerline.backends.base import Array, Feed
from layerline.export import padded_masks, trace_guards
from layerline.export.dynamic_axes import Axes, Bounds
from layerline.export.example_call import Call
from layerline.export.probe import Probe
from layerline.export.probe_files import drawn
from layerline.export.signature import Dim
from layerline.export.torch_export import Traced, quiet
from layerline.export.trace_guards import Guard, Span
from layerline.export.trace_memory import activation_bytes
from layerline.pipeline.errors import ConfigError, StageError, brief
from layerline.pipeline.report import Gate

MEMORY = 64 << 20
"""Bytes that the inner values of one probe should stay within; greater sizes of an axis are not run."""
GUARDED = 256 << 20
"""Bytes that may be spent on a size at which forward() is known to branch."""
TRACES = 4
"""Times that forward() is traced again at most, to see how it branches further."""
STEP = 128
"""The greatest step of an axis that is looked for."""
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
    _spans: dict[str, Span] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seen = {n: self.axes.size(self.call.feed, n) for n in self.axes.bounds}
        self._regions: list[Sequence[Guard]] = [self.traced.guards]

    def probes(self, real: Feed, count: int) -> list[Probe]:
        """All probes; the example comes first.

        Args:
            real: samples by input name, along axis 0, the example's own first.
            count: how many to take.

        Raises:
            ConfigError: the module itself refuses a size or integer that is declared.
            StageError: it fails on samples of its own data.
        """
        example = Probe(label="example", feed=self.call.feed, outputs=self.call.results)
        return [example, *self._samples(real, count), *self._sizes(), *self._integers(), *self._masks()]

    def narrower(self, failed: Sequence[Probe]) -> list[Probe]:
        """For probes that vary several axes at once, one probe per axis: which of them is at fault?"""
        several = {(n, s) for p in failed if len(p.sizes) > 1 for n, s in p.sizes.items()}
        alone = [self._sized({n: s}) for n, s in sorted(several) if s != self._seen[n]]
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
        """All axes at their least and a step above, each at its greatest with the others least; what breaks a guard."""
        self._find_steps()
        seen, low, high = self._seen, dict[str, int](), dict[str, int]()
        for name, bounds in self.axes.bounds.items():
            low[name] = bounds.min or self._least(name)
            high[name] = bounds.max or min(BEYOND * seen[name], self._holds(name) or BEYOND * seen[name])
        next_up = {n: low[n] + b.multiple * (1 + (low[n] + b.multiple == seen[n])) for n, b in self.axes.bounds.items()}
        up = {n: size for n, size in next_up.items() if size <= high[n]}
        top = {n: self._top(n, low, high[n]) for n in seen}
        found = self._each([low, up, *({**low, n: top[n]} for n in seen)])
        for name, bounds in self.axes.bounds.items():
            ran = [seen[name], *(p.sizes[name] for p in found if name in p.sizes)]
            if high[name] > max(ran):
                self.notes.append(f"{name} was run up to {max(ran)} of {high[name]}: more would take too much memory")
            known = bounds.max or self._holds(name)
            if not known:
                self.notes.append(
                    f"{name} is declared without max, and goes to {max(ran)}, the greatest size that was run: engines "
                    f"are built up to there; `dynamic` says what you need: {{name: {name}, max: <size>}}"
                )
            self.dims[name] = Dim(min=low[name], max=known or max(ran), multiple=bounds.multiple)
        # Where no end is declared: does the module itself end there, or only what was traced of it?
        ends = {n: b.max or max(high[n], self._room(n, seen)) for n, b in self.axes.bounds.items()}
        self._spans = {n: Span(low=low[n], high=ends[n], step=b.multiple) for n, b in self.axes.bounds.items()}
        return found + self._breaking(self.traced.guards, found, [])

    def _breaking(
        self, taken: Sequence[Guard], known: Sequence[Probe], regions: Sequence[Sequence[Guard]]
    ) -> list[Probe]:
        """A probe for each guard that none of those known breaks, where any size does; outside of the regions."""
        found: list[Probe] = []
        for guard in taken:
            if any(not self._inside(p.sizes, [guard]) for p in (*known, *found)):
                continue
            sizes = (
                at for at in guard.broken(self._spans, self._seen) if not any(self._inside(at, r) for r in regions)
            )
            at = next(sizes, None)
            if at is None or (label := _label(at)) in self._tried:
                continue
            self._tried.add(label)
            if self._bytes(at) > GUARDED:
                self.notes.append(f"{label} was not run, which breaks {guard}: it would take too much memory")
            elif isinstance(made := self._sized(at), Probe):
                found.append(made)
            elif len(at) == 1:
                self._refused(*next(iter(at.items())), made)
            else:
                self.notes.append(f"forward() itself refuses {label}: {made}")
        return found

    def deeper(self, probes: Sequence[Probe], root: Path) -> list[Probe]:
        """Where a guard is broken and forward() still gives the same, it may ask further: those sizes, traced again.

        Args:
            root: the project's folder, for source lines.
        """
        found: list[Probe] = []
        asked = [g for g in self.traced.guards if g.branches]
        pending = [p for p in probes if p.sizes and not self._inside(p.sizes, asked)]
        while pending and len(self._regions) <= TRACES:
            probe = pending.pop(0)
            least = {n: 2 * b.multiple for n, b in self.axes.bounds.items()}
            at = self._at(probe.sizes)
            # A size of one can't be traced as dynamic.
            if any(at[n] < least[n] for n in at) or any(self._inside(at, r) for r in self._regions):
                continue
            with quiet():
                taken = trace_guards.elsewhere(self.call, self.axes, probe.feed, root)
            if isinstance(taken, str):
                self.notes.append(f"what forward() does about {probe.label} can't be traced: {taken}")
                continue
            self._regions.append(taken)
            outside = [p for p in (*probes, *found) if not any(self._inside(p.sizes, r) for r in self._regions)]
            more = self._breaking(taken, outside, self._regions)
            found += more
            pending += more
        return found

    def explained(self, gates: Sequence[Gate], probes: Sequence[Probe]) -> tuple[Gate, ...]:
        """The gates; those that failed at a size that breaks a guard say which."""
        sizes = {p.gate: self._at(p.sizes) for p in probes if p.sizes}
        return tuple(self._blamed(g, sizes[g.name]) if not g.passed and g.name in sizes else g for g in gates)

    def _blamed(self, gate: Gate, at: Mapping[str, int]) -> Gate:
        broken = [g for g in self.traced.guards if not g.holds(at)]
        if not broken:
            return gate
        told = " and ".join(dict.fromkeys(str(g) for g in sorted(broken, key=lambda g: not g.line)[:3]))
        hint = (
            f"forward() branches on sizes, and the ONNX has the branch for {told}: make it branch on values "
            "(torch.where), or keep the other sizes out by min, max or multiple"
        )
        return replace(gate, hint=hint)

    def _at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all axes: these, and the example's."""
        return {**self._seen, **sizes}

    def _inside(self, sizes: Mapping[str, int], region: Sequence[Guard]) -> bool:
        return all(g.holds(self._at(sizes)) for g in region)

    def _holds(self, name: str) -> int | None:
        """The greatest size the traced program holds for; None where it has no end."""
        return self.traced.ranges.get(name, (0, None))[1]

    def _find_steps(self) -> None:
        """Gives every axis without a declared step the one that forward() itself keeps to: five halvings take 32."""
        for name, bounds in self.axes.bounds.items():
            if bounds.multiple == 1 and (step := self._step(name, bounds)) > 1:
                known = {**self.axes.bounds, name: replace(bounds, multiple=step)}
                self.axes = replace(self.axes, bounds=known)
                self.notes.append(
                    f"forward() itself takes {name} in steps of {step}, found by trial: `multiple: {step}` declares it"
                )

    def _step(self, name: str, bounds: Bounds) -> int:
        """The smallest step, up or down from the example's size, to one that forward() takes; 1 where there is none."""
        seen = self._seen[name]
        for step in (s for s in range(1, min(seen, STEP) + 1) if seen % s == 0):
            near = [s for s in (seen + step, seen - step) if (bounds.min or 1) <= s <= (bounds.max or s)]
            if any(isinstance(self._sized({name: s}), Probe) for s in near):
                return step
        return 1

    def _least(self, name: str) -> int:
        """The smallest size that the module itself takes: one step, two, four, …"""
        seen, size = self._seen[name], self.axes.bounds[name].multiple
        while size < seen and isinstance(refused := self._sized({name: size}), str):
            self._note_refused(name, size, refused)
            size *= 2
        return min(size, seen)

    def _top(self, name: str, low: Mapping[str, int], high: int) -> int:
        """The greatest size that memory allows while the other axes are at their least; the next one up in any case."""
        step = self.axes.bounds[name].multiple
        room = max(self._room(name, low), self._seen[name] + step)
        return min(high, room) // step * step

    def _room(self, name: str, others: Mapping[str, int]) -> int:
        seen = self._seen
        rest = math.prod(others[n] / seen[n] for n in seen if n != name)
        return int(seen[name] * MEMORY / max(activation_bytes(self.traced.program) * rest, 1))

    def _bytes(self, at: Mapping[str, int]) -> int:
        """Bytes of all inner values at these sizes."""
        sizes = self._at(at)
        known = {symbol: sizes[name] // step for symbol, (name, step) in self.traced.symbols.items()}
        return activation_bytes(self.traced.program, known)

    def _each(self, wanted: Sequence[Mapping[str, int]]) -> list[Probe]:
        """Probes at the wanted sizes, each once; what the module refuses together is tried axis by axis."""
        found: dict[str, Probe] = {}
        pending = [{n: s for n, s in sizes.items() if s != self._seen[n]} for sizes in wanted]
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
        bounds = self.axes.bounds[name]
        if (bounds.max if size > self._seen[name] else bounds.min) is not None:
            raise ConfigError(
                f"{name} is declared from {bounds.min} to {bounds.max}; forward() itself fails at {size}: {why}",
                where="dynamic.{}.{}".format(*self.axes.places(name)[0]),
                hint=f"it takes steps of {bounds.multiple}: `multiple: {bounds.multiple}`" * (bounds.multiple > 1),
            )
        self._note_refused(name, size, why)

    def _note_refused(self, name: str, size: int, why: str) -> None:
        """One note for an axis, with what was said to the first of its sizes."""
        begin = f"forward() itself refuses {name}="
        at = next((i for i, note in enumerate(self.notes) if note.startswith(begin)), None)
        if at is None:
            self.notes.append(f"{begin}{size}: {why}")
        else:
            sizes, _, first = self.notes[at].partition(": ")
            self.notes[at] = f"{sizes}, {size}: {first}"

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
        whole = {n: a for n, a in self.call.feed.items() if a.size and (a.dtype.kind in "iu" or n in self.integers)}
        open_ = {n: a for n, a in whole.items() if n not in self.integers and not padded_masks.is_mask(n, a)}
        unknown = [{n: _widely(a)} for n, a in open_.items()]
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

    def _masks(self) -> list[Probe]:
        """Masks as users feed them."""
        found = []
        for label, feed in padded_masks.feeds(self.call.feed, self.integers):
            outputs = self._run(feed)
            if isinstance(outputs, str):
                self.notes.append(f"forward() itself refuses {label}: {outputs}")
            else:
                found.append(Probe(label=label, feed=feed, outputs=outputs))
        return found

    def _run(self, feed: Feed) -> dict[str, Array] | str:
        """The module's outputs, or what it raised."""
        try:
            return self.call.run(feed)
        except Exception as error:  # noqa: BLE001 - which sizes and values the user's module refuses is the question
            return brief(error)


def _label(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{n}={s}" for n, s in sizes.items())


def _widely(array: Array) -> tuple[int, int]:
    """A range around what the example holds; with negatives wherever the type has them."""
    top = min(max(int(array.max()), 4), int(np.iinfo(array.dtype).max) - 1)
    return (-top if array.dtype.kind == "i" else 0), top
