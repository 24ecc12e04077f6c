"""Makes the feeds to compare on: the example, real samples, other sizes of dynamic axes, integers over a range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from layerline.backends.base import Feed
from layerline.export import padded_masks
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.probe_files import Probe
from layerline.export.program_queries import activation_bytes
from layerline.export.torch_export import Traced
from layerline.parity.guard_probes import GuardProbes
from layerline.parity.module_runs import ModuleRuns, drawn_over, sizes_label
from layerline.pipeline.config.field_types import Dim, Dimension
from layerline.pipeline.errors import ConfigError, StageError

# Bytes that the inner values of one probe may take; greater sizes of an axis are not run.
MEMORY = 64 << 20
# Greatest step of an axis that is tried.
STEP = 128
# Without a declared upper bound, an axis is run at up to this many times the example's size.
BEYOND = 4


class Prober:
    """Makes probes of one exported module."""

    def __init__(self, call: Call, axes: Axes, traced: Traced, integers: Mapping[str, tuple[int, int]]) -> None:
        self.call = call
        self.traced = traced
        self.integers = integers  # declared (low, high) of integer inputs, by name
        self.runs = ModuleRuns(call=call, axes=axes)
        self.notes = self.runs.notes  # what was left out, and why
        self.guards = GuardProbes(self.runs, traced)
        self.dims: dict[str, Dim] = {}  # bounds of every named axis: as declared, otherwise as tried

    @property
    def axes(self) -> Axes:
        """The dynamic axes, with the steps that were found by trial."""
        return self.runs.axes

    def probes(self, real: Feed, count: int) -> list[Probe]:
        """All probes; the example comes first.

        Args:
            real: samples by input name, along axis 0, the example's own first.
            count: how many to take.

        Raises:
            ConfigError: forward() fails at a declared size or integer.
            StageError: forward() fails on samples of its own data.
        """
        example = Probe(label="example", feed=self.call.feed, outputs=self.call.results)
        return [example, *self._samples(real, count), *self._sizes(), *self._integers()]

    def narrower(self, failed: Sequence[Probe]) -> list[Probe]:
        """For failed probes that vary several axes, one probe per axis, to find the axis at fault."""
        varied: set[tuple[str, int]] = set()
        for probe in failed:
            if len(probe.sizes) > 1:
                varied.update(probe.sizes.items())
        # An axis at its size in the example can't be at fault.
        varied -= set(self.runs.example.items())
        single = [self.runs.sized({name: size}) for name, size in sorted(varied)]
        return [probe for probe in single if isinstance(probe, Probe)]

    def _samples(self, real: Feed, count: int) -> list[Probe]:
        """One probe of the last samples: the example's own come first."""
        total = min((len(array) for array in real.values() if array.ndim), default=0)
        if total == 0 or count == 0:
            return []
        size = min(count, total)
        for name, array in self.call.feed.items():
            if array.ndim and (name, 0) not in self.axes.names:
                size = len(array)  # a fixed batch
                break
        # The last samples: the example has the first ones.
        feed = {name: array[total - size :] if array.ndim else array for name, array in real.items()}
        why = self._misfit(feed)
        if why:
            self.notes.append(f"samples of the data are not among the probes: {why}")
            return []
        probe_or_error = self.runs.probe(f"{size} samples", feed)
        if isinstance(probe_or_error, str):
            raise StageError(f"forward() itself fails on samples of its own data: {probe_or_error}", where="probes")
        return [probe_or_error]

    def _misfit(self, feed: Feed) -> str | None:
        """Why the graph can't take a feed; None if it can."""
        if feed.keys() != self.call.feed.keys():
            return f"they have the inputs {', '.join(feed)}, the model takes {', '.join(self.call.feed)}"
        for name, example in self.call.feed.items():
            array = feed[name]
            same = array.ndim == example.ndim and array.dtype == example.dtype
            for axis in range(example.ndim):
                if (name, axis) not in self.axes.names:
                    same = same and array.shape[axis] == example.shape[axis]
            if not same:
                return f"{name} is {array.dtype}{array.shape}, the example's {example.dtype}{example.shape}"
        return None

    def _sizes(self) -> list[Probe]:
        """Probes at other sizes.

        All axes at their least; all a step above; each at its greatest with the others at their least; and sizes that
        break a guard.
        """
        # First, as all sizes below are multiples of the step.
        self._find_steps()
        low: dict[str, int] = {}
        high: dict[str, int] = {}
        one_step_up: dict[str, int] = {}
        for name, bounds in self.axes.bounds.items():
            default = BEYOND * self.runs.example[name]
            low[name] = bounds.min or self._least(name)
            high[name] = bounds.max or min(default, self._traced_max(name) or default)
            size = low[name] + bounds.step
            if size == self.runs.example[name]:
                size += bounds.step
            if size <= high[name]:
                one_step_up[name] = size
        wanted: list[Mapping[str, int]] = [low, one_step_up]
        for name, bounds in self.axes.bounds.items():
            # What memory allows, but at least one step up.
            limit = max(self._affordable(name, low), self.runs.example[name] + bounds.step)
            wanted.append({**low, name: min(high[name], limit) // bounds.step * bounds.step})
        probes = self._each(wanted)
        for name in self.axes.bounds:
            self._settle_bounds(name, low[name], high[name], probes)
        for name, bounds in self.axes.bounds.items():
            # Without a declared end, guards count up to what memory allows: only the trace may end at `high`.
            end = bounds.max or max(high[name], self._affordable(name, self.runs.example))
            self.guards.dims[name] = Dim(min=low[name], max=end, multiple=bounds.step)
        return probes + self.guards.breaking(self.traced.guards, probes)

    def _settle_bounds(self, name: str, low: int, high: int, probes: Sequence[Probe]) -> None:
        """Records the bounds of an axis, with a note where they are less than declared."""
        bounds = self.axes.bounds[name]
        sizes = [probe.sizes[name] for probe in probes if name in probe.sizes]
        # Sizes that were refused are not among the probes.
        reached = max([self.runs.example[name], *sizes])
        if high > reached:
            self.notes.append(f"{name} was run up to {reached} of {high}: more would take too much memory")
        upper = bounds.max or self._traced_max(name)
        if not upper:
            upper = reached
            self.notes.append(
                f"{name} is declared without max. Engines are built up to {reached}, the greatest size that was run. "
                f"To set another limit, declare it in `dynamic`: {{name: {name}, max: <size>}}"
            )
        self.dims[name] = Dim(min=low, max=upper, multiple=bounds.step)

    def _traced_max(self, name: str) -> int | None:
        """The greatest size the traced program holds for; None where it has no end."""
        _, greatest = self.traced.ranges.get(name, (0, None))
        return greatest

    def _find_steps(self) -> None:
        """Tries which step forward() needs on each axis without a declared one: five halvings need 32."""
        for name, bounds in self.axes.bounds.items():
            if bounds.step > 1:  # declared
                continue
            step = self._step(name, bounds)
            if step > 1:
                stepped = bounds.model_copy(update={"multiple": step})
                self.runs.axes = replace(self.axes, bounds={**self.axes.bounds, name: stepped})
                self.notes.append(
                    f"forward() itself takes {name} in steps of {step}, found by trial: `multiple: {step}` declares it"
                )

    def _step(self, name: str, bounds: Dimension) -> int:
        """The smallest step, up or down from the example's size, to a size that forward() takes; 1 if there is none."""
        example = self.runs.example[name]
        for step in range(1, min(example, STEP) + 1):
            if example % step:
                continue
            for size in (example + step, example - step):
                # A size outside of the declared bounds proves nothing about them.
                allowed = (bounds.min or 1) <= size <= (bounds.max or size)
                if allowed and isinstance(self.runs.sized({name: size}), Probe):
                    return step
        return 1

    def _least(self, name: str) -> int:
        """The smallest size that forward() takes out of one step, two, four, and so on."""
        example = self.runs.example[name]
        size = self.axes.bounds[name].step
        while size < example:
            probe_or_error = self.runs.sized({name: size})
            if isinstance(probe_or_error, Probe):
                return size
            self.runs.note_refused(name, size, probe_or_error)
            size *= 2
        return example

    def _affordable(self, name: str, others: Mapping[str, int]) -> int:
        """The greatest size of an axis within MEMORY at these sizes of the others, if values grow with every axis."""
        # How the values shrink or grow with the other axes.
        rest = math.prod(others[other] / size for other, size in self.runs.example.items() if other != name)
        return int(self.runs.example[name] * MEMORY / max(activation_bytes(self.traced.program) * rest, 1))

    def _each(self, wanted: Sequence[Mapping[str, int]]) -> list[Probe]:
        """Probes at the wanted sizes, each once; sizes that forward() refuses together are tried axis by axis."""
        probes: dict[str, Probe] = {}
        pending = list(wanted)
        while pending:
            sizes = {name: size for name, size in pending.pop(0).items() if size != self.runs.example[name]}
            label = sizes_label(sizes)
            if not sizes or label in probes:
                continue
            probe_or_error = self.runs.sized(sizes)
            if isinstance(probe_or_error, Probe):
                probes[label] = probe_or_error
            elif len(sizes) > 1:
                pending += [{name: size} for name, size in sizes.items()]
            else:
                self.runs.refused(*next(iter(sizes.items())), probe_or_error)
        return list(probes.values())

    def _integers(self) -> Iterator[Probe]:
        """Probes over all declared ranges, of each integer input without a declared range, and with padded masks."""
        rng = np.random.default_rng(0)
        if self.integers:
            label, feed = drawn_over(self.call.feed, self.integers, rng)
            probe_or_error = self.runs.probe(label, feed)
            if isinstance(probe_or_error, str):
                raise ConfigError(f"forward() itself fails on {label}: {probe_or_error}", where="ranges")
            yield probe_or_error
        for name, array in self.call.feed.items():
            if not array.size or array.dtype.kind not in "iu" or name in self.integers:
                continue
            if not padded_masks.is_mask(name, array):
                # Around the example's values, with negative ones if the type is signed; not up to the type's own
                # maximum: a forward() that adds one must not overflow.
                greatest = min(max(int(array.max()), 4), int(np.iinfo(array.dtype).max) - 1)
                least = 0
                if array.dtype.kind == "i":
                    least = -greatest
                label, feed = drawn_over(self.call.feed, {name: (least, greatest)}, rng)
                yield from self._optional(label, feed, "; declare its range to have it probed")
        for label, feed in padded_masks.feeds(self.call.feed, self.integers):
            yield from self._optional(label, feed)

    def _optional(self, label: str, feed: Feed, advice: str = "") -> Iterator[Probe]:
        """A probe; a note where forward() refuses it."""
        probe_or_error = self.runs.probe(label, feed)
        if isinstance(probe_or_error, str):
            self.notes.append(f"forward() itself refuses {label}{advice}: {probe_or_error}")
        else:
            yield probe_or_error
