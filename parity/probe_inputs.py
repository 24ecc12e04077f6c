"""Makes the feeds to compare on: the example, real samples, other sizes of dynamic axes, integers over a range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import nn

from layerline.backends.base import Array, Feed
from layerline.export import padded_masks, trace_guards
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.probe_files import Probe, drawn
from layerline.export.program_queries import activation_bytes
from layerline.export.torch_export import Traced, quiet
from layerline.export.trace_guards import Guard
from layerline.pipeline.config.field_types import Dim, Dimension
from layerline.pipeline.errors import ConfigError, StageError, brief
from layerline.pipeline.report import Gate

# Bytes that the inner values of one probe may take; greater sizes of an axis are not run.
MEMORY = 64 << 20
# Bytes that the inner values may take at a size at which forward() is known to branch.
GUARDED = 256 << 20
# Greatest number of additional traces of forward(), to see how it branches at other sizes.
TRACES = 4
# Greatest step of an axis that is tried.
STEP = 128
# Without a declared upper bound, an axis is run at up to this many times the example's size.
BEYOND = 4


@dataclass(kw_only=True)
class Prober:
    """Makes probes of one exported module."""

    call: Call
    axes: Axes
    traced: Traced
    integers: Mapping[str, tuple[int, int]]  # declared (low, high) of integer inputs, by name
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    dims: dict[str, Dim] = field(default_factory=dict)  # bounds of every named axis: as declared, otherwise as tried
    _guarded: dict[str, Dim] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._example = {name: self.axes.size(self.call.feed, name) for name in self.axes.bounds}
        # Guards of each trace: inside a region, forward() does what that trace shows.
        self._regions: list[Sequence[Guard]] = [self.traced.guards]

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
        varied -= set(self._example.items())
        single = [self._sized({name: size}) for name, size in sorted(varied)]
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
        probe_or_error = self._probe(f"{size} samples", feed)
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
            default = BEYOND * self._example[name]
            low[name] = bounds.min or self._least(name)
            high[name] = bounds.max or min(default, self._traced_max(name) or default)
            size = low[name] + bounds.step
            if size == self._example[name]:
                size += bounds.step
            if size <= high[name]:
                one_step_up[name] = size
        wanted: list[Mapping[str, int]] = [low, one_step_up]
        for name, bounds in self.axes.bounds.items():
            # What memory allows, but at least one step up.
            limit = max(self._affordable(name, low), self._example[name] + bounds.step)
            wanted.append({**low, name: min(high[name], limit) // bounds.step * bounds.step})
        probes = self._each(wanted)
        for name in self.axes.bounds:
            self._settle_bounds(name, low[name], high[name], probes)
        for name, bounds in self.axes.bounds.items():
            # Without a declared end, guards count up to what memory allows: only the trace may end at `high`.
            end = bounds.max or max(high[name], self._affordable(name, self._example))
            self._guarded[name] = Dim(min=low[name], max=end, multiple=bounds.step)
        return probes + self._breaking(self.traced.guards, probes, [])

    def _settle_bounds(self, name: str, low: int, high: int, probes: Sequence[Probe]) -> None:
        """Records the bounds of an axis, with a note where they are less than declared."""
        bounds = self.axes.bounds[name]
        sizes = [probe.sizes[name] for probe in probes if name in probe.sizes]
        # Sizes that were refused are not among the probes.
        reached = max([self._example[name], *sizes])
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

    def _breaking(
        self, guards: Sequence[Guard], others: Sequence[Probe], regions: Sequence[Sequence[Guard]]
    ) -> list[Probe]:
        """A probe outside of the regions for each guard that no probe breaks yet, if some size breaks it."""
        probes: list[Probe] = []
        for guard in guards:
            if any(not self._inside(probe.sizes, [guard]) for probe in (*others, *probes)):
                continue
            breaking = guard.broken(self._guarded, self._example)
            sizes = next((sizes for sizes in breaking if not self._inside_any(sizes, regions)), {})
            label = _label(sizes)
            if not sizes or label in self._tried:
                continue
            self._tried.add(label)
            if self._bytes(sizes) > GUARDED:
                self.notes.append(f"{label} breaks {guard} and was not run: it would take too much memory")
                continue
            probe_or_error = self._sized(sizes)
            if isinstance(probe_or_error, Probe):
                probes.append(probe_or_error)
            # The error may be a declared size's own, which ends the export; of several axes it may be their
            # combination.
            elif len(sizes) == 1:
                self._refused(*next(iter(sizes.items())), probe_or_error)
            else:
                self.notes.append(f"forward() itself refuses {label}: {probe_or_error}")
        return probes

    def deeper(self, probes: Sequence[Probe], root: Path) -> list[Probe]:
        """Traces forward() again at sizes that break a guard: it may branch further there."""
        added: list[Probe] = []
        branches = [guard for guard in self.traced.guards if guard.branches]
        pending = [probe for probe in probes if probe.sizes and not self._inside(probe.sizes, branches)]
        while pending and len(self._regions) <= TRACES:
            probe = pending.pop(0)
            sizes = self._all_sizes(probe.sizes)
            # Torch takes a size of one step for a constant.
            traceable = all(sizes[name] >= 2 * bounds.step for name, bounds in self.axes.bounds.items())
            if not traceable or self._inside_any(probe.sizes, self._regions):
                continue
            with quiet():
                guards = trace_guards.elsewhere(self.call, self.axes, probe.feed, root)
            if isinstance(guards, str):
                self.notes.append(f"what forward() does about {probe.label} can't be traced: {guards}")
                continue
            self._regions.append(guards)
            outside = [other for other in (*probes, *added) if not self._inside_any(other.sizes, self._regions)]
            more = self._breaking(guards, outside, self._regions)
            added += more
            pending += more
        return added

    def explained(self, gates: Sequence[Gate], probes: Sequence[Probe]) -> tuple[Gate, ...]:
        """The gates. One that failed at a size that breaks a guard gets a hint that names the guard."""
        sizes_by_gate = {probe.gate: self._all_sizes(probe.sizes) for probe in probes if probe.sizes}
        explained = []
        for gate in gates:
            broken: list[Guard] = []
            if not gate.passed and gate.name in sizes_by_gate:
                broken = [guard for guard in self.traced.guards if not guard.holds(sizes_by_gate[gate.name])]
            if broken:
                # Those with a line of the user's file first.
                broken.sort(key=lambda guard: not guard.line)
                conditions = " and ".join(dict.fromkeys(str(guard) for guard in broken[:3]))
                hint = f"forward() branches on sizes, and the ONNX has the branch for {conditions}: make it branch on "
                hint += "values (torch.where), or exclude the other sizes by min, max or multiple"
                gate = replace(gate, hint=hint)
            explained.append(gate)
        return tuple(explained)

    def _all_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all axes: the example's where none is passed."""
        return {**self._example, **sizes}

    def _inside(self, sizes: Mapping[str, int], region: Sequence[Guard]) -> bool:
        all_sizes = self._all_sizes(sizes)
        return all(guard.holds(all_sizes) for guard in region)

    def _inside_any(self, sizes: Mapping[str, int], regions: Sequence[Sequence[Guard]]) -> bool:
        return any(self._inside(sizes, region) for region in regions)

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
                self.axes = replace(self.axes, bounds={**self.axes.bounds, name: stepped})
                self.notes.append(
                    f"forward() itself takes {name} in steps of {step}, found by trial: `multiple: {step}` declares it"
                )

    def _step(self, name: str, bounds: Dimension) -> int:
        """The smallest step, up or down from the example's size, to a size that forward() takes; 1 if there is none."""
        example = self._example[name]
        for step in range(1, min(example, STEP) + 1):
            if example % step:
                continue
            for size in (example + step, example - step):
                # A size outside of the declared bounds proves nothing about them.
                allowed = (bounds.min or 1) <= size <= (bounds.max or size)
                if allowed and isinstance(self._sized({name: size}), Probe):
                    return step
        return 1

    def _least(self, name: str) -> int:
        """The smallest size that forward() takes out of one step, two, four, and so on."""
        example = self._example[name]
        size = self.axes.bounds[name].step
        while size < example:
            probe_or_error = self._sized({name: size})
            if isinstance(probe_or_error, Probe):
                return size
            self._note_refused(name, size, probe_or_error)
            size *= 2
        return example

    def _affordable(self, name: str, others: Mapping[str, int]) -> int:
        """The greatest size of an axis within MEMORY at these sizes of the others, if values grow with every axis."""
        # How the values shrink or grow with the other axes.
        rest = math.prod(others[other] / size for other, size in self._example.items() if other != name)
        return int(self._example[name] * MEMORY / max(activation_bytes(self.traced.program) * rest, 1))

    def _bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of all inner values at these sizes."""
        all_sizes = self._all_sizes(sizes)
        symbols = {symbol: all_sizes[name] // step for symbol, (name, step) in self.traced.symbols.items()}
        return activation_bytes(self.traced.program, symbols)

    def _each(self, wanted: Sequence[Mapping[str, int]]) -> list[Probe]:
        """Probes at the wanted sizes, each once; sizes that forward() refuses together are tried axis by axis."""
        probes: dict[str, Probe] = {}
        pending = list(wanted)
        while pending:
            sizes = {name: size for name, size in pending.pop(0).items() if size != self._example[name]}
            label = _label(sizes)
            if not sizes or label in probes:
                continue
            probe_or_error = self._sized(sizes)
            if isinstance(probe_or_error, Probe):
                probes[label] = probe_or_error
            elif len(sizes) > 1:
                pending += [{name: size} for name, size in sizes.items()]
            else:
                self._refused(*next(iter(sizes.items())), probe_or_error)
        return list(probes.values())

    def _refused(self, name: str, size: int, why: str) -> None:
        """Notes a size that forward() refuses. Raises ConfigError if the size is within declared bounds."""
        bounds = self.axes.bounds[name]
        declared = bounds.min
        if size > self._example[name]:
            declared = bounds.max
        if declared is not None:
            raise size_refused(self.axes, name, size, why)
        self._note_refused(name, size, why)

    def _note_refused(self, name: str, size: int, why: str) -> None:
        """One note for an axis: all refused sizes, with the error at the first of them."""
        begin = f"forward() itself refuses {name}="
        for index, note in enumerate(self.notes):
            if note.startswith(begin):
                sizes, _, first_error = note.partition(": ")
                self.notes[index] = f"{sizes}, {size}: {first_error}"
                return
        self.notes.append(f"{begin}{size}: {why}")

    def _sized(self, sizes: Mapping[str, int]) -> Probe | str:
        """A probe at these sizes, or what the module raises at them."""
        return self._probe(_label(sizes), self.axes.resized(self.call.feed, sizes), sizes)

    def _integers(self) -> Iterator[Probe]:
        """Probes over all declared ranges, of each integer input without a declared range, and with padded masks."""
        rng = np.random.default_rng(0)
        if self.integers:
            label, feed = drawn_over(self.call.feed, self.integers, rng)
            probe_or_error = self._probe(label, feed)
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
        probe_or_error = self._probe(label, feed)
        if isinstance(probe_or_error, str):
            self.notes.append(f"forward() itself refuses {label}{advice}: {probe_or_error}")
        else:
            yield probe_or_error

    def _probe(self, label: str, feed: Feed, sizes: Mapping[str, int] | None = None) -> Probe | str:
        """A probe with the module's outputs, or what the module raises."""
        outputs = outputs_or_error(self.call, feed)
        if isinstance(outputs, str):
            return outputs
        return Probe(label=label, feed=feed, outputs=outputs, sizes=sizes or {})


