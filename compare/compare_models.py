"""Measures how far every value of two ONNX models is apart, over any number of samples, without storing the samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light, Model, split
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.compare.comparison_graph import ISOLATED, isolated_model, joint
from layerline.compare.pair_metrics import Pair, distance, trusted
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointers, resolved
from layerline.compare.value_types import CODES, Shape, infer
from layerline.graph.analysis.rounding_noise import drawn, perturbed
from layerline.graph.io.module_identity import modules
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import OWN, LayerDiff

__all__ = ["Distance", "compare", "diff_arrays", "pair_values", "why_two_sessions"]
FEW = 8
"""Up to this many feeds, preparing a session for many runs costs more than it saves."""
HANDED_OVER = 256 << 20
"""Bytes of inner values that one run hands over to numpy; more of them take further runs."""


def compare(
    reference: Model,
    candidate: Model,
    feeds: Iterable[Feed],
    *,
    isolated: bool = False,
    pairs: Mapping[str, str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    settled: Collection[str] = (),
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

    Returns:
        One row per pair in the reference's topological order. Index outputs (ArgMax, TopK) are measured on the values
        they point at in the reference, and bounded by what the distance of those values allows. Tensors of different
        shape fail, with `extra["mismatch"]`. Values that depend on a random operator are not measured:
        `extra["nondeterministic"]` names it.

    Raises:
        StageError: a model or feed that onnxruntime refuses, an unknown name in `pairs`, no feed at all.
    """
    comparison, totals = _measured(reference, candidate, feeds, isolated, pairs, settled)
    return _rows(comparison, totals, tolerances or {})


def distances(reference: Model, candidate: Model, feeds: Iterable[Feed]) -> dict[str, tuple[Distance, Distance]]:
    """The sums behind `compare`, by value of the same name: cumulative, and of the layer fed with the reference's."""
    comparison, totals = _measured(reference, candidate, feeds, True, None, ())
    return {pair.a: both for pair, both in zip(comparison.pairs, totals, strict=True)}


def _measured(
    reference: Model,
    candidate: Model,
    feeds: Iterable[Feed],
    isolated: bool,
    pairs: Mapping[str, str] | None,
    settled: Collection[str],
) -> tuple[Comparison, list[tuple[Distance, Distance]]]:
    # A generator may give any number of feeds.
    few = isinstance(feeds, Sequence) and len(feeds) <= FEW
    comparison = Comparison(split(reference), split(candidate), pairs, isolated, OnnxRuntime(few_runs=few), settled)
    totals = [(Distance(), Distance())] * len(comparison.pairs)
    for feed in feeds:
        measured = comparison.measure(feed)
        totals = [(a + x, b + y) for (a, b), (x, y) in zip(totals, measured, strict=True)]
    if not comparison.measured:
        raise StageError("there is no sample to compare on", where="feeds")
    return comparison, totals


def floors(model: Model, feeds: Sequence[Feed]) -> dict[str, float]:
    """The noise floor (relative L2) of values: how far one rounding step of all weights and float inputs moves them."""
    rows = compare(model, perturbed(model), feeds)
    return {r.name: r.rel_l2 for r in rows if r.rel_l2 is not None}


