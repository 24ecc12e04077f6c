"""Feeds for a foreign model: from samples where there are some, else drawn; on both, every size is tried first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.export.probe_files import drawn
from layerline.export.signature import Value
from layerline.graph.analysis import integer_usage
from layerline.onnx_import.feed_sources import WIDE, Drawn, Given
from layerline.onnx_import.size_search import BATCH, Declared, Feeder, told
from layerline.pipeline.errors import ConfigError, StageError

Span = tuple[int, int]
"""Lowest and highest integer, both included."""


@dataclass(frozen=True, kw_only=True)
class Fed:
    """Feeds, the first the likeliest.

    Attributes:
        ranges: of integer inputs, where declared or where the graph tells.
        values: in words, what each input was fed with.
    """

    feeds: list[Feed]
    ranges: Mapping[str, Span]
    values: Mapping[str, str]


def ranges(light: Light, inputs: Sequence[Value], declared: Mapping[str, Span]) -> dict[str, Span]:
    """What integer inputs may hold: as declared, else the rows of the table that they pick from.

    Raises:
        ConfigError: a range for no input, for one that holds no integers, or an empty one.
    """
    integers = {v.name for v in inputs if np.dtype(v.dtype).kind in "iu"}
    for name, (low, high) in declared.items():
        where = f"ranges.{name}"
        if name not in integers:
            known = ", ".join(sorted(integers)) or "none"
            raise ConfigError(f"there is no integer input {name!r}", where=where, hint=f"integer inputs: {known}")
        if low > high:
            raise ConfigError(f"low {low} is above high {high}", where=where)
    tables = {n: (0, rows - 1) for n in sorted(integers) if (rows := integer_usage.rows(light, n))}
    return tables | dict(declared)


def from_samples(feeder: Feeder, given: Given, count: int, known: Mapping[str, Span]) -> Fed:
    """Feeds of given samples: the first ones, the next ones, other sizes, and integers over their whole range.

    Args:
        count: samples to take after the first ones.

    Raises:
        StageError: the model refuses the samples.
        ConfigError: samples outside of a range.
    """
    _check_samples(given, known)
    batches = given.batches()
    batch = max((feeder.declared.get(b, Declared()).fit(BATCH) for b in batches), default=BATCH)
    first = given.sizes(batch)
    if said := feeder.refuses(given.feed(first)):
        raise _misfit(feeder, given, first, batches, said)
    feeds = [given.feed(first), *_next(feeder, given, count, batch, first), *feeder.vary(given, first)]
    for name, (low, high) in known.items():
        array = drawn(feeds[0][name], low, high, np.random.default_rng(0))
        if feeder.refuses(feed := {**feeds[0], name: array}) is None:
            feeds.append(feed)
    for wide in _guesses(given.inputs, known)[:1]:  # samples alone would not tell a division that rounds otherwise
        below = {n: drawn(feeds[0][n], *span, np.random.default_rng(0)) for n, span in wide.items()}
        if below and feeder.refuses(feed := {**feeds[0], **below}) is None:
            feeder.edges.append(feed)
    return Fed(feeds=feeds, ranges=known, values=dict.fromkeys(feeds[0], f"{given.count} samples"))


def _misfit(feeder: Feeder, given: Given, first: Mapping[str, int], batches: Iterable[str], said: str) -> StageError:
    """The error for samples that the model refuses; where it runs on other numbers of them, with the number."""
    for size in (s for s in (1, 4, 8, 16, 32, 64, 3) if s not in (first[b] for b in batches)):
        at = dict.fromkeys(sorted(batches), size)
        if at and feeder.refuses(given.feed({**first, **at})) is None:
            wanted, takes = told({b: first[b] for b in at}), told(at)
            return StageError(
                f"the model runs at {takes} alone, not at {wanted}, though its file says that this size varies: {said}",
                where="data",
                hint=f"that size is written into the node named: dims: {{{', '.join(f'{b}: {size}' for b in at)}}}",
            )
    return StageError(f"the model does not run on the samples: {said}", where="data")


def from_nothing(feeder: Feeder, known: Mapping[str, Span]) -> Fed:
    """Feeds of numbers drawn at random, with a fixed seed, at the first sizes that the model takes and at others.

    Raises:
        StageError: it takes none of those that were tried.
    """
    complaint = ""
    for unknown in _guesses(feeder.inputs, known):
        source = _drawn(feeder, {**unknown, **known}, known)
        first = feeder.search(source)
        if isinstance(first, str):
            complaint = complaint or first
            continue
        # A second draw, and one for each number that may lead into another branch.
        turns = range(1, 1 + max([1, *map(len, source.special.values())]))
        others = [f for turn in turns if feeder.refuses(f := source.feed(first, turn)) is None]
        feeds = [source.feed(first), *feeder.vary(source, first), *others]
        return Fed(feeds=feeds, ranges=known, values={v.name: _in_words(v, source, known) for v in feeder.inputs})
    raise StageError(
        f"no inputs were found that the model runs on; {complaint}",
        where="import-onnx",
        hint="give samples (`data: samples.npz`), or sizes and ranges (`dims: {name: size}`, `ranges: {input: …}`)",
    )


def _check_samples(given: Given, known: Mapping[str, Span]) -> None:
    for name, (low, high) in known.items():
        array = given.arrays[name]
        if array.size and (array.min() < low or array.max() > high):
            seen = f"{array.min()} to {array.max()}"
            raise ConfigError(f"the samples hold {seen}, the range is {low} to {high}", where=f"data: {name}")


def _next(feeder: Feeder, given: Given, count: int, batch: int, first: Mapping[str, int]) -> list[Feed]:
    """Samples after the first ones: all at once where the model takes any number, else in feeds of its own size."""
    if given.batches():
        other = {b: feeder.declared.get(b, Declared()).fit(count) for b in given.batches()}
        feeds = [given.feed({**first, **other}, batch)] if given.count > batch else []
    else:
        own = next((int(v.shape[0]) for v in given.inputs if given.stacked(v) and isinstance(v.shape[0], int)), 1)
        feeds = [given.feed(first, turn) for turn in range(own, min(count + own, given.count), own)]
    return [f for f in feeds if feeder.refuses(f) is None]


def _guesses(inputs: Sequence[Value], known: Mapping[str, Span]) -> list[dict[str, Span]]:
    """Ranges to try for integers of which nothing is known, negative ones first: a model that takes them must be proved
    on them."""
    unknown = [v for v in inputs if np.dtype(v.dtype).kind in "iu" and v.name not in known]
    wide = {v.name: (-WIDE if np.dtype(v.dtype).kind == "i" else 0, WIDE) for v in unknown}
    tries = [wide, dict.fromkeys(wide, (0, WIDE)), dict.fromkeys(wide, (0, 1))]
    return tries if unknown else [{}]


def _drawn(feeder: Feeder, spans: Mapping[str, Span], known: Mapping[str, Span]) -> Drawn:
    def allowed(name: str, number: int) -> bool:
        return name not in known or known[name][0] <= number <= known[name][1]

    special = {n: tuple(s for s in integer_usage.compared(feeder.model, n) if allowed(n, s)) for n in spans}
    return Drawn(inputs=tuple(feeder.inputs), ranges=spans, special=special)


def _in_words(value: Value, source: Drawn, known: Mapping[str, Span]) -> str:
    if value.name not in source.ranges:
        return "true and false at random" if value.dtype == "bool" else "standard normal numbers"
    low, high = source.ranges[value.name]
    told = f"integers {low} to {high}"
    if special := source.special.get(value.name):
        told += f" and {', '.join(map(str, special))}, which the graph compares them with"
    return told if value.name in known else f"{told}; nothing tells their range"
