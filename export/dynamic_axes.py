"""Dynamic axes: what the configuration declares, checked against the example, and written into the exported graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from layerline.backends.base import Array, Feed
from layerline.export.probe_files import resized
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.inputs.untrusted import is_number
from layerline.pipeline.nearest import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Sizes that a dynamic axis takes, both ends included, multiples of `multiple`; None where not declared."""

    min: int | None = None
    max: int | None = None
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The declared dynamic axes.

    Attributes:
        names: name of the axis by (input, axis from the front); one name ties its axes to one size.
        bounds: by name.
    """

    names: Mapping[tuple[str, int], str]
    bounds: Mapping[str, Bounds]

    def places(self, name: str) -> list[tuple[str, int]]:
        """Where the axis of that name is: (input, axis)."""
        return [place for place, known in self.names.items() if known == name]

    def size(self, feed: Feed, name: str) -> int:
        """Its size in a feed."""
        given, axis = self.places(name)[0]
        return int(feed[given].shape[axis])

    def resized(self, feed: Feed, sizes: Mapping[str, int]) -> dict[str, Array]:
        """The feed with other sizes of the named axes."""
        out = dict(feed)
        for (given, axis), name in self.names.items():
            if name in sizes and out[given].shape[axis] != sizes[name]:
                out[given] = resized(out[given], axis, sizes[name])
        return out

    def grown(self, feed: Feed) -> dict[str, Array]:
        """The feed with at least two steps along every dynamic axis: tracing takes a size of one for a constant."""
        small = {n: 2 * b.multiple for n, b in self.bounds.items() if self.size(feed, n) < 2 * b.multiple}
        return self.resized(feed, small)

    def specs(self) -> dict[str, dict[int, Any]]:
        """What the exporter is told, by input name and axis."""
        steps = {n: torch.export.Dim(f"_{n}") for n, b in self.bounds.items() if b.multiple > 1}
        out: dict[str, dict[int, Any]] = {}
        for (given, axis), name in self.names.items():
            step = steps.get(name)
            out.setdefault(given, {})[axis] = (
                torch.export.Dim.DYNAMIC if step is None else self.bounds[name].multiple * step
            )
        return out


def declare(feed: Feed, declared: Mapping[str, Mapping[int, tuple[str, Bounds]]]) -> Axes:
    """Checks a declaration (by input name, axis: name and bounds) against the example.

    Raises:
        ConfigError: an unknown input, an axis that the input has not, bounds that contradict each other or the example.
    """
    names: dict[tuple[str, int], str] = {}
    bounds: dict[str, Bounds] = {}
    for given, axes in declared.items():
        if given not in feed:
            hint = f"{did_you_mean(given, feed)} the model takes {', '.join(feed)}"
            raise ConfigError(f"unknown input {given!r}", where=f"dynamic.{given}", hint=hint.lstrip())
        rank = feed[given].ndim
        for axis, (name, bound) in axes.items():
            where = f"dynamic.{given}.{axis}"
            if not -rank <= axis < rank:
                raise ConfigError(f"input {given!r} has {rank} axes, there is no axis {axis}", where=where)
            names[given, axis % rank] = name
            bounds[name] = _merged(bounds.get(name), bound, where)
    out = Axes(names=names, bounds=bounds)
    for name, bound in bounds.items():
        _check(out, feed, name, bound)
    return out


def _merged(known: Bounds | None, new: Bounds, where: str) -> Bounds:
    """The bounds of a tied axis may be told at any of its places, but not in two ways."""
    if known is None or known == Bounds():
        return new
    if new not in (known, Bounds()):
        raise ConfigError(f"the axis is tied to another with other bounds: {known} and {new}", where=where)
    return known


def _check(axes: Axes, feed: Feed, name: str, bound: Bounds) -> None:
    place = axes.places(name)[0]
    where = f"dynamic.{place[0]}.{place[1]}"
    seen = {feed[given].shape[axis] for given, axis in axes.places(name)}
    if len(seen) > 1:
        raise ConfigError(f"{name!r} ties axes whose sizes in the example differ: {sorted(seen)}", where=where)
    size, low, high = seen.pop(), bound.min, bound.max
    if (
        bound.multiple < 1
        or (low is not None and low < 1)
        or (high is not None and high < max(low or 1, 2 * bound.multiple))
    ):
        raise ConfigError(
            f"bounds of {name!r} leave nothing to vary: min {low}, max {high}, multiple {bound.multiple}",
            where=where,
            hint="a dynamic axis needs 1 <= min <= max and room for two multiples; leave a fixed axis out",
        )
    if size % bound.multiple or size < (low or 1) or (high is not None and size > high):
        told = ", ".join(f"{k} {v}" for k, v in (("min", low), ("max", high), ("multiple", bound.multiple)) if v)
        raise ConfigError(f"the example's size {size} of {name!r} is outside of what is declared: {told}", where=where)


def write(model: onnx.ModelProto, axes: Axes) -> None:
    """Gives the graph's symbolic sizes their declared names, in place.

    Raises:
        StageError: an axis that was declared dynamic is fixed in the graph, or two names are one size in it.
    """
    symbols: dict[str, str] = {}
    for given in model.graph.input:
        for axis, dim in enumerate(given.type.tensor_type.shape.dim):
            name = axes.names.get((given.name, axis))
            if name is None:
                continue
            symbol = dim.dim_param
            if not symbol or is_number(symbol):
                raise baked(given.name, axis, name, symbol or str(dim.dim_value))
            if symbols.setdefault(symbol, name) != name:
                raise StageError(
                    f"the model needs {symbols[symbol]!r} and {name!r} to be the same size",
                    where=f"input {given.name}, axis {axis}",
                    hint="give both the same name in `dynamic`",
                )
            symbols |= _step(symbol, name, axes.bounds[name].multiple)
    for item in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in item.type.tensor_type.shape.dim:
            _rename(dim, symbols)


def settle(model: onnx.ModelProto, axes: Axes, runs: Iterable[tuple[Feed, Feed]]) -> None:
    """Corrects the declared shapes of the outputs, in place, by what they were on real feeds of different sizes.

    Args:
        runs: (feed, outputs by name), the axes varied.
    """
    runs = list(runs)
    sizes = {name: [axes.size(feed, name) for feed, _ in runs] for name in axes.bounds}
    for output in model.graph.output:
        shape = output.type.tensor_type.shape
        seen = [found[output.name].shape for _, found in runs]
        if len(shape.dim) != len(seen[0]):
            del shape.dim[:]
            shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in seen[0])
        for axis, dim in enumerate(shape.dim):
            column = [s[axis] for s in seen]
            if len(set(column)) > 1 and not dim.dim_param:
                dim.dim_param = next((n for n, known in sizes.items() if known == column), f"{output.name}_{axis}")
            elif len(set(column)) == 1 and not dim.dim_param:
                dim.dim_value = column[0]


def baked(given: str, axis: int, name: str, size: str, line: str = "") -> StageError:
    """The error for a declared axis that tracing has fixed, at `line` where that is known."""
    return StageError(
        f"the axis was declared dynamic ({name}), but the traced model has it fixed at {size}",
        where=f"input {given}, axis {axis}" + (f" ({line})" if line else ""),
        hint="something in forward() turns this size into a plain number (int(x.shape[…]), a buffer or state of that "
        "size, a Python loop over it); take it from the input's shape, or leave the axis out of `dynamic`",
    )


def _step(symbol: str, name: str, multiple: int) -> dict[str, str]:
    """With `4*_h` called h, what the graph calls `_h` is h/4."""
    inner = re.fullmatch(rf"{multiple}\*(\w+)", symbol)
    return {inner[1]: f"{name}//{multiple}"} if inner and multiple > 1 else {}


def _rename(dim: onnx.TensorShapeProto.Dimension, symbols: Mapping[str, str]) -> None:
    text = dim.dim_param
    if is_number(text):
        dim.dim_value = int(text)
    elif text in symbols:
        dim.dim_param = symbols[text]
    elif text:
        dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda m: symbols.get(m[0], m[0]), text)
