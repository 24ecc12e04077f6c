"""Optimisation profiles: resolves the sizes an engine is built for and checks them before the build.

The checks stand here because TensorRT's builder returns None for a wrong profile, without a reason. Where one dimension
has different sizes in two inputs, it builds an engine that no input fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def admits(self, shape: Shape) -> bool:
        return len(shape) == len(self.min) and self.excess(shape) == 0

    def excess(self, shape: Shape) -> float:
        """How far a shape lies outside the range, summed over the axes; inf for another rank."""
        if len(shape) != len(self.min):
            return float("inf")
        total = 0
        for low, size, high in zip(self.min, shape, self.max, strict=True):
            total += max(low - size, size - high, 0)
        return total


Profile = Mapping[str, ShapeRange]
"""The dynamic inputs by name. A static input needs no entry."""


def resolve(
    inputs: Mapping[str, Symbolic],
    bounds: Mapping[str, Dim],
    requested: Sequence[Mapping[str, Sizes | ShapeRange]],
    where: str = "profiles",
) -> tuple[Profile, ...]:
    """Completes and checks the profiles to build with; none for a model without dynamic inputs.

    Args:
        inputs: shape of every input.
        bounds: bounds of symbolic dimensions; dimensions may be missing.
        requested: per profile, sizes by dimension or shapes by input. If empty, one profile spans the bounds.
        where: the field that `requested` comes from, for errors.

    Raises:
        ConfigError: names the input or dimension. A dynamic input has no entry, min <= opt <= max does not hold, a
            size is below 1, the rank differs, a static size or a bound is contradicted, one dimension has different
            sizes in two inputs, or a name is unknown.
    """
    dynamic = {name: shape for name, shape in inputs.items() if _symbols_of(shape)}
    if not requested and dynamic:
        return (_spanning(dynamic, bounds, where),)
    profiles: list[Profile] = []
    for index, entries in enumerate(requested):
        field = f"{where}[{index}]"
        for name, entry in entries.items():
            _check_entry(name, entry, inputs, f"{field}.{name}")
        profile = {name: _shape_range(name, shape, entries, field) for name, shape in dynamic.items()}
        _check_ties(profile, inputs, entries, field)
        _check_bounds(profile, inputs, bounds, field)
        profiles.append(profile)
    if not dynamic:
        return ()
    return tuple(profiles)


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """Indices of the profiles that admit the shapes of all inputs."""
    return [i for i, profile in enumerate(profiles) if _refused_input(profile, shapes) is None]


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
        return min(fitting, key=lambda i: _from_opt(profiles[i], shapes))
    nearest = min(range(len(profiles)), key=lambda i: _total_excess(profiles[i], shapes))
    refused = _refused_input(profiles[nearest], shapes)
    assert refused is not None
    name, limits = refused
    raise StageError(
        f"the shape {_text(shapes[name])} fits no profile of the engine; the nearest is profile {nearest} of "
        f"{len(profiles)}, which admits {_text(limits.min)} to {_text(limits.max)}",
        where=f"input {name}",
        hint="feed another size, or widen `profiles` of the engine stage and build again",
    )


def _refused_input(profile: Profile, shapes: Mapping[str, Shape]) -> tuple[str, ShapeRange] | None:
    """The first input whose shape the profile does not admit, with the range that it has there."""
    for name, limits in profile.items():
        if not limits.admits(shapes[name]):
            return name, limits
    return None


def _total_excess(profile: Profile, shapes: Mapping[str, Shape]) -> float:
    return sum(limits.excess(shapes[name]) for name, limits in profile.items())


def _spanning(dynamic: Mapping[str, Symbolic], bounds: Mapping[str, Dim], field: str) -> Profile:
    entries: dict[str, Sizes | ShapeRange] = {}
    for name, shape in dynamic.items():
        for dim in _symbols_of(shape):
            if dim not in bounds:
                raise _missing(name, shape, dim, field, "and signature.json gives it no bounds")
            entries[dim] = _default_sizes(dim, bounds[dim])
    return {name: _shape_range(name, shape, entries, field) for name, shape in dynamic.items()}


def _default_sizes(dim: str, bound: Dim) -> Sizes:
    """The least and the greatest multiple within the bounds, and the multiple half-way between, the lower of two."""
    step = bound.multiple
    where = f"signature.json, dimension {dim}"
    low = -(-bound.min // step) * step  # rounded up
    high = bound.max // step * step
    if low > high:
        raise ConfigError(f"no multiple of {step} lies between {bound.min} and {bound.max}", where=where)
    sizes = Sizes(low, low + (high - low) // step // 2 * step, high)
    _check_sizes(sizes, where)
    return sizes


def _check_entry(name: str, entry: Sizes | ShapeRange, inputs: Mapping[str, Symbolic], where: str) -> None:
    if isinstance(entry, Sizes):
        if name not in _dims(inputs):
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


def _shape_range(name: str, shape: Symbolic, entries: Mapping[str, Sizes | ShapeRange], field: str) -> ShapeRange:
    entry = entries.get(name)
    if isinstance(entry, ShapeRange):
        return entry
    sizes: list[Sizes] = []
    for dim in shape:
        if isinstance(dim, int):
            sizes.append(Sizes(dim, dim, dim))
            continue
        dim_sizes = entries.get(dim)
        if not isinstance(dim_sizes, Sizes):
            raise _missing(name, shape, dim, field, "and this profile has no entry for either")
        sizes.append(dim_sizes)
    low, opt, high = zip(*sizes, strict=True)
    return ShapeRange(low, opt, high)


def _check_ties(
    profile: Profile, inputs: Mapping[str, Symbolic], entries: Mapping[str, Sizes | ShapeRange], field: str
) -> None:
    # Equal symbols mean equal sizes: all inputs must agree on them.
    first = {dim: ("its own entry", sizes) for dim, sizes in entries.items() if isinstance(sizes, Sizes)}
    for name, dim, sizes in _symbols(profile, inputs):
        owner, first_sizes = first.setdefault(dim, (f"input {name}", sizes))
        if first_sizes != sizes:
            raise ConfigError(
                f"the dimension {dim!r} must have one size everywhere, but {owner} says {first_sizes} and "
                f"input {name} says {sizes}",
                where=f"{field}.{name}",
                hint=f"write it once: `{dim}: [{', '.join(map(str, first_sizes))}]`",
            )


def _check_bounds(profile: Profile, inputs: Mapping[str, Symbolic], bounds: Mapping[str, Dim], field: str) -> None:
    for name, dim, sizes in _symbols(profile, inputs):
        bound = bounds.get(dim)
        if bound is None:
            continue
        if sizes.min < bound.min or sizes.max > bound.max:
            raise ConfigError(
                f"the dimension {dim!r} of input {name} runs from {sizes.min} to {sizes.max}, but the model was "
                f"exported for {bound.min} to {bound.max}",
                where=f"{field}.{name}",
                hint="stay within, or widen the bounds of the export stage",
            )
        if any(size % bound.multiple for size in sizes):
            raise ConfigError(
                f"the dimension {dim!r} of input {name} takes multiples of {bound.multiple}, got {sizes}",
                where=f"{field}.{name}",
            )


def _symbols(profile: Profile, inputs: Mapping[str, Symbolic]) -> Iterator[tuple[str, str, Sizes]]:
    for name, span in profile.items():
        for axis, dim in enumerate(inputs[name]):
            if isinstance(dim, str):
                yield name, dim, span.sizes(axis)


def _missing(name: str, shape: Symbolic, dim: str, field: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} has no min/opt/max: its dimension {dim!r} is dynamic, {_text(shape)}, {why}",
        where=field,
        hint=f"add `{dim}: [1, 8, 32]`, with your sizes, to the engine stage's profiles",
    )


def _unknown(name: str, inputs: Mapping[str, Symbolic], where: str) -> ConfigError:
    dims = _dims(inputs)
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


def _symbols_of(shape: Symbolic) -> list[str]:
    return [dim for dim in shape if isinstance(dim, str)]


def _dims(inputs: Mapping[str, Symbolic]) -> list[str]:
    names = set[str]()
    for shape in inputs.values():
        names.update(_symbols_of(shape))
    return sorted(names)


def _from_opt(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    """How far shapes are from the opt shapes of a profile, summed over inputs and axes."""
    distance = 0
    for name, limits in profile.items():
        for opt, size in zip(limits.opt, shapes[name], strict=True):
            distance += abs(opt - size)
    return distance


def _text(shape: Symbolic) -> str:
    return f"({', '.join(map(str, shape))})"
