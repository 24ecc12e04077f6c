"""Measures how far every value of two ONNX models is apart, over any number of samples, without storing the samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.comparison import Comparison
from layerline.compare.pair_metrics import Pair
from layerline.compare.tensor_distance import Distance
from layerline.graph.analysis.ir_queries import names, node_label
from layerline.graph.analysis.rounding_noise import drawn, perturbed
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.module_identity import modules
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import OWN, LayerDiff

# Up to this many feeds, preparing a session for many runs costs more than it saves.
FEW = 8


def compare(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Iterable[Feed],
    *,
    isolated: bool = False,
    pairs: Mapping[str, str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    settled: Collection[str] = (),
    sizes_differ: bool = False,
) -> tuple[LayerDiff, ...]:
    """Runs both models on every feed and measures each pair of values; memory does not grow with the feeds.

    Both run as one graph on onnxruntime (`comparison_graph.py`), as written, without its optimisations. Where that is
    impossible (`why_two_sessions` says why) they run side by side and numpy takes the same measures.

    Args:
        reference: the model on the a-side.
        candidate: the model on the b-side; takes the reference's inputs (by name), or some of them.
        feeds: arrays by input name.
        isolated: also measure each layer of the candidate fed with the reference's values:
            `extra["isolated_sqnr_db"]`.
        pairs: reference value to candidate value; default: values of the same name. Graph outputs are always paired,
            by position. Values inside subgraphs (If, Loop, Scan) and functions are left out.
        tolerances: greatest relative L2 error that passes, by value of the reference; others are not gated.
        settled: values that the candidate's readers take from the reference: outputs of QuantizeLinear, where an
            element half-way between two steps may take either.
        sizes_differ: values whose size depends on numbers (`counted_values`) may have another one, or hold other
            elements: their row has no measures then, and `extra["size"]` says why.

    Returns:
        One row per pair in the reference's topological order. Index outputs (ArgMax, TopK) are measured on the values
        they point at in the reference, and bounded by what the distance of those values allows. Tensors of different
        shape fail, with `extra["mismatch"]`. Values that depend on a random operator are not measured:
        `extra["nondeterministic"]` names it.

    Raises:
        StageError: a model or feed that onnxruntime refuses, an unknown name in `pairs`, no feed at all.
    """
    comparison, totals = _measured(reference, candidate, feeds, isolated, pairs, settled, sizes_differ=sizes_differ)
    return _rows(comparison, totals, tolerances or {})


def distances(reference: ir.Model, candidate: ir.Model, feeds: Iterable[Feed]) -> dict[str, tuple[Distance, Distance]]:
    """The sums behind `compare`, by value of the same name: cumulative, and of the layer fed with the reference's."""
    comparison, totals = _measured(reference, candidate, feeds, True, None, (), sizes_differ=True)
    return {pair.a: both for pair, both in zip(comparison.pairs, totals, strict=True)}


def _measured(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Iterable[Feed],
    isolated: bool,
    pairs: Mapping[str, str] | None,
    settled: Collection[str],
    *,
    sizes_differ: bool,
) -> tuple[Comparison, list[tuple[Distance, Distance]]]:
    # A generator may give any number of feeds.
    few = isinstance(feeds, Sequence) and len(feeds) <= FEW
    comparison = Comparison(as_ir(reference), as_ir(candidate), pairs, isolated, OnnxRuntime(few_runs=few), settled)
    if sizes_differ:
        # Sizes that follow from numbers, such as how many boxes are kept, are no fault of a layer.
        comparison.allow_sizes()
    totals = [(Distance(), Distance())] * len(comparison.pairs)
    for feed in feeds:
        measured = comparison.measure(feed)
        totals = [(a + x, b + y) for (a, b), (x, y) in zip(totals, measured, strict=True)]
    if not comparison.measured:
        raise StageError("there is no sample to compare on", where="feeds")
    return comparison, totals


def floors(model: ir.Model, feeds: Sequence[Feed]) -> dict[str, float]:
    """The noise floor (relative L2) of values: how far one rounding step of all weights and float inputs moves them."""
    model = as_ir(model)
    # A value that a rounding step of its inputs moves far can't be computed more exactly than that.
    rows = compare(model, perturbed(model), feeds)
    return {r.name: r.rel_l2 for r in rows if r.rel_l2 is not None}


def _rows(
    comparison: Comparison, totals: list[tuple[Distance, Distance]], tolerances: Mapping[str, float]
) -> tuple[LayerDiff, ...]:
    reference, candidate = comparison.reference, comparison.candidate
    ops: dict[str, str] = {}
    for node in reference.graph:
        ops.update(dict.fromkeys(names(node.outputs), node.op_type))
    module_paths = modules(reference)
    # Indices are bounded by the distance of the data that they point into.
    distances = {pair.a: total for pair, (total, _) in zip(comparison.pairs, totals, strict=True)}
    random_a, random_b = drawn(reference), drawn(candidate)
    otherwise = _picked_otherwise(comparison, distances)
    rows: list[LayerDiff] = []
    for pair, (total, alone) in zip(comparison.pairs, totals, strict=True):
        # Random on either side: two draws have no distance.
        random_source = random_a.get(pair.a) or random_b.get(pair.b)
        measures: dict[str, Any]
        if random_source:
            measures = {"extra": {"nondeterministic": random_source}}
        elif total.mismatch and pair.a in comparison.sizes_differ:
            measures = {"extra": {"size": f"size differs by {comparison.sizes_differ[pair.a]}: {total.mismatch}"}}
        elif comparison.sizes_differ.get(pair.a) in otherwise:
            # As many boxes, but others: element by element they have nothing to do with each other.
            measures = {"extra": {"size": f"{comparison.sizes_differ[pair.a]} picks other elements"}}
        else:
            measures = total.measures() | _gate(pair, total, distances, tolerances)
            measures["extra"] = total.flags
            if comparison.isolated and pair.pointer is None:
                own = alone.sqnr_db
                if alone.one_sided:
                    own = -math.inf  # NaN or Inf on one side only: no finite figure describes that
                measures["extra"] = total.flags | {OWN: own}
        dtype, shape = comparison.types[pair.a]
        op, module = ops.get(pair.a, "Input"), module_paths.get(pair.a, "")
        rows.append(LayerDiff(name=pair.a, op=op, module=module, dtype=dtype, shape=shape, **measures))
    return tuple(rows)


def _picked_otherwise(comparison: Comparison, distances: Mapping[str, Distance]) -> set[str]:
    """The labels of nodes such as NonMaxSuppression whose indices differ between the models."""
    labels = set[str]()
    for node in comparison.reference.graph:
        for name in names(node.outputs):
            is_own = comparison.sizes_differ.get(name) == node_label(node)
            if is_own and comparison.types.get(name, ("",))[0] == "int64" and distances[name].peak > 0:
                labels.add(node_label(node))
    return labels


def _gate(
    pair: Pair, total: Distance, by_name: Mapping[str, Distance], tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """The tolerance of a row, and the measure that it bounds."""
    if total.mismatch:
        return {"tolerance": 0.0}
    if pair.pointer is not None:
        data = pair.pointer.data
        if data in by_name and not tolerances.keys().isdisjoint({pair.a, data}):
            # A right index can be off by no more than both sides' data moving towards each other.
            return {"judged": "max_abs", "tolerance": 2.0 * by_name[data].peak * (1 + 1e-9)}
    return {"tolerance": tolerances.get(pair.a)}
