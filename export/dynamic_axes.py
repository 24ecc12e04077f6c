"""Dynamic axes: what the configuration declares, checked against the example, and written into the exported graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from layerline.backends.base import Array, Feed
from layerline.export.probe_files import resized
from layerline.graph.analysis.ir_queries import dim, graph_values, rank
from layerline.pipeline.config.field_types import Axis
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean
from layerline.pipeline.untrusted import is_number


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The declared dynamic axes: names by (input, axis from the front), and bounds by name.

    One name ties its axes to one size.
    """

    names: Mapping[tuple[str, int], str]
    bounds: Mapping[str, Axis]

    def places(self, name: str) -> list[tuple[str, int]]:
        """Where the axis of that name is: (input, axis)."""
        return [place for place, axis_name in self.names.items() if axis_name == name]

    def size(self, feed: Feed, name: str) -> int:
        """Its size in a feed."""
        input_name, axis = self.places(name)[0]
        return int(feed[input_name].shape[axis])

    def resized(self, feed: Feed, sizes: Mapping[str, int]) -> dict[str, Array]:
        """The feed with other sizes of the named axes."""
        out = dict(feed)
        for (input_name, axis), name in self.names.items():
            if name in sizes and out[input_name].shape[axis] != sizes[name]:
                out[input_name] = resized(out[input_name], axis, sizes[name])
        return out

    def grown(self, feed: Feed) -> dict[str, Array]:
        """The feed with at least two steps along every dynamic axis: tracing takes a size of one for a constant."""
        least = {name: 2 * bound.step for name, bound in self.bounds.items()}
        return self.resized(feed, {name: size for name, size in least.items() if self.size(feed, name) < size})

    def specs(self) -> dict[str, dict[int, Any]]:
        """The dynamic shapes for torch.export, by input name and axis."""
        by_name: dict[str, Any] = {}
        for name, bound in self.bounds.items():
            by_name[name] = torch.export.Dim.DYNAMIC
            if bound.step > 1:
                # A derived dimension: torch's own symbol counts the steps.
                by_name[name] = bound.step * torch.export.Dim(f"_{name}")
        specs: dict[str, dict[int, Any]] = {}
        for (input_name, axis), name in self.names.items():
            specs.setdefault(input_name, {})[axis] = by_name[name]
        return specs


def declare(feed: Feed, declared: Mapping[str, Mapping[int, Axis]]) -> Axes:
    """Checks a declaration (by input name, axis: name and bounds) against the example.

    Raises ConfigError: an unknown input or axis, or bounds that contradict each other or the example.
    """
    names: dict[tuple[str, int], str] = {}
    bounds: dict[str, Axis] = {}
    for input_name, axes in declared.items():
        if input_name not in feed:
            hint = f"{did_you_mean(input_name, feed)} the model takes {', '.join(feed)}"
            raise ConfigError(f"unknown input {input_name!r}", where=f"dynamic.{input_name}", hint=hint.lstrip())
        count = feed[input_name].ndim
        for axis, bound in axes.items():
            where = f"dynamic.{input_name}.{axis}"
            if not -count <= axis < count:
                raise ConfigError(f"input {input_name!r} has {count} axes, there is no axis {axis}", where=where)
            names[input_name, axis % count] = bound.name
            previous = bounds.setdefault(bound.name, bound)
            # The bounds of a tied axis may be declared at any of its places, but not in two ways.
            if len({(each.min, each.max, each.step) for each in (previous, bound) if not each.is_open}) > 1:
                what = f"the axis is tied to another with other bounds: {previous} and {bound}"
                raise ConfigError(what, where=where)
            if previous.is_open:
                bounds[bound.name] = bound
    out = Axes(names=names, bounds=bounds)
    for name, bound in bounds.items():
        _check(out, feed, name, bound)
    return out


