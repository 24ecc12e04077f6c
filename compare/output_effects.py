"""What single layers do to the outputs: alone converted in the reference, or alone restored in the candidate."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.compare.comparison import HANDED_OVER, Comparison
from layerline.compare.comparison_graph import effects_graph
from layerline.compare.pair_metrics import Pair, distance, trusted
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.value_pairs import computed_values, why_two_sessions
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import names
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import EFFECT, GAIN, OWN, Report, decibels

# So many layers are measured alone at most, those that are named first.
LAYERS = 128
# So many layers are restored at most, those with the greatest effect: without an effect there is nothing to gain.
RESTORED = 16
# Fewer feeds are run where the number of layers times the number of feeds exceeds this: on average, half of the model
# runs once more for each layer.
RUNS = 100
_NODES = 4000  # of a model in one graph, copies included: opening a graph takes time by the square of its nodes
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


def with_effects(
    report: Report,
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    pairing: Mapping[str, str] | None = None,
) -> Report:
    """Adds to each layer that makes an error the SQNR of the outputs if this layer alone were the candidate's, and to
    those that matter most by how much the outputs gain if this layer alone were the reference's."""
    worst_first = [record.name for record in report.sorted("own") if record.own_db is not None]
    shares = effects(reference, candidate, feeds, worst_first, pairing)
    largest = sorted((name for name in shares if shares[name]), key=lambda name: -shares[name])
    by_restoring = gains(reference, candidate, feeds, largest, pairing)
    records = []
    for record in report.records:
        if record.name in shares:
            # Beside the own error, in the order of the columns.
            figures = {OWN: record.extra[OWN], EFFECT: decibels(1.0, shares[record.name])}
            if record.name in by_restoring:
                figures[GAIN] = by_restoring[record.name]
            record = replace(record, extra={**figures, **record.extra})
        records.append(record)
    return replace(report, records=tuple(records))


