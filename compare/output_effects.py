"""The effect of each layer at the outputs: their error where this layer alone is the candidate's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from layerline.backends.base import Feed
from layerline.backends.light import Model, split
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.compare.compare_models import Comparison, why_two_sessions
from layerline.compare.comparison_graph import effects_graph
from layerline.compare.pair_metrics import distance, trusted
from layerline.compare.tensor_distance import Distance
from layerline.graph.analysis.rounding_noise import drawn
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import EFFECT, OWN, Report, decibels

LAYERS = 128
"""So many layers are measured at most, those that are named first."""
RUNS = 100
"""Fewer feeds are run where the number of layers times the number of feeds exceeds this: on average, half of the model
runs once more for each layer."""
_NODES = 4000  # of the reference in one graph, copies included: opening a graph takes time by the square of its nodes


def with_effects(
    report: Report,
    reference: Model,
    candidate: Model,
    feeds: Sequence[Feed],
    names: Mapping[str, str] | None = None,
) -> Report:
    """Adds to each layer that makes an error the SQNR of the outputs if this layer alone were the candidate's."""
    worst_first = [record.name for record in report.sorted("own") if record.own_db is not None]
    shares = effects(reference, candidate, feeds, worst_first, names)
    records = []
    for record in report.records:
        if record.name in shares:
            # Beside the own error, in the order of the columns.
            figures = {OWN: record.extra[OWN], EFFECT: decibels(1.0, shares[record.name])}
            record = replace(record, extra={**figures, **record.extra})
        records.append(record)
    return replace(report, records=tuple(records))


def effects(
    reference: Model,
    candidate: Model,
    feeds: Sequence[Feed],
    values: Collection[str],
    names: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """The noise power that each value adds to the outputs, relative to their signal and summed over them.

    Args:
        reference: the model on the a-side.
        candidate: the model that the values are taken from, each computed from the reference's values.
        feeds: arrays by input name; the first ones are taken.
        values: names of values that both models have, those first that matter most.
        names: the values that a layer reads from the reference, with their names in the candidate; without it, all
            of one name. Two models with Q/DQ leave the sides of Q/DQ out, or a layer would read the reference's weight.

    Returns:
        By value; Inf where an output is not finite or gets another shape. Empty where the two models can't share a
        graph. Without values that reach no output that can be measured, and those beside a value with which the
        reference can't run.
    """
    light_a, light_b = split(reference), split(candidate)
    if why_two_sessions(light_a.model, light_b.model) is not None:
        return {}
    runtime = OnnxRuntime(few_runs=True)
    comparison = Comparison(light_a, light_b, names, True, runtime)
    pairs = comparison.pairs
    random = drawn(light_a.model)
    output_names = {output.name for output in light_a.model.graph.output} - random.keys()
    outputs = [index for index, pair in enumerate(pairs) if pair.a in output_names and pair.dtype_a and pair.dtype_b]
    index_of = {pair.a: index for index, pair in enumerate(pairs) if pair.dtype_a and pair.dtype_b}
    # An output may also be an input or a stored tensor, which no node computes anew.
    computed = {name for node in light_b.model.graph.node for name in node.output}
    layers = [index_of[name] for name in values if name in index_of and pairs[index_of[name]].b in computed][:LAYERS]
    if not layers or not outputs or not comparison.one_graph:
        return {}
    feeds = feeds[: max(1, RUNS // len(layers))]
    step = max(1, _NODES // len(light_a.model.graph.node))
    shares: dict[str, float] = {}
    for start in range(0, len(layers), step):
        part = layers[start : start + step]
        for whole in (False, True):
            session = runtime.open(effects_graph(light_a, light_b, pairs, part, outputs, whole=whole))
            try:
                totals = _totals(session, feeds)
            except StageError:
                # A layer changes the size of an output, which numpy can tell, or of what a node behind it takes.
                totals = {}
                continue
            measured = {tag: pairs[int(tag.split("/")[1])] for tag in totals}
            if all(pair.small or trusted(pair, totals[tag]) for tag, pair in measured.items()):
                break
        for tag, total in totals.items():
            name = pairs[int(tag.split("/")[0])].a
            shares[name] = shares.get(name, 0.0) + _share(total)
    return shares


def _totals(session: OrtSession, feeds: Sequence[Feed]) -> dict[str, Distance]:
    totals: dict[str, Distance] = {}
    for feed in feeds:
        results = session.run({name: array for name, array in feed.items() if name in session.inputs})
        # `<layer>/<output>`, of which there are columns.
        for tag in dict.fromkeys(name.rpartition("/")[0] for name in results):
            totals[tag] = totals.get(tag, Distance()) + distance(results, tag)
    return totals


def _share(total: Distance) -> float:
    if total.one_sided or total.mismatch:
        return math.inf
    if total.ee == 0.0:
        return 0.0
    return total.ee / total.aa if total.aa else math.inf
