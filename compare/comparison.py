"""One comparison of two models that is going on: their pairs of values, and the sessions that measure them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.compare.comparison_graph import ISOLATED, isolated_model, joint
from layerline.compare.pair_metrics import Pair, distance, trusted
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointers, resolved
from layerline.compare.value_pairs import pair_values, why_two_sessions
from layerline.compare.value_types import CODES, Shape, infer
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import may_be_equal, names
from layerline.pipeline.errors import StageError

# Bytes of inner values that one run hands over to numpy; more of them take further runs.
HANDED_OVER = 256 << 20
# A value whose size is not known yet is taken to have this part of them.
_UNKNOWN = 128


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
        reference: ir.Model,
        candidate: ir.Model,
        pairing: Mapping[str, str] | None,
        isolated: bool,
        runtime: OnnxRuntime,
        settled: Collection[str] = (),
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.isolated = isolated
        self.runtime = runtime
        self.one_graph = why_two_sessions(reference, candidate) is None
        self.measured = 0
        self._settled = settled
        self.pairs: list[Pair] = []
        self.types: dict[str, tuple[str, Shape]] = {}
        self._sessions: dict[str, OrtSession] = {}
        self._pair(pair_values(reference, candidate, pairing))
        self._unclear = set[int]()
        self.sizes_differ: Mapping[str, str] = {}
        # The pairs that each run measures.
        self._runs: list[set[int]] = [set(range(len(self.pairs)))]
        # Bytes of each pair, on both sides, as the first feed has them.
        self._bytes: dict[str, int] = {}

    def allow_sizes(self) -> None:
        """Lets values whose size depends on numbers differ in it. Both sides are handed over as they are."""
        self.sizes_differ = counted(self.reference.graph).values
        self._unclear.update(i for i, pair in enumerate(self.pairs) if pair.a in self.sizes_differ)

    def measure(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        """The distance of each pair on one feed: cumulative, and isolated (zero where not wanted)."""
        self.measured += 1
        distances = None
        if self.one_graph:
            distances = self._joint(feed)
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
            # Four bytes an element, on two sides; on two more where the layers are measured alone as well.
            size = 8 * elements
            if self.isolated:
                size *= 2
            if size > room:
                self._runs.append(set())
                room = HANDED_OVER
            self._runs[-1].add(i)
            room -= size
        self._runs = [measured for measured in self._runs if measured]
        return self._joint(feed) or self._by_hand(feed)

    def _pair(self, matched: Mapping[str, str]) -> None:
        graph = self.reference.graph
        all_pointers = pointers(graph)
        # Indices are measured on their data, so the rank of the data must be known to count the axis from the front.
        taps = [*matched, *(all_pointers[a].data for a in matched if a in all_pointers)]
        types_a = infer(self.reference, taps)
        types_b = infer(self.candidate, list(matched.values()))
        outputs = set(names(graph.outputs))
        for a, b in matched.items():
            dtype_a, shape_a = types_a[a]
            dtype_b, shape_b = types_b[b]
            are_tensors = dtype_a in CODES and dtype_b in CODES
            if not are_tensors and a not in outputs:
                # Inner sequences and the like are left to their consumers; an output of such a type must be right.
                continue
            self.one_graph &= are_tensors and may_be_equal(shape_a, shape_b)
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
                if (cumulative.mismatch or alone.mismatch) and self.pairs[i].a not in self.sizes_differ:
                    return None
                distances[i] = (cumulative, alone)
        return distances

    def _by_hand(self, feed: Feed) -> list[tuple[Distance, Distance]]:
        """The distances from two sessions, of as many pairs at a time as may be handed over."""
        if self.isolated:
            # What layers read that are measured alone has to be there at once.
            return self._handed_over(self.pairs, feed)
        parts = self._parts()
        distances: list[tuple[Distance, Distance]] = []
        for part in parts:
            # A session gives what one part needs, and keeps the memory that a run took.
            if len(parts) > 1:
                self._sessions.clear()
            distances += self._handed_over(part, feed)
        if not self._bytes:
            for pair, (total, _) in zip(self.pairs, distances, strict=True):
                self._bytes[pair.a] = 8 * (total.count + total.masked + total.nonfinite_a)
            # From here on the sizes are known.
            if self._parts() != parts:
                self._sessions.clear()
        return distances

    def _parts(self) -> list[list[Pair]]:
        """The pairs in order, in parts that may be handed over together; four bytes an element, on two sides."""
        parts: list[list[Pair]] = [[]]
        room = HANDED_OVER
        for pair in self.pairs:
            size = HANDED_OVER // _UNKNOWN
            if pair.size is not None:
                size = 8 * pair.size
            size = self._bytes.get(pair.a, size)
            if parts[-1] and size > room:
                parts.append([])
                room = HANDED_OVER
            parts[-1].append(pair)
            room -= size
        return parts

    def _handed_over(self, pairs: list[Pair], feed: Feed) -> list[tuple[Distance, Distance]]:
        """The distances of some pairs from two sessions."""
        # An index is measured on the data that it points at.
        data = [pair.pointer.data for pair in pairs if pair.pointer is not None]
        a = self._side("a", self.reference, [*(pair.a for pair in pairs), *data], feed)
        b = self._side("b", self.candidate, [pair.b for pair in pairs], feed)
        cumulative = [diff_arrays(*resolved(p.pointer, a, (a[p.a], b[p.b]))) for p in pairs]
        # Isolated layers take values of the reference, which must have the shapes of the candidate.
        alone = [Distance(mismatch="not run")] * len(cumulative)
        differing = [p.a for p, d in zip(pairs, cumulative, strict=True) if d.mismatch]
        if self.isolated and self.sizes_differ.keys() >= set(differing):
            inputs = dict(feed)
            inputs.update({f"a//{p.a}": a[p.a] for p in pairs if p.dtype_a and p.dtype_b})
            isolated = self._side("isolated", isolated_model(self.candidate, pairs), [], inputs)
            for i, pair in enumerate(pairs):
                alone[i] = Distance()
                if pair.pointer is None:
                    alone[i] = diff_arrays(a[pair.a], isolated.get(ISOLATED + pair.b, b[pair.b]))
        return list(zip(cumulative, alone, strict=True))

    def _side(self, key: str, model: ir.Model, taps: list[str], feed: Feed) -> dict[str, Array]:
        if key not in self._sessions:
            self._sessions[key] = self.runtime.open(model, list(dict.fromkeys(taps)))
        session = self._sessions[key]
        # The candidate may take only some of the reference's inputs; any other name is a mistake, and is reported.
        declared = {*names(self.reference.graph.inputs), *names(self.candidate.graph.inputs)}
        feed = {k: v for k, v in feed.items() if k in session.inputs or k not in declared}
        return feed | session.run(feed)


def _size(shape: Shape) -> int | None:
    """Number of elements; None where a size is symbolic."""
    total = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        total *= size
    return total