def effects(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    values: Collection[str],
    pairing: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """The noise power that each value adds to the outputs, relative to their signal and summed over them.

    Of an output of integers, such as indices of classes, it is the share of elements that differ.

    Args:
        reference: the model on the a-side.
        candidate: the model that the values are taken from, each computed from the reference's values.
        feeds: arrays by input name; the first ones are taken.
        values: names of values that both models have, those first that matter most.
        pairing: the values that a layer reads from the reference, with their names in the candidate; without it, all
            of one name. Two models with Q/DQ leave the sides of Q/DQ out, or a layer would read the reference's weight.

    Returns:
        By value; Inf where an output is not finite or gets another shape. Empty where the two models can't share a
        graph. Without values that reach no output that can be measured, and those beside a value with which the
        reference can't run.
    """
    trial = _Trial(as_ir(reference), as_ir(candidate), pairing)
    shares, _ = trial.shares(feeds, values, LAYERS, restored=False)
    return shares


def gains(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    values: Collection[str],
    pairing: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """By how many dB the outputs of the candidate gain if one value alone is computed as in the reference.

    Arguments and result are those of `effects`; a negative gain is a loss.
    """
    trial = _Trial(as_ir(reference), as_ir(candidate), pairing)
    shares, unchanged = trial.shares(feeds, values, RESTORED, restored=True)
    result: dict[str, float] = {}
    for name, share in shares.items():
        result[name] = 0.0 if share == unchanged else decibels(unchanged, share)
    return result


class _Trial:
    """Two models, and the outputs by which changes of single layers are judged."""

    def __init__(self, reference: ir.Model, candidate: ir.Model, pairing: Mapping[str, str] | None) -> None:
        self.reference, self.candidate = reference, candidate
        comparison = Comparison(reference, candidate, pairing, True, OnnxRuntime(few_runs=True))
        self.targets: dict[int, Pair] = {}
        self.pairs: list[Pair] = []
        if not comparison.one_graph:
            return
        self.pairs = [replace(pair, pointer=None) for pair in comparison.pairs]
        random = drawn(reference)
        by_numbers = counted(reference.graph)
        outputs = set(names(reference.graph.outputs)) - random.keys() - {*by_numbers.outputs}
        outputs |= {*by_numbers.sources}
        for index, pair in enumerate(comparison.pairs):
            types = {pair.dtype_a, pair.dtype_b}
            # Sequences and text have no type here, and numpy has no bfloat16.
            if pair.a in outputs and types.isdisjoint({0, ir.DataType.BFLOAT16}):
                by_count = pair.pointer is not None or not types <= _FLOATS
                self.targets[index] = replace(self.pairs[index], a=f"target//{index}", counted=by_count)

    def shares(
        self, feeds: Sequence[Feed], values: Collection[str], most: int, *, restored: bool
    ) -> tuple[dict[str, float], float]:
        """The noise power of the outputs with each layer changed, and without a change.

        Args:
            most: so many of the values are measured.
            restored: whether the candidate is run with a layer of the reference, and not the other way round.
        """
        base, other, pairs = self.reference, self.candidate, self.pairs
        targets = {index: replace(target, dtype_b=target.dtype_a) for index, target in self.targets.items()}
        if restored:
            base, other, targets = other, base, self.targets
            pairs = [replace(p, a=p.b, b=p.a, dtype_a=p.dtype_b, dtype_b=p.dtype_a) for p in pairs]
        # An output may also be an input or a stored tensor, which no node computes anew.
        computed = set(computed_values(other.graph))
        index_of: dict[str, int] = {}
        for index, pair in enumerate(pairs):
            if pair.dtype_a and pair.dtype_b and pair.b in computed:
                index_of[self.pairs[index].a] = index
        layers = [index_of[name] for name in values if name in index_of][:most]
        if not layers or not self.targets or why_two_sessions(base, other) is not None:
            return {}, 0.0
        # The converted model has more nodes to run, and this comes on top.
        runs = RUNS // 2 if restored else RUNS
        feeds = feeds[: max(1, runs // len(layers))]
        runtime = OnnxRuntime(few_runs=True)
        session = runtime.open(self.reference, [self.pairs[index].a for index in self.targets])
        converted = None
        if restored:
            converted = runtime.open(base, [pairs[index].a for index in self.targets])
        unchanged, size = self._unchanged(session, converted, feeds)
        step = max(1, _NODES // len(base.graph))
        result: dict[str, float] = {}
        for start in range(0, len(layers), step):
            part = layers[start : start + step]
            totals = self._totals(session, base, other, pairs, part, targets, feeds, whole=False)
            if totals is None or not self._trusted(totals):
                # numpy tells a change of the size, NaN and masks. Few outputs at a time are in memory.
                at_once = max(1, HANDED_OVER // max(size, 1))
                totals = {}
                for first in range(0, len(part), at_once):
                    few = part[first : first + at_once]
                    totals |= self._totals(session, base, other, pairs, few, targets, feeds, whole=True) or {}
            for layer in dict.fromkeys(layer for layer, _ in totals):
                # Outputs that the layer does not reach stay as they are.
                reached = {index: _share(totals[layer, index]) for index in self.targets if (layer, index) in totals}
                result[self.pairs[layer].a] = sum({**unchanged, **reached}.values())
        return result, sum(unchanged.values())

    def _unchanged(
        self, reference: OrtSession, converted: OrtSession | None, feeds: Sequence[Feed]
    ) -> tuple[dict[int, float], int]:
        """The noise power of each output without a change, and how many bytes the outputs of a feed take.

        Args:
            converted: the model that is changed; None for the reference, which has no noise.
        """
        totals = dict.fromkeys(self.targets, Distance())
        size = 0
        for feed in feeds:
            expected = self._expected(reference, feed)
            size = max(size, sum(array.nbytes for array in expected.values()))
            if converted is None:
                continue
            outputs = converted.run({name: array for name, array in feed.items() if name in converted.inputs})
            for index, target in self.targets.items():
                totals[index] += _distance(target, expected[target.a], outputs[self.pairs[index].b])
        return {index: _share(total) for index, total in totals.items()}, size

    def _expected(self, reference: OrtSession, feed: Feed) -> dict[str, Array]:
        """The outputs of the reference, by the names of the inputs that they are fed to."""
        outputs = reference.run({name: array for name, array in feed.items() if name in reference.inputs})
        return {target.a: outputs[self.pairs[index].a] for index, target in self.targets.items()}

    def _totals(
        self,
        reference: OrtSession,
        base: ir.Model,
        other: ir.Model,
        pairs: Sequence[Pair],
        layers: Sequence[int],
        targets: Mapping[int, Pair],
        feeds: Sequence[Feed],
        *,
        whole: bool,
    ) -> dict[tuple[int, int], Distance] | None:
        """The distance of each output with each layer changed; None where the graph can't run."""
        session = OnnxRuntime(few_runs=True).open(effects_graph(base, other, pairs, layers, targets, whole=whole))
        totals: dict[tuple[int, int], Distance] = {}
        for feed in feeds:
            expected = self._expected(reference, feed)
            arrays = {**feed, **expected}
            try:
                results = session.run({name: arrays[name] for name in session.inputs if name in arrays})
            except StageError:
                # A layer changes the size of an output, or of what a node behind it takes.
                return None
            for layer, index in _tags(results):
                target = self.targets[index]
                tag = f"{layer}/{index}"
                if f"{tag}/b" in results:
                    total = _distance(target, expected[target.a], results[f"{tag}/b"])
                else:
                    total = distance(results, tag)
                totals[layer, index] = totals.get((layer, index), Distance()) + total
        return totals

    def _trusted(self, totals: Mapping[tuple[int, int], Distance]) -> bool:
        for (_, index), total in totals.items():
            target = self.targets[index]
            if not (target.small or target.counted or trusted(target, total)):
                return False
        return True


def _tags(results: Mapping[str, Array]) -> Iterator[tuple[int, int]]:
    """The layers and outputs that were measured, from names such as `<layer>/<output>/<column>`."""
    for tag in dict.fromkeys(name.rpartition("/")[0] for name in results):
        layer, _, output = tag.partition("/")
        yield int(layer), int(output)


def _distance(target: Pair, expected: Array, actual: Array) -> Distance:
    if not target.counted or np.shape(expected) != np.shape(actual):
        return diff_arrays(expected, actual)
    differing = float(np.count_nonzero(expected != actual))
    return Distance(count=expected.size, aa=float(expected.size), ee=differing)


def _share(total: Distance) -> float:
    if total.one_sided or total.mismatch:
        return math.inf
    if total.ee == 0.0:
        return 0.0
    return total.ee / total.aa if total.aa else math.inf
