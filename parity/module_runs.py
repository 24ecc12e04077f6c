"""Runs forward() on other inputs than the example's, and keeps what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from layerline.backends.base import Array, Feed
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.probe_files import Probe, drawn
from layerline.pipeline.errors import ConfigError, brief


@dataclass(kw_only=True)
class ModuleRuns:
    """Runs one module at other sizes and on other inputs."""

    call: Call
    axes: Axes
    notes: list[str] = field(default_factory=list)  # what was left out, and why

    def __post_init__(self) -> None:
        self.example = {name: self.axes.size(self.call.feed, name) for name in self.axes.bounds}

    def probe(self, label: str, feed: Feed, sizes: Mapping[str, int] | None = None) -> Probe | str:
        """A probe with the module's outputs, or what the module raises."""
        outputs = outputs_or_error(self.call, feed)
        if isinstance(outputs, str):
            return outputs
        return Probe(label=label, feed=feed, outputs=outputs, sizes=sizes or {})

    def sized(self, sizes: Mapping[str, int]) -> Probe | str:
        """A probe at these sizes, the others as in the example, or what the module raises at them."""
        return self.probe(sizes_label(sizes), self.axes.resized(self.call.feed, sizes), sizes)

    def refused(self, name: str, size: int, why: str) -> None:
        """Notes a size that forward() refuses. Raises ConfigError if the size is within declared bounds."""
        bounds = self.axes.bounds[name]
        declared = bounds.min
        if size > self.example[name]:
            declared = bounds.max
        if declared is not None:
            raise size_refused(self.axes, name, size, why)
        self.note_refused(name, size, why)

    def note_refused(self, name: str, size: int, why: str) -> None:
        """One note for an axis: all refused sizes, with the error at the first of them."""
        begin = f"forward() itself refuses {name}="
        for index, note in enumerate(self.notes):
            if note.startswith(begin):
                sizes, _, first_error = note.partition(": ")
                self.notes[index] = f"{sizes}, {size}: {first_error}"
                return
        self.notes.append(f"{begin}{size}: {why}")


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


def sizes_label(sizes: Mapping[str, int]) -> str:
    """Sizes as they stand in gates and notes: `batch=2, length=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
