"""The distance of every value of two ONNX models, over any number of samples, without keeping one of them."""

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
from layerline.compare.mask_values import extremes
from layerline.compare.pair_metrics import COUNTS, SUMS, Pair, trusted
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointed_at, pointers
from layerline.compare.value_types import CODES, Shape, infer
from layerline.graph.analysis.rounding_noise import drawn, perturbed
from layerline.graph.io.module_identity import modules
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff, Scalar

__all__ = ["Distance", "compare", "diff_arrays", "pair_values", "why_two_sessions"]
FEW = 8
"""Feeds up to which a session isn't worth preparing for more."""


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
        reference: the a-side.
        candidate: the b-side; takes the reference's inputs (by name), or some of them.
        feeds: arrays by input name.
        isolated: also measure each layer of the candidate fed with the reference's values:
            `extra["isolated_sqnr_db"]`.
        pairs: reference value to candidate value; default: values of the same name. Graph outputs are always paired,
            by position. Values inside subgraphs (If, Loop, Scan) and functions are left out.
        tolerances: greatest relative L2 error that passes, by value of the reference; others are not gated.
        settled: values of both whose readers in the candidate read the reference's: outputs of QuantizeLinear, where an
            element half-way between two steps may take either.

    Returns:
        One row per pair in the reference's topological order. Index outputs (ArgMax, TopK) are measured on the values
        they point at in the reference, and bounded by what the distance of those values allows. Tensors of different
        shape fail, with `extra["mismatch"]`. Values that depend on a random operator are not measured:
        `extra["nondeterministic"]` names it.

    Raises:
        StageError: a model or feed that onnxruntime refuses, an unknown name in `pairs`, no feed at all.
    """
    few = isinstance(feeds, Sequence) and len(feeds) <= FEW
    run = _Run(split(reference), split(candidate), pairs, isolated, OnnxRuntime(few_runs=few), settled)
    totals = apart = [Distance()] * len(run.pairs)
    for feed in feeds:
        found = run.measure(feed)
        totals = [d + whole for d, (whole, _) in zip(totals, found, strict=True)]
        apart = [d + alone for d, (_, alone) in zip(apart, found, strict=True)]
    if not run.measured:
        raise StageError("there is no sample to compare on", where="feeds")
    return _rows(run, totals, apart if isolated else None, tolerances or {})


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
    outputs = [[o.name for o in m.graph.output] for m in (reference, candidate)]
    if len(outputs[0]) != len(outputs[1]):
        raise StageError(
            f"the reference gives {outputs[0]}, the candidate {outputs[1]}: outputs are paired by position",
            where="outputs",
        )
    made = [[o for n in m.graph.node if n.op_type != "Constant" for o in n.output if o] for m in (reference, candidate)]
    for side, names, known in (("reference", pairs or {}, made[0]), ("candidate", (pairs or {}).values(), made[1])):
        if unknown := sorted(set(names) - set(known)):
            raise StageError(f"the {side} has no value called {unknown[0]!r}", where="pairs")
    wanted = dict(zip(made[0], made[0], strict=True)) if pairs is None else dict(pairs)
    inner = {a: wanted[a] for a in made[0] if a in wanted and wanted[a] in set(made[1])}
    by_position = dict(zip(*outputs, strict=True))
    ordered = [a for a in made[0] if a in inner or a in by_position]
    ordered += [a for a in by_position if a not in set(ordered)]
    return {a: by_position.get(a) or inner[a] for a in ordered}


def why_two_sessions(reference: onnx.ModelProto, candidate: onnx.ModelProto) -> str | None:
    """Why the two cannot be one graph, in one sentence for a report's notes; None when they can."""
    a, b = ({o.domain.replace("ai.onnx", "", 1): o.version for o in m.opset_import} for m in (reference, candidate))
    for domain in sorted(set(a) & set(b)):
        if a[domain] != b[domain]:
            name = domain or "ai.onnx"
            return f"compared as two sessions: opset {a[domain]} and {b[domain]} of {name} cannot share a graph"
    if min(a.get("", 0), b.get("", 0)) < 11:
        return "compared as two sessions: below opset 11"
    if any(m.graph.sparse_initializer for m in (reference, candidate)):
        return "compared as two sessions: sparse initializers"
    if any(not p.ordered for p in pointers(reference.graph).values()):
        return "compared as two sessions: a TopK leaves its order open"
    return None


