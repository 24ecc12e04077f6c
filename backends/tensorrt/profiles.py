"""Optimisation profiles: resolves the sizes an engine is built for and checks them before the build.

The checks stand here because TensorRT's builder returns None for a wrong profile, without a reason. Sizes belong to
dimensions, not inputs: where one dimension has different sizes in two inputs, it builds an engine that no input fits.
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


def resolve(
    inputs: Mapping[str, Symbolic],
    bounds: Mapping[str, Dim],
    requested: Sequence[Mapping[str, Sizes]],
    where: str = "profiles",
) -> tuple[Profile, ...]:
    """Completes and checks the profiles to build with; none for a model without dynamic inputs.

    Args:
        inputs: shape of every input.
        bounds: bounds of symbolic dimensions; dimensions may be missing.
        requested: the profiles, sizes by dimension; if empty, one profile spans the bounds.
        where: the field that `requested` comes from, for errors.

    Raises:
        ConfigError: names the input or dimension. A dynamic input has no entry, min <= opt <= max does not hold, a
            size is below 1, a bound is contradicted, or a name is unknown.
    """
    dynamic = {name: shape for name, shape in inputs.items() if _dims(shape)}
    dims = sorted({dim for shape in dynamic.values() for dim in _dims(shape)})
    if not requested and dynamic:
        spanning = {dim: _default_sizes(dim, bounds[dim]) for dim in dims if dim in bounds}
        return (_profile(dynamic, spanning, where, "and signature.json gives it no bounds"),)
    profiles: list[Profile] = []
    for index, entries in enumerate(requested):
        field = f"{where}[{index}]"
        for dim, sizes in entries.items():
            if dim not in dims:
                what = f"the model has no dynamic dimension {dim!r}; dynamic dimensions: {', '.join(dims) or 'none'}"
                raise ConfigError(what, where=f"{field}.{dim}", hint=did_you_mean(dim, dims, 0.5))
            _check_sizes(sizes, f"{field}.{dim}")
            if dim in bounds:
                _check_bounds(dim, sizes, bounds[dim], f"{field}.{dim}")
        profiles.append(_profile(dynamic, entries, field, "and this profile has no entry for it"))
    if not dynamic:
        return ()
    return tuple(profiles)


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
    # TensorRT tunes kernels for opt: the nearer a shape is to it, the faster it runs.
    fitting = admitting(profiles, shapes)
    if fitting:
        return min(fitting, key=lambda i: sum(limits.from_opt(shapes[name]) for name, limits in profiles[i].items()))
    # For the error: the profile that lacks least.
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
    # Sizes that the model takes are multiples; half-way is counted in these.
    steps = bound.sizes()
    if not steps:
        raise ConfigError(f"no multiple of {bound.multiple} lies between {bound.min} and {bound.max}", where=where)
    sizes = Sizes(steps[0], steps[(len(steps) - 1) // 2], steps[-1])
    _check_sizes(sizes, where)
    return sizes


def _check_sizes(sizes: Sizes, where: str) -> None:
    if sizes.min < 1:
        raise ConfigError(f"min is {sizes.min}; an engine's sizes start at 1", where=where)
    if not sizes.min <= sizes.opt <= sizes.max:
        raise ConfigError(f"expected min <= opt <= max, got {sizes}", where=where)


def _check_bounds(dim: str, sizes: Sizes, bound: Dim, where: str) -> None:
    if sizes.min < bound.min or sizes.max > bound.max:
        raise ConfigError(
            f"the dimension {dim!r} runs from {sizes.min} to {sizes.max}, but the model was exported for "
            f"{bound.min} to {bound.max}",
            where=where,
            hint="stay within, or widen the bounds of the export stage",
        )
    if any(size % bound.multiple for size in sizes):
        raise ConfigError(f"the dimension {dim!r} takes multiples of {bound.multiple}, got {sizes}", where=where)


def _profile(inputs: Mapping[str, Symbolic], entries: Mapping[str, Sizes], where: str, why_missing: str) -> Profile:
    """The shapes of each input, put together from the sizes of its dimensions."""
    profile: dict[str, ShapeRange] = {}
    for name, shape in inputs.items():
        by_axis: list[Sizes] = []
        for dim in shape:
            if isinstance(dim, int):
                by_axis.append(Sizes(dim, dim, dim))
            elif dim in entries:
                by_axis.append(entries[dim])
            else:
                raise ConfigError(
                    f"{name} has no min/opt/max: its dimension {dim!r} is dynamic, {_text(shape)}, {why_missing}",
                    where=where,
                    hint=f"add `{dim}: [1, 8, 32]`, with your sizes, to the engine stage's profiles",
                )
        profile[name] = ShapeRange(*zip(*by_axis, strict=True))
    return profile


def _dims(shape: Symbolic) -> list[str]:
    return [dim for dim in shape if isinstance(dim, str)]


def _text(shape: Symbolic) -> str:
    return f"({', '.join(map(str, shape))})"