def pair_values(
    reference: onnx.ModelProto, candidate: onnx.ModelProto, pairs: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Reference value to candidate value, in the reference's topological order; outputs by position.

    Raises:
        StageError: a name in `pairs` that its model does not have, or another number of outputs.
    """
    outputs_a = [o.name for o in reference.graph.output]
    outputs_b = [o.name for o in candidate.graph.output]
    if len(outputs_a) != len(outputs_b):
        raise StageError(
            f"the reference gives {outputs_a}, the candidate {outputs_b}: outputs are paired by position",
            where="outputs",
        )
    values_a = computed_values(reference.graph)
    values_b = computed_values(candidate.graph)
    if pairs is None:
        pairs = {name: name for name in values_a}
    else:
        _check_names("reference", pairs.keys(), values_a)
        _check_names("candidate", pairs.values(), values_b)
    in_candidate = set(values_b)
    matched = {a: pairs[a] for a in values_a if a in pairs and pairs[a] in in_candidate}
    by_position = dict(zip(outputs_a, outputs_b, strict=True))
    ordered = [a for a in values_a if a in matched or a in by_position]
    # Outputs that no node computes (an input or a constant that is passed on) come last.
    computed = set(ordered)
    ordered += [a for a in by_position if a not in computed]
    return {a: by_position.get(a) or matched[a] for a in ordered}


def sides_of_qdq(graph: onnx.GraphProto, covered: Collection[str]) -> set[str]:
    """Values that say again what a quantised value says: its integers, and what they stand for.

    Args:
        covered: values that have a row, and weights that the model stores.
    """
    outputs = {output.name for output in graph.output}
    sources = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    sides = set(sources)
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and sources.get(node.input[0], node.input[0]) in covered:
            sides.add(node.output[0])
    return sides - outputs


def computed_values(graph: onnx.GraphProto) -> list[str]:
    """Names of the values that the nodes of a graph compute, constants left out."""
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    return [output for node in nodes for output in node.output if output]


def _check_names(side: str, names: Iterable[str], values: Iterable[str]) -> None:
    unknown = sorted(set(names) - set(values))
    if unknown:
        raise StageError(f"the {side} has no value called {unknown[0]!r}", where="pairs")


def why_two_sessions(reference: onnx.ModelProto, candidate: onnx.ModelProto) -> str | None:
    """Why the two cannot be one graph, in one sentence for a report's notes; None when they can."""
    opsets_a, opsets_b = _opsets(reference), _opsets(candidate)
    for domain in sorted(set(opsets_a) & set(opsets_b)):
        if opsets_a[domain] != opsets_b[domain]:
            versions = f"{opsets_a[domain]} and {opsets_b[domain]} of {domain or 'ai.onnx'}"
            return f"compared as two sessions: opset {versions} cannot share a graph"
    # The measuring nodes count axes from the end, which came with opset 11.
    if min(opsets_a.get("", 0), opsets_b.get("", 0)) < 11:
        return "compared as two sessions: below opset 11"
    if any(m.graph.sparse_initializer for m in (reference, candidate)):
        return "compared as two sessions: sparse initializers"
    # Its functions may have the names of the reference's, with other bodies.
    if candidate.functions:
        return "compared as two sessions: the candidate has functions"
    # The order of unsorted results is free, so they are sorted before they are compared; numpy does that.
    if any(not p.ordered for p in pointers(reference.graph).values()):
        return "compared as two sessions: a TopK leaves its order open"
    return None


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    """Opset versions by domain; ai.onnx is another name of the empty domain."""
    return {o.domain.replace("ai.onnx", "", 1): o.version for o in model.opset_import}


class Comparison:
    """One comparison: the pairs, and the sessions, each opened when it is first needed.

    Attributes:
        pairs: the values that are compared.
        types: element type and shape of the reference's side of each pair.
        one_graph: whether both models run as one graph.
        measured: number of feeds so far.
    """

    def __init__(
        self,
        reference: Light,
        candidate: Light,
        names: Mapping[str, str] | None,
        isolated: bool,
        runtime: OnnxRuntime,
        settled: Collection[str] = (),
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.isolated = isolated
        self.runtime = runtime
        self.one_graph = why_two_sessions(reference.model, candidate.model) is None
        self.measured = 0
        self._settled = settled
        self.pairs: list[Pair] = []
        self.types: dict[str, tuple[str, Shape]] = {}
        self._sessions: dict[str, OrtSession] = {}
        self._pair(pair_values(reference.model, candidate.model, names))
        self._unclear = set[int]()
        # The pairs that each run measures.
        self._runs: list[set[int]] = [set(range(len(self.pairs)))]

    def measure(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        """The distance of each pair on one feed: cumulative, and isolated (zero where not wanted)."""
        self.measured += 1
        distances = self._joint(feed) if self.one_graph else None
        if distances is None:
            return self._by_hand(feed)
        doubtful = set[int]()
        for i, (pair, both) in enumerate(zip(self.pairs, distances, strict=True)):
            # numpy measured the small and the unclear ones already.
            if i not in self._unclear and not pair.small and not all(trusted(pair, d) for d in both):
                doubtful.add(i)
        if not doubtful:
            return distances
        # Pairs with NaN, Inf or a mask, or with sums beyond float32, are measured by numpy from here on.
        self._unclear |= doubtful
        self._sessions.clear()
        self._runs = [set(range(len(self.pairs))) - self._unclear]
        room = HANDED_OVER
        for i in sorted(self._unclear):
            total = distances[i][0]
            elements = total.count + total.masked + total.nonfinite_a
            # Four bytes an element, two sides, and two more where the layers are measured alone as well.
            size = elements * (16 if self.isolated else 8)
            if size > room:
                self._runs.append(set())
                room = HANDED_OVER
            self._runs[-1].add(i)
            room -= size
        self._runs = [measured for measured in self._runs if measured]
        return self._joint(feed) or self._by_hand(feed)

    def _pair(self, matched: Mapping[str, str]) -> None:
        graph = self.reference.model.graph
        all_pointers = pointers(graph)
        # Indices are measured on their data, so the rank of the data must be known to count the axis from the front.
        taps = [*matched, *(all_pointers[a].data for a in matched if a in all_pointers)]
        types_a = infer(self.reference, taps)
        types_b = infer(self.candidate, list(matched.values()))
        outputs = {o.name for o in graph.output}
        for a, b in matched.items():
            dtype_a, shape_a = types_a[a]
            dtype_b, shape_b = types_b[b]
            are_tensors = dtype_a in CODES and dtype_b in CODES
            if not are_tensors and a not in outputs:
                # Inner sequences and the like are left to their consumers; an output of such a type must be right.
                continue
            self.one_graph &= are_tensors and _may_be_equal(shape_a, shape_b)
            pointer = all_pointers.get(a)
            if pointer is not None and pointer.axis < 0:
                pointer = replace(pointer, axis=pointer.axis + len(types_a[pointer.data][1]))
            pair = Pair(
                a=a,
                b=b,
                dtype_a=CODES.get(dtype_a, 0),
                dtype_b=CODES.get(dtype_b, 0),
                rank=min(len(shape_a), len(shape_b)),
                size=_size(shape_a) if shape_a == shape_b else None,
                pointer=pointer,
            )
            self.pairs.append(pair)
            self.types[a] = types_a[a]

    def _joint(self, feed: Feed) -> list[tuple[Distance, Distance]] | None:
        """The distances from one graph of both models; None where it can't run, or shapes differ."""
        distances = [(Distance(), Distance())] * len(self.pairs)
        for number, measured in enumerate(self._runs):
            key = f"joint {number}"
            if key not in self._sessions:
                model = joint(
                    self.reference,
                    self.candidate,
                    self.pairs,
                    measured=measured,
                    whole=self._unclear,
                    isolated=self.isolated,
                    settled=self._settled,
                )
                self._sessions[key] = self.runtime.open(model)
            try:
                outputs = self._sessions[key].run(feed)
            except StageError:
                # Shapes that do not fit, an index out of range, a wrong feed. Two sessions find out whose fault it is.
                return None
            for i in measured:
                cumulative = distance(outputs, str(i))
                alone = distance(outputs, f"{i}/isolated")
                # numpy measures the pairs whose shapes agree, and says how the others differ.
                if cumulative.mismatch or alone.mismatch:
                    return None
                distances[i] = (cumulative, alone)
        return distances

    def _by_hand(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        a = self._side("a", self.reference, [p.a for p in self.pairs], feed)
        b = self._side("b", self.candidate, [p.b for p in self.pairs], feed)
        cumulative = [diff_arrays(*resolved(p.pointer, a, (a[p.a], b[p.b]))) for p in self.pairs]
        # Isolated layers take values of the reference, which must have the shapes of the candidate.
        alone = [Distance(mismatch="not run")] * len(cumulative)
        if self.isolated and not any(d.mismatch for d in cumulative):
            inputs = dict(feed)
            inputs.update({f"a//{p.a}": a[p.a] for p in self.pairs if p.dtype_a and p.dtype_b})
            isolated = self._side("isolated", isolated_model(self.candidate, self.pairs), [], inputs)
            for i, pair in enumerate(self.pairs):
                alone[i] = Distance()
                if pair.pointer is None:
                    alone[i] = diff_arrays(a[pair.a], isolated.get(ISOLATED + pair.b, b[pair.b]))
        return list(zip(cumulative, alone, strict=True))

    def _side(self, key: str, model: Light, taps: list[str], feed: Feed) -> dict[str, Array]:
        if key not in self._sessions:
            if key == "a":
                taps += [p.pointer.data for p in self.pairs if p.pointer]
            self._sessions[key] = self.runtime.open(model, list(dict.fromkeys(taps)))
        session = self._sessions[key]
        # The candidate may take only some of the reference's inputs; any other name is a mistake, and is reported.
        declared = {i.name for i in self.reference.model.graph.input}
        declared.update(i.name for i in self.candidate.model.graph.input)
        feed = {k: v for k, v in feed.items() if k in session.inputs or k not in declared}
        return feed | session.run(feed)


def _may_be_equal(a: Shape, b: Shape) -> bool:
    """Whether two shapes, symbolic sizes included, can be the same."""
    if len(a) != len(b):
        return False
    for size_a, size_b in zip(a, b, strict=True):
        if isinstance(size_a, int) and isinstance(size_b, int) and size_a != size_b:
            return False
    return True


def _size(shape: Shape) -> int | None:
    """Number of elements; None where a size is symbolic."""
    total = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        total *= size
    return total


def _rows(
    comparison: Comparison, totals: list[tuple[Distance, Distance]], tolerances: Mapping[str, float]
) -> tuple[LayerDiff, ...]:
    reference, candidate = comparison.reference.model, comparison.candidate.model
    ops: dict[str, str] = {}
    for node in reference.graph.node:
        ops.update(dict.fromkeys(node.output, node.op_type))
    module_paths = modules(reference)
    distances = {pair.a: total for pair, (total, _) in zip(comparison.pairs, totals, strict=True)}
    random_a, random_b = drawn(reference), drawn(candidate)
    rows: list[LayerDiff] = []
    for pair, (total, alone) in zip(comparison.pairs, totals, strict=True):
        random_source = random_a.get(pair.a) or random_b.get(pair.b)
        measures: dict[str, Any]
        if random_source:
            measures = {"extra": {"nondeterministic": random_source}}
        else:
            measures = total.measures() | _gate(pair, total, distances, tolerances)
            measures["extra"] = total.flags
            if comparison.isolated and pair.pointer is None:
                # NaN or Inf on one side only: no finite figure describes that.
                decibels = -math.inf if alone.one_sided else alone.sqnr_db
                measures["extra"] = total.flags | {OWN: decibels}
        dtype, shape = comparison.types[pair.a]
        op, module = ops.get(pair.a, "Input"), module_paths.get(pair.a, "")
        rows.append(LayerDiff(name=pair.a, op=op, module=module, dtype=dtype, shape=shape, **measures))
    return tuple(rows)


def _gate(
    pair: Pair, total: Distance, by_name: Mapping[str, Distance], tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """The tolerance of a row, and the measure that it bounds."""
    if total.mismatch:
        return {"tolerance": 0.0}
    data = pair.pointer.data if pair.pointer else ""
    if data in by_name and not tolerances.keys().isdisjoint({pair.a, data}):
        # A right index can be off by no more than both sides' data moving towards each other.
        return {"judged": "max_abs", "tolerance": 2.0 * by_name[data].peak * (1 + 1e-9)}
    return {"tolerance": tolerances.get(pair.a)}