class _Run:
    """One comparison: what is paired, and the sessions, each opened when it is first needed."""

    def __init__(
        self,
        reference: Light,
        candidate: Light,
        names: Mapping[str, str] | None,
        isolated: bool,
        runtime: OnnxRuntime,
        settled: Collection[str] = (),
    ) -> None:
        self._settled = settled
        self.reference, self.candidate, self.isolated, self.runtime = reference, candidate, isolated, runtime
        self.one_graph, self.measured = why_two_sessions(reference.model, candidate.model) is None, 0
        self.pairs: list[Pair] = []
        self.types: dict[str, tuple[str, Shape]] = {}
        self._sessions: dict[str, OrtSession] = {}
        self._pair(pair_values(reference.model, candidate.model, names))
        masked = extremes(reference.model.graph)
        self._unclear = {i for i, pair in enumerate(self.pairs) if pair.a in masked}

    def measure(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        """Each pair's distance on one feed: cumulative, and isolated (zero where not asked for)."""
        self.measured += 1
        found = self._in_one_graph(feed) if self.one_graph else None
        return found or self._by_hand(feed)

    def _pair(self, matched: Mapping[str, str]) -> None:
        graph = self.reference.model.graph
        point = pointers(graph)
        taps = [*matched, *(point[a].data for a in matched if a in point)]
        of_a, of_b = infer(self.reference, taps), infer(self.candidate, list(matched.values()))
        outputs = {o.name for o in graph.output}
        for a, b in matched.items():
            (kind_a, shape), (kind_b, shape_b) = of_a[a], of_b[b]
            plain = kind_a in CODES and kind_b in CODES
            if not plain and a not in outputs:
                # Inner sequences and the like are left to their consumers; an output of such a type must be right.
                continue
            self.one_graph &= plain and _may_be_equal(shape, shape_b)
            pointer = point.get(a)
            if pointer is not None and pointer.axis < 0:
                pointer = replace(pointer, axis=pointer.axis + len(of_a[pointer.data][1]))
            codes = {"dtype_a": CODES.get(kind_a, 0), "dtype_b": CODES.get(kind_b, 0)}
            rank, size = min(len(shape), len(shape_b)), _size(shape) if shape == shape_b else None
            self.pairs.append(Pair(a=a, b=b, pointer=pointer, rank=rank, size=size, **codes))
            self.types[a] = of_a[a]

    def _in_one_graph(self, feed: Feed) -> list[tuple[Distance, Distance]] | None:
        found = self._joint(feed)
        exact = {i for i, pair in enumerate(self.pairs) if pair.small}
        measured = zip(self.pairs, found or (), strict=False)
        doubted = {i for i, (pair, both) in enumerate(measured) if not all(trusted(pair, d) for d in both)}
        bad = doubted - self._unclear - exact
        if not bad:
            return found
        # What holds NaN, Inf or a mask, or what float32 can't sum, is taken apart from here on, in twice the time.
        self._unclear |= bad
        self._sessions.pop("joint")
        return self._joint(feed)

    def _joint(self, feed: Feed) -> list[tuple[Distance, Distance]] | None:
        if "joint" not in self._sessions:
            model = joint(self.reference, self.candidate, self.pairs, masked=self._unclear, isolated=self.isolated,
                          settled=self._settled)  # fmt: skip
            self._sessions["joint"] = self.runtime.open(model)
        try:
            out = self._sessions["joint"].run(feed)
        except StageError:
            # Shapes that do not fit, an index out of range, a wrong feed: by hand, the one at fault gets its name.
            return None
        found = [(_distance(out, str(i)), _distance(out, f"{i}/isolated")) for i in range(len(self.pairs))]
        return None if any(d.mismatch for pair in found for d in pair) else found

    def _by_hand(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        a = self._side("a", self.reference, [p.a for p in self.pairs], feed)
        b = self._side("b", self.candidate, [p.b for p in self.pairs], feed)
        whole = [_diff(p, a, b[p.b]) for p in self.pairs]
        alone = [Distance(mismatch="not run")] * len(whole)
        if self.isolated and not any(d.mismatch for d in whole):
            fed = dict(feed) | {f"a//{p.a}": a[p.a] for p in self.pairs if p.dtype_a and p.dtype_b}
            c = self._side("isolated", isolated_model(self.candidate, self.pairs), [], fed)
            alone = [
                Distance() if p.pointer else diff_arrays(a[p.a], c.get(ISOLATED + p.b, b[p.b])) for p in self.pairs
            ]
        return list(zip(whole, alone, strict=True))

    def _side(self, key: str, model: Light, taps: list[str], feed: Feed) -> dict[str, Array]:
        if key not in self._sessions:
            taps += [p.pointer.data for p in self.pairs if p.pointer and key == "a"]
            self._sessions[key] = self.runtime.open(model, list(dict.fromkeys(taps)))
        session = self._sessions[key]
        other = {i.name for m in (self.reference, self.candidate) for i in m.model.graph.input}
        feed = {k: v for k, v in feed.items() if k in session.inputs or k not in other}
        return feed | session.run(feed)


def _may_be_equal(a: Shape, b: Shape) -> bool:
    sizes = zip(a, b, strict=False)
    return len(a) == len(b) and not any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in sizes)


def _size(shape: Shape) -> int | None:
    known = [s for s in shape if isinstance(s, int)]
    return math.prod(known) if len(known) == len(shape) else None


def _distance(out: Mapping[str, Any], tag: str) -> Distance:
    if f"{tag}/a" in out:
        return diff_arrays(out[f"{tag}/a"], out[f"{tag}/b"])
    if f"{tag}/peak" not in out:
        return Distance()
    shape_a, shape_b = (tuple(out[f"{tag}/shape_{s}"].tolist()) for s in "ab")
    counts = {k: int(out[f"{tag}/{k}"]) for k in COUNTS if f"{tag}/{k}" in out}
    sums = out[f"{tag}/sums"] if f"{tag}/sums" in out else [out[f"{tag}/{k}"] for k in SUMS]
    aa, bb, ee, l1 = map(float, sums)
    return Distance(
        count=math.prod(shape_a) - counts.pop("bad", 0) - counts.get("masked", 0),
        aa=aa,
        bb=bb,
        ee=ee,
        l1=l1,
        # The maximum over no element is -inf.
        peak=max(float(out[f"{tag}/peak"]), 0.0),
        mismatch="" if shape_a == shape_b else f"shape {shape_a} against {shape_b}",
        **counts,
    )


def _diff(pair: Pair, a: Mapping[str, Array], b: Any) -> Distance:
    if pair.pointer is None or a[pair.a].size != b.size:
        return diff_arrays(a[pair.a], b)
    data = a[pair.pointer.data]
    return diff_arrays(*(pointed_at(pair.pointer, data, index) for index in (a[pair.a], b)))


def _rows(
    run: _Run, totals: list[Distance], apart: list[Distance] | None, tolerances: Mapping[str, float]
) -> tuple[LayerDiff, ...]:
    reference, candidate = run.reference.model, run.candidate.model
    ops = {o: n.op_type for n in reference.graph.node for o in n.output}
    paths, by_name = modules(reference), {p.a: d for p, d in zip(run.pairs, totals, strict=True)}
    in_a, in_b = drawn(reference), drawn(candidate)
    rows = []
    for i, (pair, total) in enumerate(zip(run.pairs, totals, strict=True)):
        found: dict[str, Any] = {"extra": {"nondeterministic": in_a.get(pair.a) or in_b.get(pair.b)}}
        if not found["extra"]["nondeterministic"]:
            alone = apart[i] if apart is not None and pair.pointer is None else None
            found = total.measures() | _gate(pair, total, by_name, tolerances) | {"extra": _extra(total, alone)}
        dtype, shape = run.types[pair.a]
        op, module = ops.get(pair.a, "Input"), paths.get(pair.a, "")
        rows.append(LayerDiff(name=pair.a, op=op, module=module, dtype=dtype, shape=shape, **found))
    return tuple(rows)


def _extra(total: Distance, alone: Distance | None) -> dict[str, Scalar]:
    if alone is None:
        return total.flags
    return total.flags | {"isolated_sqnr_db": -math.inf if alone.one_sided else alone.sqnr_db}


def _gate(
    pair: Pair, total: Distance, by_name: Mapping[str, Distance], tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """What the row is bounded by."""
    if total.mismatch:
        return {"tolerance": 0.0}
    data = pair.pointer.data if pair.pointer else ""
    if data in by_name and not tolerances.keys().isdisjoint({pair.a, data}):
        # A right index can be off by no more than both sides' data moving towards each other.
        return {"judged": "max_abs", "tolerance": 2.0 * by_name[data].peak * (1 + 1e-9)}
    return {"tolerance": tolerances.get(pair.a)}
