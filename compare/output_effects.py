"""What single layers do to the outputs: alone converted in the reference, or alone restored in the candidate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

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
    return _Trial(as_ir(reference), as_ir(candidate), pairing, restored=False).shares(feeds, values)


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
    trial = _Trial(as_ir(reference), as_ir(candidate), pairing, restored=True)
    shares = trial.shares(feeds, values)
    unchanged = sum(trial.unchanged.values())
    result: dict[str, float] = {}
    for name, share in shares.items():
        result[name] = 0.0 if share == unchanged else decibels(unchanged, share)
    return result


class _Trial:
    """Runs a model with single layers of another one, and compares its outputs with the reference's.

    Args:
        restored: whether the candidate is run with layers of the reference, and not the other way round.
    """

    def __init__(
        self, reference: ir.Model, candidate: ir.Model, pairing: Mapping[str, str] | None, *, restored: bool
    ) -> None:
        self.reference = reference
        self.restored = restored
        self.base, self.other = reference, candidate
        if restored:
            self.base, self.other = candidate, reference
        self.unchanged: dict[int, float] = {}  # the noise power of each output without a change
        self.names: list[str] = []  # of the pairs, in the reference
        self.pairs: list[Pair] = []  # values of `base`, and those of `other` that stand for them
        self.targets: dict[int, Pair] = {}  # the outputs that are compared, by index of their pair
        comparison = Comparison(reference, candidate, pairing, True, OnnxRuntime(few_runs=True))
        if not comparison.one_graph or why_two_sessions(self.base, self.other) is not None:
            return
        by_numbers = counted(reference.graph)
        outputs = set(names(reference.graph.outputs)) - drawn(reference).keys() - {*by_numbers.outputs}
        outputs |= {*by_numbers.sources}
        for index, pair in enumerate(comparison.pairs):
            self.names.append(pair.a)
            plain = replace(pair, pointer=None)
            target = replace(plain, a=f"target//{index}", dtype_b=pair.dtype_a)
            if restored:
                target = replace(target, dtype_b=pair.dtype_b)
                plain = replace(plain, a=pair.b, b=pair.a, dtype_a=pair.dtype_b, dtype_b=pair.dtype_a)
            self.pairs.append(plain)
            types = {pair.dtype_a, pair.dtype_b}
            # Sequences and text have no type here, and numpy has no bfloat16.
            if pair.a in outputs and types.isdisjoint({0, ir.DataType.BFLOAT16}):
                by_count = pair.pointer is not None or not types <= _FLOATS
                self.targets[index] = replace(target, counted=by_count)

    def shares(self, feeds: Sequence[Feed], values: Collection[str]) -> dict[str, float]:
        """The noise power of the outputs with each layer changed, summed over the outputs."""
        # An output may also be an input or a stored tensor, which no node computes anew.
        computed = set(computed_values(self.other.graph))
        index_of: dict[str, int] = {}
        for index, pair in enumerate(self.pairs):
            if pair.dtype_a and pair.dtype_b and pair.b in computed:
                index_of[self.names[index]] = index
        most, runs = LAYERS, RUNS
        if self.restored:
            # The converted model has more nodes to run, and this comes on top.
            most, runs = RESTORED, RUNS // 2
        layers = [index_of[name] for name in values if name in index_of][:most]
        if not layers or not self.targets:
            return {}
        feeds = feeds[: max(1, runs // len(layers))]
        size = self._measure_unchanged(feeds)
        step = max(1, _NODES // len(self.base.graph))
        result: dict[str, float] = {}
        for start in range(0, len(layers), step):
            part = layers[start : start + step]
            totals = self._totals(part, feeds, whole=False)
            if totals is None or not self._trusted(totals):
                # numpy tells a change of the size, NaN and masks. Few outputs at a time are in memory.
                at_once = max(1, HANDED_OVER // max(size, 1))
                totals = {}
                for first in range(0, len(part), at_once):
                    few = part[first : first + at_once]
                    totals |= self._totals(few, feeds, whole=True) or {}
            noise: dict[int, dict[int, float]] = {}
            for (layer, index), total in totals.items():
                # Outputs that the layer does not reach stay as they are.
                noise.setdefault(layer, dict(self.unchanged))[index] = _share(total)
            for layer, by_output in noise.items():
                result[self.names[layer]] = sum(by_output.values())
        return result

    @cached_property
    def _session(self) -> OrtSession:
        return OnnxRuntime(few_runs=True).open(self.reference, [self.names[index] for index in self.targets])

    def _expected(self, feed: Feed) -> dict[str, Array]:
        """The outputs of the reference, by the names of the inputs that they are fed to."""
        outputs = self._session.run({name: array for name, array in feed.items() if name in self._session.inputs})
        return {target.a: outputs[self.names[index]] for index, target in self.targets.items()}

    def _measure_unchanged(self, feeds: Sequence[Feed]) -> int:
        """Measures the outputs without a change; returns how many bytes those of a feed take."""
        session = None  # the reference has no noise
        if self.restored:
            session = OnnxRuntime(few_runs=True).open(self.base, [self.pairs[index].a for index in self.targets])
        totals = dict.fromkeys(self.targets, Distance())
        size = 0
        for feed in feeds:
            expected = self._expected(feed)
            size = max(size, sum(array.nbytes for array in expected.values()))
            if session is None:
                continue
            outputs = session.run({name: array for name, array in feed.items() if name in session.inputs})
            for index, target in self.targets.items():
                totals[index] += _distance(target, expected[target.a], outputs[self.pairs[index].a])
        self.unchanged = {index: _share(total) for index, total in totals.items()}
        return size

    def _totals(
        self, layers: Sequence[int], feeds: Sequence[Feed], *, whole: bool
    ) -> dict[tuple[int, int], Distance] | None:
        """The distance of each output with each layer changed, by layer and output; None where the graph can't run."""
        graph = effects_graph(self.base, self.other, self.pairs, layers, self.targets, whole=whole)
        session = OnnxRuntime(few_runs=True).open(graph)
        totals: dict[tuple[int, int], Distance] = {}
        for feed in feeds:
            expected = self._expected(feed)
            arrays = {**feed, **expected}
            try:
                results = session.run({name: arrays[name] for name in session.inputs if name in arrays})
            except StageError:
                # A layer changes the size of an output, or of what a node behind it takes.
                return None
            # Results have names such as `<layer>/<output>/<column>`.
            for tag in dict.fromkeys(name.rpartition("/")[0] for name in results):
                layer, index = map(int, tag.split("/"))
                target = self.targets[index]
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
    if total.aa == 0.0:
        return math.inf
    return total.ee / total.aa