def _check(axes: Axes, feed: Feed, name: str, bound: Axis) -> None:
    input_name, first_axis = axes.places(name)[0]
    where = f"dynamic.{input_name}.{first_axis}"
    sizes = {feed[place].shape[axis] for place, axis in axes.places(name)}
    if len(sizes) > 1:
        raise ConfigError(f"{name!r} ties axes whose sizes in the example differ: {sorted(sizes)}", where=where)
    size = sizes.pop()
    if bound.max is not None and bound.max < 2 * bound.step:
        what = f"bounds of {name!r} leave nothing to vary: max {bound.max}, multiple {bound.step}"
        raise ConfigError(what, where=where, hint="a dynamic axis needs room for two multiples; leave a fixed axis out")
    above = bound.max is not None and size > bound.max
    if size % bound.step or size < (bound.min or 1) or above:
        limits = {"min": bound.min, "max": bound.max, "multiple": bound.step}
        declared = ", ".join(f"{key} {limit}" for key, limit in limits.items() if limit)
        what = f"the example's size {size} of {name!r} is outside its declared bounds: {declared}"
        raise ConfigError(what, where=where)


def write(model: ir.Model, axes: Axes) -> None:
    """Gives the graph's symbolic sizes their declared names, in place.

    Raises StageError: an axis that was declared dynamic is fixed in the graph, or two names are one size in it.
    """
    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis in range(rank(value) or 0):
            input_name = value.name or ""
            name = axes.names.get((input_name, axis))
            if name is None:
                continue
            # torch writes a fixed size as a number, or as the name of one.
            symbol = dim(value, axis)
            if not isinstance(symbol, str) or is_number(symbol):
                raise baked(input_name, axis, name, str(symbol))
            # torch found that the model works only where both are of one size.
            if symbols.setdefault(symbol, name) != name:
                what = f"the model needs {symbols[symbol]!r} and {name!r} to be the same size"
                hint = "give both the same name in `dynamic`"
                raise StageError(what, where=f"input {input_name}, axis {axis}", hint=hint)
            step = axes.bounds[name].step
            steps = re.fullmatch(rf"{step}\*(\w+)", symbol)
            if step > 1 and steps is not None:
                symbols[steps[1]] = f"{name}//{step}"  # with `4*_h` called h, what the graph calls `_h` is h/4
    for value in graph_values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([_named(dim, symbols) for dim in value.shape])


def _named(dim: int | ir.SymbolicDim, symbols: Mapping[str, str]) -> int | str | None:
    """A size with the declared names in place of torch's symbols."""
    if isinstance(dim, int):
        return dim
    if not dim.value:
        return None
    if is_number(dim.value):
        return int(dim.value)
    if dim.value in symbols:
        return symbols[dim.value]
    # A formula over the names, such as `2*s3 + 1`.
    return re.sub(r"[A-Za-z_]\w*", lambda name: symbols.get(name[0], name[0]), dim.value)


def settle(model: ir.Model, axes: Axes, runs: Iterable[tuple[Feed, Feed]]) -> None:
    """Corrects the declared shapes of the outputs, in place, by real (feed, outputs by name) with the axes varied."""
    runs = list(runs)
    sizes_by_name: dict[str, list[int]] = {}
    for name in axes.bounds:
        sizes_by_name[name] = [axes.size(feed, name) for feed, _ in runs]
    for output in model.graph.outputs:
        output_name = output.name or ""
        shapes = [outputs[output_name].shape for _, outputs in runs]
        # The exporter may leave the rank of an output open.
        settled: list[int | str | None] = [None] * len(shapes[0])
        if output.shape is not None and len(output.shape) == len(settled):
            settled = [dim(output, axis) for axis in range(len(settled))]
        for axis, declared_size in enumerate(settled):
            sizes = [shape[axis] for shape in shapes]
            if len(set(sizes)) == 1 and not isinstance(declared_size, str):
                settled[axis] = sizes[0]
            elif not isinstance(declared_size, str):
                same = [name for name, axis_sizes in sizes_by_name.items() if axis_sizes == sizes]
                settled[axis] = f"{output_name}_{axis}"
                if same:
                    settled[axis] = same[0]
        output.shape = ir.Shape(settled)


def baked(input_name: str, axis: int, name: str, size: str, line: str = "") -> StageError:
    """The error for a declared axis that tracing has fixed, at `line` if that is known."""
    where = f"input {input_name}, axis {axis}"
    if line:
        where += f" ({line})"
    return StageError(
        f"the axis was declared dynamic ({name}), but the traced model has it fixed at {size}",
        where=where,
        hint="something in forward() turns this size into a plain number (int(x.shape[…]), a buffer or state of that "
        "size, a Python loop over it); take it from the input's shape, or leave the axis out of `dynamic`",
    )
