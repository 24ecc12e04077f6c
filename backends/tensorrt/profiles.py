"""Optimisation profiles: the sizes an engine is built for, resolved and checked before any builder sees them.

TensorRT's builder answers a wrong profile with None or, where two tied sizes differ, with an engine no input fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

Shape = tuple[int, ...]
Symbolic = tuple[int | str, ...]
"""Static sizes as integers, dynamic ones by name."""


class Bounds(Protocol):
    """Sizes that a symbolic dimension was exported for, both ends inclusive."""

    @property
    def min(self) -> int: ...
    @property
    def max(self) -> int: ...
    @property
    def multiple(self) -> int: ...


class Sizes(NamedTuple):
    """Three sizes of one dimension."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Span:
    """Shapes of one input in one profile; every size from `min` to `max` is admitted, `opt` is tuned for."""

    min: Shape
    opt: Shape
    max: Shape

    def sizes(self, axis: int) -> Sizes:
        return Sizes(self.min[axis], self.opt[axis], self.max[axis])

    def admits(self, shape: Shape) -> bool:
        return len(shape) == len(self.min) and self.excess(shape) == 0

    def excess(self, shape: Shape) -> float:
        """How far a shape lies outside, in sizes; another rank is farther than any size."""
        if len(shape) != len(self.min):
            return float("inf")
        return sum(max(a - x, x - b, 0) for a, x, b in zip(self.min, shape, self.max, strict=True))


Profile = Mapping[str, Span]
"""The dynamic inputs by name. A static input needs no entry."""


