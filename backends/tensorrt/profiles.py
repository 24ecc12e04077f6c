"""Optimisation profiles: resolves the sizes an engine is built for and checks them before the build.

The checks stand here because TensorRT's builder returns None for a wrong profile, without a reason. Where one dimension
has different sizes in two inputs, it builds an engine that no input fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

Shape = tuple[int, ...]
Symbolic = tuple[int | str, ...]
"""Static sizes as integers, dynamic ones by name."""


class Sizes(NamedTuple):
    """Three sizes of one dimension."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of one input in one profile: sizes from `min` to `max` are allowed, and the engine is tuned for `opt`."""

    min: Shape
    opt: Shape
    max: Shape

    def sizes(self, axis: int) -> Sizes:
        return Sizes(self.min[axis], self.opt[axis], self.max[axis])

    def excess(self, shape: Shape) -> float:
        """How far a shape lies outside the range, summed over the axes; inf for another rank."""
        if len(shape) != len(self.min):
            return float("inf")
        total = 0
        for low, size, high in zip(self.min, shape, self.max, strict=True):
            total += max(low - size, size - high, 0)
        return total

    def from_opt(self, shape: Shape) -> int:
        """How far a shape of this rank is from `opt`, summed over the axes."""
        return sum(abs(opt - size) for opt, size in zip(self.opt, shape, strict=True))


Profile = Mapping[str, ShapeRange]
"""The dynamic inputs by name. A static input needs no entry."""
Entries = Mapping[str, Sizes | ShapeRange]
"""A profile as it is asked for: sizes by dimension, or shapes by input."""