def outputs_or_error(call: Call, feed: Feed, module: nn.Module | None = None) -> dict[str, Array] | str:
    """The module's outputs, or what it raised; those of another module, if one is passed."""
    try:
        return call.run(feed, module)
    except Exception as error:  # noqa: BLE001 - a user's forward() may raise anything on inputs it does not take
        return brief(error)


def drawn_over(
    feed: Feed, ranges: Mapping[str, tuple[int, int]], rng: np.random.Generator
) -> tuple[str, dict[str, Array]]:
    """The feed with other integers, drawn over these ranges, after a label."""
    out = dict(feed)
    for name, (low, high) in ranges.items():
        if name in out and out[name].size:
            out[name] = drawn(out[name], low, high, rng)
    return ", ".join(f"{name} over [{low}, {high}]" for name, (low, high) in ranges.items()), out


def size_refused(axes: Axes, name: str, size: int, why: str) -> ConfigError:
    """The error for a size within the declared bounds of an axis at which forward() fails."""
    bounds = axes.bounds[name]
    input_name, axis = axes.places(name)[0]
    hint = "declare the sizes that it takes"
    if bounds.step > 1:
        hint = f"it takes steps of {bounds.step}: `multiple: {bounds.step}`"
    return ConfigError(
        f"{name} is declared from {bounds.min} to {bounds.max}; forward() itself fails at {size}: {why}",
        where=f"dynamic.{input_name}.{axis}",
        hint=hint,
    )


def _label(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