def resolve(
    inputs: Mapping[str, Symbolic],
    bounds: Mapping[str, Bounds],
    requested: Sequence[Mapping[str, Sizes | Span]],
    where: str = "profiles",
) -> tuple[Profile, ...]:
    """The profiles to build with, each complete and consistent; none for a model without dynamic inputs.

    Args:
        inputs: shape of every input.
        bounds: of symbolic dimensions, where known.
        requested: per profile, sizes by dimension or shapes by input. Where nothing is, one profile spans the bounds.
        where: the field that `requested` comes from, for errors.

    Raises:
        ConfigError: names the input or dimension: nothing for a dynamic input, min <= opt <= max broken, a size
            below 1, another rank, a static size or a bound contradicted, tied sizes that differ, an unknown name.
    """
    dynamic = {name: shape for name, shape in inputs.items() if any(isinstance(d, str) for d in shape)}
    if not requested:
        return (_spanning(dynamic, bounds, where),) if dynamic else ()
    profiles = []
    for index, entries in enumerate(requested):
        field = f"{where}[{index}]"
        for name, entry in entries.items():
            _check_entry(name, entry, inputs, f"{field}.{name}")
        profile = {name: _span(name, shape, entries, field) for name, shape in dynamic.items()}
        _check_ties(profile, inputs, entries, field)
        _check_bounds(profile, inputs, bounds, field)
        profiles.append(profile)
    return tuple(profiles) if dynamic else ()


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """Indices of the profiles that shapes of all inputs fit."""
    return [i for i, p in enumerate(profiles) if all(span.admits(shapes[n]) for n, span in p.items())]


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Index of the profile to run these shapes with: of those that admit them, the one whose opt shapes are nearest.

    Raises:
        StageError: an empty input, or no profile admits a shape; names the input and the nearest profile.
    """
    for name, shape in shapes.items():
        if 0 in shape:
            raise StageError(
                f"the shape {_text(shape)} has no elements; an engine's sizes start at 1",
                where=f"input {name}",
                hint="skip empty batches before they reach the engine",
            )
    if fitting := admitting(profiles, shapes):
        return min(fitting, key=lambda i: _from_opt(profiles[i], shapes))
    nearest = min(range(len(profiles)), key=lambda i: sum(s.excess(shapes[n]) for n, s in profiles[i].items()))
    name, span = next((n, s) for n, s in profiles[nearest].items() if not s.admits(shapes[n]))
    raise StageError(
        f"the shape {_text(shapes[name])} fits no profile of the engine; the nearest is profile {nearest} of "
        f"{len(profiles)}, which admits {_text(span.min)} to {_text(span.max)}",
        where=f"input {name}",
        hint="feed another size, or widen `profiles` of the engine stage and build again",
    )


def _spanning(dynamic: Mapping[str, Symbolic], bounds: Mapping[str, Bounds], field: str) -> Profile:
    entries: dict[str, Sizes | Span] = {}
    for name, shape in dynamic.items():
        for dim in (d for d in shape if isinstance(d, str)):
            if dim not in bounds:
                raise _missing(name, shape, dim, field, "and signature.json gives it no bounds")
            entries[dim] = _middle(dim, bounds[dim])
    return {name: _span(name, shape, entries, field) for name, shape in dynamic.items()}


def _middle(dim: str, bound: Bounds) -> Sizes:
    """The bounds, drawn in to multiples, and the multiple half-way between, the lower of two."""
    step, where = bound.multiple, f"signature.json, dimension {dim}"
    low, high = -(-bound.min // step) * step, bound.max // step * step
    if low > high:
        raise ConfigError(f"no multiple of {step} lies between {bound.min} and {bound.max}", where=where)
    sizes = Sizes(low, low + (high - low) // step // 2 * step, high)
    _check_sizes(sizes, where)
    return sizes


def _check_entry(name: str, entry: Sizes | Span, inputs: Mapping[str, Symbolic], where: str) -> None:
    if isinstance(entry, Sizes):
        if name not in _dims(inputs):
            raise _unknown(name, inputs, where)
        return _check_sizes(entry, where)
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
    return None


def _check_sizes(sizes: Sizes, where: str) -> None:
    if sizes.min < 1:
        raise ConfigError(f"min is {sizes.min}; an engine's sizes start at 1", where=where)
    if not sizes.min <= sizes.opt <= sizes.max:
        raise ConfigError(f"expected min <= opt <= max, got {sizes}", where=where)


def _span(name: str, shape: Symbolic, entries: Mapping[str, Sizes | Span], field: str) -> Span:
    own = entries.get(name)
    if isinstance(own, Span):
        return own
    sizes = [Sizes(d, d, d) if isinstance(d, int) else entries.get(d) for d in shape]
    for dim, found in zip(shape, sizes, strict=True):
        if not isinstance(found, Sizes):
            raise _missing(name, shape, str(dim), field, "and this profile has no entry for either")
    low, opt, high = zip(*(s for s in sizes if isinstance(s, Sizes)), strict=True)
    return Span(low, opt, high)


def _check_ties(
    profile: Profile, inputs: Mapping[str, Symbolic], entries: Mapping[str, Sizes | Span], field: str
) -> None:
    first = {dim: ("its own entry", sizes) for dim, sizes in entries.items() if isinstance(sizes, Sizes)}
    for name, dim, sizes in _symbols(profile, inputs):
        owner, seen = first.setdefault(dim, (f"input {name}", sizes))
        if seen != sizes:
            raise ConfigError(
                f"the dimension {dim!r} is one size everywhere, but is given {seen} by {owner} and {sizes} by "
                f"input {name}",
                where=f"{field}.{name}",
                hint=f"give it once: `{dim}: [{', '.join(map(str, seen))}]`",
            )


def _check_bounds(profile: Profile, inputs: Mapping[str, Symbolic], bounds: Mapping[str, Bounds], field: str) -> None:
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
    return ConfigError(
        f"the model has no {'dimension' if name in inputs else 'input or dynamic dimension'} {name!r}; "
        f"inputs: {', '.join(inputs)}; dynamic dimensions: {', '.join(dims) or 'none'}",
        where=where,
        hint=hint,
    )


def _dims(inputs: Mapping[str, Symbolic]) -> list[str]:
    return sorted({d for shape in inputs.values() for d in shape if isinstance(d, str)})


def _from_opt(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(abs(a - x) for n, span in profile.items() for a, x in zip(span.opt, shapes[n], strict=True))


def _text(shape: Symbolic) -> str:
    return f"({', '.join(map(str, shape))})"
