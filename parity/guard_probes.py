"""Probes at sizes at which forward() branches: there the ONNX may have another branch than the module takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from layerline.export import trace_guards
from layerline.export.probe_files import Probe
from layerline.export.program_queries import activation_bytes
from layerline.export.torch_export import Traced, quiet
from layerline.export.trace_guards import Guard
from layerline.parity.module_runs import ModuleRuns, sizes_label
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.report import Gate

# Bytes that the inner values may take at a size at which forward() is known to branch.
GUARDED = 256 << 20
# Greatest number of additional traces of forward(), to see how it branches at other sizes.
TRACES = 4
Region = Sequence[Guard]  # while all of these hold, forward() does what one trace shows


class GuardProbes:
    """Finds sizes that break the guards of traces, and runs the module at them."""

    def __init__(self, runs: ModuleRuns, traced: Traced) -> None:
        self.runs = runs
        self.traced = traced
        self.dims: dict[str, Dim] = {}  # the sizes that guards are tried at
        self._regions: list[Region] = [traced.guards]  # one for each trace
        self._tried: set[str] = set()

    def breaking(self, guards: Region, others: Sequence[Probe], regions: Sequence[Region] = ()) -> list[Probe]:
        """A probe outside of the regions for each guard that no probe breaks yet, if some size breaks it."""
        probes: list[Probe] = []
        for guard in guards:
            if any(not self._inside(probe.sizes, [guard]) for probe in (*others, *probes)):
                continue
            breaking = guard.broken(self.dims, self.runs.example)
            sizes = next((sizes for sizes in breaking if not self._inside_any(sizes, regions)), {})
            label = sizes_label(sizes)
            if not sizes or label in self._tried:
                continue
            self._tried.add(label)
            if self._bytes(sizes) > GUARDED:
                self.runs.notes.append(f"{label} breaks {guard} and was not run: it would take too much memory")
                continue
            probe_or_error = self.runs.sized(sizes)
            if isinstance(probe_or_error, Probe):
                probes.append(probe_or_error)
            # The error may be a declared size's own, which ends the export; of several axes it may be their
            # combination.
            elif len(sizes) == 1:
                self.runs.refused(*next(iter(sizes.items())), probe_or_error)
            else:
                self.runs.notes.append(f"forward() itself refuses {label}: {probe_or_error}")
        return probes

    def deeper(self, probes: Sequence[Probe], root: Path) -> list[Probe]:
        """Traces forward() again at sizes that break a guard: it may branch further there."""
        call, axes = self.runs.call, self.runs.axes
        added: list[Probe] = []
        branches = [guard for guard in self.traced.guards if guard.branches]
        pending = [probe for probe in probes if probe.sizes and not self._inside(probe.sizes, branches)]
        while pending and len(self._regions) <= TRACES:
            probe = pending.pop(0)
            sizes = self._all_sizes(probe.sizes)
            # Torch takes a size of one step for a constant.
            traceable = all(sizes[name] >= 2 * bounds.step for name, bounds in axes.bounds.items())
            if not traceable or self._inside_any(probe.sizes, self._regions):
                continue
            with quiet():
                guards = trace_guards.elsewhere(call, axes, probe.feed, root)
            if isinstance(guards, str):
                self.runs.notes.append(f"what forward() does about {probe.label} can't be traced: {guards}")
                continue
            self._regions.append(guards)
            outside = [other for other in (*probes, *added) if not self._inside_any(other.sizes, self._regions)]
            more = self.breaking(guards, outside, self._regions)
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
        return {**self.runs.example, **sizes}

    def _inside(self, sizes: Mapping[str, int], region: Region) -> bool:
        all_sizes = self._all_sizes(sizes)
        return all(guard.holds(all_sizes) for guard in region)

    def _inside_any(self, sizes: Mapping[str, int], regions: Sequence[Region]) -> bool:
        return any(self._inside(sizes, region) for region in regions)

    def _bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of all inner values at these sizes."""
        all_sizes = self._all_sizes(sizes)
        # Torch's symbols count steps.
        symbols = {symbol: all_sizes[name] // step for symbol, (name, step) in self.traced.symbols.items()}
        return activation_bytes(self.traced.program, symbols)
