"""Feeds for a foreign model: from samples where there are some, else drawn; on both, every size is tried first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.export.probe_files import drawn
from layerline.export.signature import Value
from layerline.graph.analysis.ir_queries import stored_tensor
from layerline.onnx_import.feed_sources import WIDE, Drawn, SampleArrays
from layerline.onnx_import.size_search import BATCH, Feeder, sizes_text
from layerline.pipeline.errors import ConfigError, StageError

IntegerRange = tuple[int, int]
"""Lowest and highest integer, both included."""
# The numbers stay the same through these.
_PASSING = frozenset(
    {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Slice", "Gather"}
)
_COMPARING = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


@dataclass(frozen=True, kw_only=True)
class Fed:
    """Feeds, the likeliest first; ranges of integer inputs, by name; and what each input was fed with, in words."""

    feeds: list[Feed]
    ranges: Mapping[str, IntegerRange]
    values: Mapping[str, str]


def ranges(model: ir.Model, inputs: Sequence[Value], declared: Mapping[str, IntegerRange]) -> dict[str, IntegerRange]:
    """Ranges of integer inputs: as declared, otherwise the rows of the table that they index.

    Raises ConfigError for a range of no input, or of one that holds no integers.
    """
    integers = {value.name for value in inputs if np.dtype(value.dtype).kind in "iu"}
    for name in declared:
        if name not in integers:
            names = ", ".join(sorted(integers)) or "none"
            what = f"there is no integer input {name!r}"
            raise ConfigError(what, where=f"ranges.{name}", hint=f"integer inputs: {names}")
    ranges: dict[str, IntegerRange] = {}
    for name in sorted(integers):
        rows = table_rows(model, name)
        if rows:
            ranges[name] = (0, rows - 1)
    return ranges | dict(declared)


def from_samples(feeder: Feeder, samples: SampleArrays, count: int, ranges: Mapping[str, IntegerRange]) -> Fed:
    """Feeds of samples: the first ones, `count` more, other sizes, and integers over their whole range.

    Raises StageError where the model refuses the samples, ConfigError where they lie outside of a range.
    """
    for name, (low, high) in ranges.items():
        array = samples.arrays[name]
        if array.size and (array.min() < low or array.max() > high):
            values = f"{array.min()} to {array.max()}"
            raise ConfigError(f"the samples hold {values}, the range is {low} to {high}", where=f"data: {name}")
    batches = samples.batches()
    # Two samples, or as many more as a declared bound asks for.
    batch = max((feeder.bounds(name).fit(BATCH) for name in batches), default=BATCH)
    first = samples.sizes(batch)
    error = feeder.refuses(samples.feed(first))
    if error:
        raise _misfit(feeder, samples, first, error)
    feeds = [samples.feed(first), *_next(feeder, samples, count, batch, first), *feeder.vary(samples, first)]
    feeds += feeder.taken(_over(feeds[0], {name: span}) for name, span in ranges.items())
    # Samples are rarely negative, and would not show a division that rounds the other way below zero.
    widest = _guesses(samples.inputs, ranges)[0]
    if widest:
        feeder.edges += feeder.taken([_over(feeds[0], widest)])
    return Fed(feeds=feeds, ranges=ranges, values=dict.fromkeys(feeds[0], f"{samples.count} samples"))


def _over(feed: Feed, ranges: Mapping[str, IntegerRange]) -> Feed:
    """The feed with other integers, drawn over these ranges."""
    changed = dict(feed)
    for name, (low, high) in ranges.items():
        changed[name] = drawn(feed[name], low, high, np.random.default_rng(0))
    return changed


def _misfit(feeder: Feeder, samples: SampleArrays, first: Mapping[str, int], error: str) -> StageError:
    """The error for samples that the model refuses; if it runs on another number of them, with that number."""
    refusal = StageError(f"the model does not run on the samples: {error}", where="data")
    batches = {name: first[name] for name in sorted(samples.batches())}
    if not batches:
        return refusal
    # A Reshape often holds the number of samples that the model was exported with.
    for size in (1, 4, 8, 16, 32, 64, 3):
        sizes = dict.fromkeys(batches, size)
        if feeder.refuses(samples.feed({**first, **sizes})) is None:
            declaration = ", ".join(f"{name}: {size}" for name in batches)
            return StageError(
                f"the model runs only at {sizes_text(sizes)}, not at {sizes_text(batches)}, though its file says that "
                f"this size varies: {error}",
                where="data",
                hint=f"that size is written into the node named: dims: {{{declaration}}}",
            )
    return refusal


def from_nothing(feeder: Feeder, ranges: Mapping[str, IntegerRange]) -> Fed:
    """Feeds of numbers drawn with a fixed seed, at the first sizes that the model takes and at others.

    Raises StageError if it takes none of those that were tried.
    """
    first_error = ""
    for guess in _guesses(feeder.inputs, ranges):
        source = _drawn(feeder, {**guess, **ranges}, ranges)
        first = feeder.search(source)
        if isinstance(first, str):
            first_error = first_error or first
            continue
        # A second draw, and one for each number that may lead into another branch.
        turns = max([1, *map(len, source.special.values())])
        others = feeder.taken(source.feed(first, turn) for turn in range(1, 1 + turns))
        feeds = [source.feed(first), *feeder.vary(source, first), *others]
        values = {value.name: _in_words(value, source, ranges) for value in feeder.inputs}
        return Fed(feeds=feeds, ranges=ranges, values=values)
    what = f"no inputs were found that the model runs on; {first_error}"
    hint = "give samples (`data: samples.npz`), or sizes and ranges (`dims: {name: size}`, `ranges: {input: …}`)"
    raise StageError(what, where="import-onnx", hint=hint)


def _next(feeder: Feeder, samples: SampleArrays, count: int, batch: int, first: Mapping[str, int]) -> list[Feed]:
    """Samples after the first ones: all at once if the model takes any number, otherwise in feeds of its own size."""
    feeds: list[Feed] = []
    batches = samples.batches()
    if batches:
        sizes = {name: feeder.bounds(name).fit(count) for name in batches}
        if samples.count > batch:
            feeds.append(samples.feed({**first, **sizes}, batch))
    else:
        # A fixed number of samples is that of each feed.
        size = 1
        for value in samples.inputs:
            if samples.stacked(value) and isinstance(value.shape[0], int):
                size = value.shape[0]
                break
        feeds += [samples.feed(first, turn) for turn in range(size, min(count + size, samples.count), size)]
    return feeder.taken(feeds)


def _guesses(inputs: Sequence[Value], ranges: Mapping[str, IntegerRange]) -> list[dict[str, IntegerRange]]:
    """Ranges to try for integers without one, the widest first: a model that takes negative ones must be proved on
    them."""
    widest: dict[str, IntegerRange] = {}
    for value in inputs:
        kind = np.dtype(value.dtype).kind
        if value.name in ranges:
            continue
        if kind == "i":
            widest[value.name] = (-WIDE, WIDE)
        elif kind == "u":
            widest[value.name] = (0, WIDE)
    if not widest:
        return [{}]
    # Indices are not below zero, and switches are 0 or 1.
    return [widest, dict.fromkeys(widest, (0, WIDE)), dict.fromkeys(widest, (0, 1))]


def _drawn(feeder: Feeder, spans: Mapping[str, IntegerRange], ranges: Mapping[str, IntegerRange]) -> Drawn:
    """A source of random numbers. It includes the numbers that the graph compares an input with, within its range."""
    special: dict[str, tuple[int, ...]] = {}
    for name in spans:
        special[name] = compared_numbers(feeder.model, name)
        if name in ranges:
            low, high = ranges[name]
            special[name] = tuple(number for number in special[name] if low <= number <= high)
    return Drawn(inputs=tuple(feeder.inputs), ranges=spans, special=special)


def _in_words(value: Value, source: Drawn, ranges: Mapping[str, IntegerRange]) -> str:
    if value.name not in source.ranges:
        if value.dtype == "bool":
            return "true and false at random"
        return "standard normal numbers"
    low, high = source.ranges[value.name]
    text = f"integers {low} to {high}"
    special = source.special.get(value.name)
    if special:
        text += f" and {', '.join(map(str, special))}, which the graph compares them with"
    if value.name not in ranges:
        text += "; nothing tells their range"
    return text


def table_rows(model: ir.Model, name: str) -> int | None:
    """Rows of the smallest stored table that an integer input picks from; None where it picks from none."""
    row_counts: list[int] = []
    for node, place in _readers(model.graph, name):
        if node.op_type == "Gather" and place == 1:
            table = stored_tensor(node.inputs[0])
            if table is not None:
                row_counts.append(table.shape.numpy()[node.attributes.get_int("axis", 0)])
    # An index has to fit into every table that it picks from.
    return min(row_counts, default=None)


def compared_numbers(model: ir.Model, name: str) -> tuple[int, ...]:
    """Stored single numbers that an integer input is compared with: each may lead into another branch."""
    numbers: dict[int, None] = {}
    for node, place in _readers(model.graph, name):
        if node.op_type not in _COMPARING:
            continue
        tensor = stored_tensor(node.inputs[1 - place])
        # Longer tensors are masks and tables, whose elements pick no branch.
        if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
            numbers[int(tensor.numpy().reshape(-1)[0])] = None
    return tuple(numbers)


def _readers(graph: ir.Graph, name: str) -> Iterator[tuple[ir.Node, int]]:
    """Nodes of the main graph that read an input's numbers, however reshaped, and at which place."""
    same = {value for value in graph.inputs if value.name == name}
    # In topological order, so that a chain of such nodes is followed in one pass.
    for node in graph:
        for place, read in enumerate(node.inputs):
            if read in same:
                yield node, place
                if place == 0 and node.op_type in _PASSING:
                    same.add(node.outputs[0])
