"""Compares an imported model with its file, every value, in bounded memory even if the two can't share a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.compare.compare_models import compare, floors, pair_values, why_two_sessions
from layerline.compare.topk_indices import pointers
from layerline.compare.value_types import CODES
from layerline.graph.analysis.rounding_noise import drawn, random_note
from layerline.graph.fusion import verify_rewrites
from layerline.onnx_import.normalize_import import Adopted
from layerline.pipeline.report import LayerDiff

HELD = 256 << 20
"""Bytes of inner values of both sides that may be held at once."""


def unchanged(
    adopted: Adopted, feeds: Sequence[Feed], elements: Callable[[Feed], Mapping[str, int]], tolerance: float | None
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """Compares every value of the adopted model with the file's. Values that follow a random operator aren't judged.

    Args:
        elements: gives the elements of every value of the original's main graph on a feed.
        tolerance: greatest relative L2 error; None for the noise floor, measured as the fuse stage does. No floor is
            needed where all values are equal.

    Returns:
        The rows, and notes.
    """
    original = adopted.original
    random = drawn(original.model)
    random_notes = random_note(random)
    rows, notes = compare_in_parts(original, adopted.light, feeds, elements)
    if all(row.max_abs == 0 and row.passed for row in rows):
        exact_rows = tuple(replace(row, tolerance=0.0) for row in rows)
        return exact_rows, [*random_notes, *notes, "every value is equal to the last bit"]
    noise = floors(original, feeds)
    tolerances: dict[str, float] = {}
    for row in rows:
        allowed = tolerance
        if allowed is None:
            allowed = verify_rewrites.tolerance(row.name, {row.name: CODES.get(row.dtype, 0)}, noise)
        if row.name not in random:
            tolerances[row.name] = allowed
    rows, notes = compare_in_parts(original, adopted.light, feeds, elements, tolerances)
    return rows, [*random_notes, *notes]


def compare_in_parts(
    reference: Light,
    candidate: Light,
    feeds: Sequence[Feed],
    elements: Callable[[Feed], Mapping[str, int]],
    tolerances: Mapping[str, float] | None = None,
) -> tuple[tuple[LayerDiff, ...], tuple[str, ...]]:
    """`compare`, also for models of different opsets, whose inner values have to leave the runtime.

    For those, the outputs are compared on all feeds, and inner values on the feeds whose values can be held at once. If
    there is no such feed, they are compared on the smallest one, in several runs.

    Args:
        elements: gives the elements of every value of the reference's main graph on a feed.

    Returns:
        The rows, and notes.
    """
    why = why_two_sessions(reference.model, candidate.model)
    if why is None:
        return compare(reference, candidate, feeds, tolerances=tolerances), ()
    counts = [elements(feed) for feed in feeds]
    # Four bytes an element, on two sides.
    sizes = [8 * sum(counts_of_feed.values()) for counts_of_feed in counts]
    chosen = [index for index, size in enumerate(sizes) if size <= HELD]
    if not chosen:
        chosen = [sizes.index(min(sizes))]
    largest = max(chosen, key=lambda index: sizes[index])
    pairs = pair_values(reference.model, candidate.model)
    rows = {row.name: row for row in compare(reference, candidate, feeds, pairs={}, tolerances=tolerances)}
    index_sources = pointers(reference.model.graph)
    outputs = {output.name for output in reference.model.graph.output}
    chosen_feeds = [feeds[index] for index in chosen]
    for part in _parts([value for value in pairs if value not in rows], counts[largest]):
        wanted = set(part)
        for value in part:
            # An index is judged by what it points at, which has to be there.
            if value in index_sources and index_sources[value].data in pairs:
                wanted.add(index_sources[value].data)
        part_pairs = {value: pairs[value] for value in pairs if value in wanted and value not in outputs}
        for row in compare(reference, candidate, chosen_feeds, pairs=part_pairs, tolerances=tolerances):
            if row.name in part:
                rows[row.name] = row
    notes = [why]
    if len(chosen) < len(feeds):
        notes.append(f"inner values on {len(chosen)} of {len(feeds)} feeds: memory")
    return tuple(rows[value] for value in pairs if value in rows), tuple(notes)


def _parts(values: Sequence[str], elements: Mapping[str, int]) -> Iterator[list[str]]:
    """The values in order, in parts whose values on both sides, of four bytes an element, can be held at once."""
    part: list[str] = []
    held = 0
    for value in values:
        size = 8 * elements.get(value, 0)
        if part and held + size > HELD:
            yield part
            part = []
            held = 0
        part.append(value)
        held += size
    if part:
        yield part