def resolve(
    inputs: Mapping[str, Symbolic], bounds: Mapping[str, Dim], requested: Sequence[Entries], where: str = "profiles"
) -> tuple[Profile, ...]:
    """Completes and checks the profiles to build with; none for a model without dynamic inputs.

    Args:
        inputs: shape of every input.
        bounds: bounds of symbolic dimensions; dimensions may be missing.
        requested: the profiles; if empty, one profile spans the bounds.
        where: the field that `requested` comes from, for errors.

    Raises:
        ConfigError: names the input or dimension. A dynamic input has no entry, min <= opt <= max does not hold, a
            size is below 1, the rank differs, a static size or a bound is contradicted, one dimension has different
            sizes in two inputs, or a name is unknown.
    """
    dynamic = {name: shape for name, shape in inputs.items() if _dims(shape)}
    if not requested and dynamic:
        dims = [dim for shape in dynamic.values() for dim in _dims(shape) if dim in bounds]
        spanning = {dim: _default_sizes(dim, bounds[dim]) for dim in dims}
        why = "and signature.json gives it no bounds"
        return ({name: _shape_range(name, shape, spanning, where, why) for name, shape in dynamic.items()},)
    profiles: list[Profile] = []
    for index, entries in enumerate(requested):
        field = f"{where}[{index}]"
        for name, entry in entries.items():
            _check_entry(name, entry, inputs, f"{field}.{name}")
        why = "and this profile has no entry for either"
        profile = {name: _shape_range(name, shape, entries, field, why) for name, shape in dynamic.items()}
        _check_dims(profile, inputs, entries, bounds, field)
        profiles.append(profile)
    return tuple(profiles) if dynamic else ()


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """Indices of the profiles that admit the shapes of all inputs."""
    return [index for index, profile in enumerate(profiles) if _excess(profile, shapes) == 0]


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Index of the profile to run these shapes with: among those that admit them, the one with the nearest opt shapes.

    Raises:
        StageError: an input is empty, or no profile admits a shape. Names the input and the nearest profile.
    """
    for name, shape in shapes.items():
        if 0 in shape:
            raise StageError(
                f"the shape {_text(shape)} has no elements; an engine's sizes start at 1",
                where=f"input {name}",
                hint="skip empty batches before they reach the engine",
            )
    fitting = admitting(profiles, shapes)
    if fitting:
        return min(fitting, key=lambda i: sum(limits.from_opt(shapes[name]) for name, limits in profiles[i].items()))
    nearest = min(range(len(profiles)), key=lambda i: _excess(profiles[i], shapes))
    refused = next(name for name, limits in profiles[nearest].items() if limits.excess(shapes[name]))
    limits = profiles[nearest][refused]
    raise StageError(
        f"the shape {_text(shapes[refused])} fits no profile of the engine; the nearest is profile {nearest} of "
        f"{len(profiles)}, which admits {_text(limits.min)} to {_text(limits.max)}",
        where=f"input {refused}",
        hint="feed another size, or widen `profiles` of the engine stage and build again",
    )


def _excess(profile: Profile, shapes: Mapping[str, Shape]) -> float:
    return sum(limits.excess(shapes[name]) for name, limits in profile.items())


def _default_sizes(dim: str, bound: Dim) -> Sizes:
    """The least and the greatest multiple within the bounds, and the multiple half-way between, the lower of two."""
    where = f"signature.json, dimension {dim}"
    steps = bound.sizes()
    if not steps:
        raise ConfigError(f"no multiple of {bound.multiple} lies between {bound.min} and {bound.max}", where=where)
    sizes = Sizes(steps[0], steps[(len(steps) - 1) // 2], steps[-1])
    _check_sizes(sizes, where)
    return sizes


def _check_entry(name: str, entry: Sizes | ShapeRange, inputs: Mapping[str, Symbolic], where: str) -> None:
    """Checks one entry of a requested profile by itself."""
    if isinstance(entry, Sizes):
        if not any(name in _dims(shape) for shape in inputs.values()):
            raise _unknown(name, inputs, where)
        _check_sizes(entry, where)
        return
    if name not in inputs:
        raise _unknown(name, inputs, where)
    declared = inputs[name]
    for label, shape in (("min", entry.min), ("opt", entry.opt), ("max", entry.max)):
        if len(shape) != len(declared):
            raise ConfigError(
                f"{label} {_text(shape)} has rank {len(shape)}, but input {name} has rank {len(declared)}, "
                f"{_text(declared)}",
                where=where,
            )
    for axis, dim in enumerate(declared):
        sizes = entry.sizes(axis)
        _check_sizes(sizes, f"{where}, axis {axis}")
        if isinstance(dim, int) and set(sizes) != {dim}:
            raise ConfigError(
                f"axis {axis} of input {name} is {dim} in the model and can't be {sizes}",
                where=where,
                hint=f"write {dim} there, or export with that axis dynamic",
            )


def _check_sizes(sizes: Sizes, where: str) -> None:
    if sizes.min < 1:
        raise ConfigError(f"min is {sizes.min}; an engine's sizes start at 1", where=where)
    if not sizes.min <= sizes.opt <= sizes.max:
        raise ConfigError(f"expected min <= opt <= max, got {sizes}", where=where)


def _shape_range(name: str, shape: Symbolic, entries: Entries, field: str, why_missing: str) -> ShapeRange:
    """The shapes of one input: its own entry, or put together from those of its dimensions."""
    entry = entries.get(name)
    if isinstance(entry, ShapeRange):
        return entry
    by_axis: list[Sizes] = []
    for dim in shape:
        sizes = Sizes(dim, dim, dim) if isinstance(dim, int) else entries.get(dim)
        if not isinstance(sizes, Sizes):
            raise ConfigError(
                f"{name} has no min/opt/max: its dimension {dim!r} is dynamic, {_text(shape)}, {why_missing}",
                where=field,
                hint=f"add `{dim}: [1, 8, 32]`, with your sizes, to the engine stage's profiles",
            )
        by_axis.append(sizes)
    return ShapeRange(*zip(*by_axis, strict=True))


def _check_dims(
    profile: Profile, inputs: Mapping[str, Symbolic], entries: Entries, bounds: Mapping[str, Dim], field: str
) -> None:
    """Checks that each dimension has one size in all inputs, within what the model was exported for."""
    first = {dim: ("its own entry", sizes) for dim, sizes in entries.items() if isinstance(sizes, Sizes)}
    for name, limits in profile.items():
        where = f"{field}.{name}"
        for axis, dim in enumerate(inputs[name]):
            if isinstance(dim, int):
                continue
            sizes = limits.sizes(axis)
            owner, first_sizes = first.setdefault(dim, (f"input {name}", sizes))
            if first_sizes != sizes:
                raise ConfigError(
                    f"the dimension {dim!r} must have one size everywhere, but {owner} says {first_sizes} and "
                    f"input {name} says {sizes}",
                    where=where,
                    hint=f"write it once: `{dim}: [{', '.join(map(str, first_sizes))}]`",
                )
            bound = bounds.get(dim)
            if bound is not None and (sizes.min < bound.min or sizes.max > bound.max):
                raise ConfigError(
                    f"the dimension {dim!r} of input {name} runs from {sizes.min} to {sizes.max}, but the model was "
                    f"exported for {bound.min} to {bound.max}",
                    where=where,
                    hint="stay within, or widen the bounds of the export stage",
                )
            if bound is not None and any(size % bound.multiple for size in sizes):
                what = f"the dimension {dim!r} of input {name} takes multiples of {bound.multiple}, got {sizes}"
                raise ConfigError(what, where=where)


def _unknown(name: str, inputs: Mapping[str, Symbolic], where: str) -> ConfigError:
    dims = sorted({dim for shape in inputs.values() for dim in _dims(shape)})
    hint = did_you_mean(name, [*inputs, *dims], 0.5)
    if name in inputs or name in dims:
        hint = "a dimension takes three numbers, an input three shapes"
    kind = "dimension" if name in inputs else "input or dynamic dimension"
    return ConfigError(
        f"the model has no {kind} {name!r}; "
        f"inputs: {', '.join(inputs)}; dynamic dimensions: {', '.join(dims) or 'none'}",
        where=where,
        hint=hint,
    )


def _dims(shape: Symbolic) -> list[str]:
    return [dim for dim in shape if isinstance(dim, str)]


def _text(shape: Symbolic) -> str:
    return f"({', '.join(map(str, shape))})"
