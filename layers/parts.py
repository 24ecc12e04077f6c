"""Comparing two models that can't share a graph, a part of their values at a time: what is held stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx

from layerline.backends.base import Feed
from layerline.layers.compare import compare, pair_values, why_two_sessions
from layerline.layers.indices import pointers
from layerline.pipeline.report import LayerDiff

HELD = 256 << 20
"""Bytes of inner values that are held at once, both sides together, on a feed like the first."""


def compare_in_parts(
    reference: onnx.ModelProto,
    candidate: onnx.ModelProto,
    feeds: Sequence[Feed],
    elements: Mapping[str, int],
    tolerances: Mapping[str, float] | None = None,
) -> tuple[LayerDiff, ...]:
    """`compare`, which two models of different opsets make it do by hand; both are run once for each part.

    Args:
        elements: of every value of the reference's main graph on the first feed.
    """
    if why_two_sessions(reference, candidate) is None:
        return compare(reference, candidate, feeds, tolerances=tolerances)
    pairs, outputs = pair_values(reference, candidate), {o.name for o in reference.graph.output}
    rows: dict[str, LayerDiff] = {}
    for part in _parts([a for a in pairs if a not in outputs], elements):
        # An index is judged by what it points at, which has to be there.
        data = [p.data for a, p in pointers(reference.graph).items() if a in part and p.data in pairs]
        wanted = {a: pairs[a] for a in (*part, *data) if a not in outputs}
        found = compare(reference, candidate, feeds, pairs=wanted, tolerances=tolerances)
        rows |= {r.name: r for r in found if r.name not in rows or r.name in part}
    return tuple(rows[a] for a in pairs if a in rows)


def _parts(values: Sequence[str], elements: Mapping[str, int]) -> Iterator[list[str]]:
    """The values in order, cut where 2 x 4 bytes an element exceed what may be held; at least one part."""
    part, held = list[str](), 0
    for value in values:
        size = 8 * elements.get(value, 0)
        if part and held + size > HELD:
            yield part
            part, held = [], 0
        part.append(value)
        held += size
    yield part
