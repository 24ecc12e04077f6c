"""A foreign model against its file: every value, in bounded memory even where the two can't share a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.compare.compare_models import compare, floors, pair_values, why_two_sessions
from layerline.compare.topk_indices import pointers
from layerline.compare.value_types import CODES
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.fusion import verify_rewrites
from layerline.onnx_import.normalize_import import Adopted
from layerline.pipeline.report import LayerDiff

HELD = 256 << 20
"""Bytes of inner values that are held at once, both sides together."""


def unchanged(
    adopted: Adopted, feeds: Sequence[Feed], elements: Callable[[Feed], Mapping[str, int]], tolerance: float | None
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """Every value of the adopted model against the file's own; values that follow a random operator are shown alone.

    Args:
        elements: of every value of the original's main graph on a feed.
        tolerance: greatest relative L2 error; None for the noise floor, measured as the fuse stage does. No floor is
            needed where all values are equal.

    Returns:
        The rows, and notes.
    """
    original, light, random = adopted.original, adopted.light, drawn(adopted.original.model)
    said = [f"{value} and what follows is drawn at random ({op}): not judged" for value, op in random.items()][:1]
    rows, notes = compare_in_parts(original, light, feeds, elements)
    if all(r.max_abs == 0 and r.passed for r in rows):
        equal = "every value is equal to the last bit"
        return tuple(replace(r, tolerance=0.0) for r in rows), [*said, *notes, equal]
    low = floors(original, feeds)
    judged = {r.name: _allowed(r, low, tolerance) for r in rows if r.name not in random}
    rows, notes = compare_in_parts(original, light, feeds, elements, judged)
    return rows, [*said, *notes]


def compare_in_parts(
    reference: Light,
    candidate: Light,
    feeds: Sequence[Feed],
    elements: Callable[[Feed], Mapping[str, int]],
    tolerances: Mapping[str, float] | None = None,
) -> tuple[tuple[LayerDiff, ...], tuple[str, ...]]:
    """`compare`, for models that may be of different opsets, whose values have to be brought out of the runtime.

    Then the outputs are compared on all feeds, and inner values on the feeds whose values can be held at once; where
    there is none, on the smallest, in several runs.

    Args:
        elements: of every value of the reference's main graph on a feed.

    Returns:
        The rows, and notes.
    """
    why = why_two_sessions(reference.model, candidate.model)
    if why is None:
        return compare(reference, candidate, feeds, tolerances=tolerances), ()
    counted = [elements(feed) for feed in feeds]
    sizes = [8 * sum(c.values()) for c in counted]
    least = min(range(len(feeds)), key=sizes.__getitem__)
    chosen = [i for i, size in enumerate(sizes) if size <= HELD] or [least]
    most = counted[max(chosen, key=sizes.__getitem__)]
    pairs = pair_values(reference.model, candidate.model)
    rows = {r.name: r for r in compare(reference, candidate, feeds, pairs={}, tolerances=tolerances)}
    point, outputs = pointers(reference.model.graph), {o.name for o in reference.model.graph.output}
    for part in _parts([a for a in pairs if a not in rows], most):
        # An index is judged by what it points at, which has to be there.
        data = [point[a].data for a in part if a in point and point[a].data in pairs]
        wanted = {a: pairs[a] for a in (*part, *data) if a not in outputs}
        found = compare(reference, candidate, [feeds[i] for i in chosen], pairs=wanted, tolerances=tolerances)
        rows |= {r.name: r for r in found if r.name in part}
    notes = (
        [why] if len(chosen) == len(feeds) else [why, f"inner values on {len(chosen)} of {len(feeds)} feeds: memory"]
    )
    return tuple(rows[a] for a in pairs if a in rows), tuple(notes)


def _allowed(row: LayerDiff, floors: Mapping[str, float], tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    return verify_rewrites.tolerance(row.name, {row.name: CODES.get(row.dtype, 0)}, floors)


def _parts(values: Sequence[str], elements: Mapping[str, int]) -> Iterator[list[str]]:
    """The values in order, cut where twice 4 bytes an element exceed what may be held."""
    part, held = list[str](), 0
    for value in values:
        size = 8 * elements.get(value, 0)
        if part and held + size > HELD:
            yield part
            part, held = [], 0
        part.append(value)
        held += size
    if part:
        yield part
