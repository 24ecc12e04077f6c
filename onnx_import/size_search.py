"""Which feeds a foreign model is compared on, and which sizes it takes: nobody says, so onnxruntime is asked."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import helper

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.export.signature import Dim, Value
from layerline.graph.analysis.fresh_names import fresh_name
from layerline.graph.io import onnx_files
from layerline.onnx_import.feed_sources import Source
from layerline.pipeline.errors import ConfigError, StageError, first_line

MEMORY = 64 << 20
"""Bytes that the inner values of one feed may take; a dimension is not run at greater sizes."""
BATCHES = 4
"""Where no bounds are declared, a batch is run from one sample to this many times those of the first feed, any other
dimension from half to twice its size there."""
BATCH = 2
"""Samples of the first feed, where the model takes any number."""
TRIES = 400
"""Combinations of sizes that are tried before a model without samples and bounds is given up."""
_FIRST, _SIZES = (BATCH, 1, 4), (64, 2, 32, 48, 16, 1, 128, 224, 256, 512, 576, 3, 80, 320, 640, 1024, 4096, 16000)
_COUNT = "elements of "
# What onnxruntime's Size takes: no sequences, no text, and none of the types that it knows but computes nothing on.
_COUNTABLE = {f"tensor({t})" for t in ("float", "double", "float16", "bool")}
_COUNTABLE |= {f"tensor({s}int{b})" for s in ("", "u") for b in (8, 16, 32, 64)}
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the configuration says of a dimension; None where it says nothing."""

    min: int | None = None
    max: int | None = None
    multiple: int | None = None

    def fit(self, size: int) -> int:
        """The nearest size that is allowed."""
        step = self.multiple or 1
        low, high = -(-(self.min or 1) // step) * step, (self.max or max(size, step)) // step * step
        return max(low, min(max(size // step * step, step), high))


@dataclass(kw_only=True)
class Feeder:
    """Finds feeds for one model.

    Args:
        model: the original.
        inputs: what it takes; every dimension that may vary has a name.
        declared: what is known of dimensions, by name.
        constants: what further inputs of the model are always fed with.

    Attributes:
        dims: bounds of every dimension that varies: as declared, else as found.
        same: dimensions that turned out to be one, each with the one it is.
        fixed: dimensions that take a single size.
        edges: feeds to compare on and not to build for: dimensions of unknown bounds at their least size, integers
            below zero.
        notes: what was left out, and why.
    """

    model: Light
    inputs: Sequence[Value]
    declared: Mapping[str, Declared]
    constants: Mapping[str, Array] = field(default_factory=dict)
    dims: dict[str, Dim] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    edges: list[Feed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _known: dict[tuple[tuple[str, int], ...], str | None] = field(default_factory=dict)
    _full: set[str] = field(default_factory=set)
    _counting: OrtSession | None = None
    _counts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._session = OnnxRuntime().open(self.model)
        self.free = list(dict.fromkeys(d for v in self.inputs for d in v.shape if isinstance(d, str)))

    def search(self, source: Source) -> dict[str, int] | str:
        """The first sizes that the model runs at, or what it said to the likeliest; nothing is known but bounds."""
        complaint = ""
        for found in _likeliest([self._candidates(d) for d in self.free]):
            at = dict(zip(self.free, found, strict=True))
            feed = source.feed(at)
            said = self.refuses(feed) or next((f"{n} is empty" for n, a in self.run(feed).items() if not a.size), None)
            if said is None:
                return at
            complaint = complaint or f"at {told(at)}: {said}"
        return complaint

    def vary(self, source: Source, first: Mapping[str, int]) -> list[Feed]:
        """Feeds at other sizes of every dimension, alone or with those it is tied to; fills in what they show.

        Raises:
            ConfigError: a declared size that the model refuses.
        """
        feeds: list[Feed] = []
        if not self.free:
            return feeds
        sizes = self.elements(source.feed(first))
        self._full = {v for v, count in sizes.items() if count}
        limit = MEMORY / max(4 * sum(sizes.values()), 1)
        for name in self.free:
            if name not in self.same:
                feeds += self._vary(name, source, first, limit)
        return feeds

    def whole(self, feed: Feed) -> Feed:
        """A feed with the constants, as the model as given takes it."""
        return {**feed, **self.constants}

    def run(self, feed: Feed) -> dict[str, Array]:
        """The outputs of the model as given."""
        return self._session.run(self.whole(feed))

    def refuses(self, feed: Feed) -> str | None:
        """What onnxruntime says against a feed; None where it runs."""
        try:
            self.run(feed)
        except StageError as error:
            return first_line(error.what)
        return None

    def elements(self, feed: Feed) -> dict[str, int]:
        """Elements of every value of the main graph on this feed, counted by the graph itself."""
        if self._counting is None:
            self._counting = OnnxRuntime().open(self._counted())
        found = self._counting.run(self.whole(feed))
        return {self._counts[name]: int(a) for name, a in found.items() if name in self._counts}

    def _candidates(self, name: str) -> list[int]:
        own = self.declared.get(name, Declared())
        wanted = list(_FIRST if self._is_batch(name) else _SIZES)
        if own.max is not None:
            wanted += range(own.min or 1, own.max + 1, max(1, (own.max - (own.min or 1)) // len(_SIZES)))
        return list(dict.fromkeys(own.fit(s) for s in wanted))

    def _is_batch(self, name: str) -> bool:
        return any(v.shape[:1] == (name,) for v in self.inputs)

    def _vary(self, name: str, source: Source, first: Mapping[str, int], limit: float) -> list[Feed]:
        own, seen = self.declared.get(name), first[name]
        ran = self._run((name,), source, first, limit)
        # One sample goes with any number of others by broadcasting, which says nothing about two.
        if own is None and ran.keys() <= {1}:
            ran = self._together(name, source, first, limit) or ran
        if not ran and own is None:
            self.fixed[name] = seen
            self.notes.append(f"{name} is fixed at {seen}: the model runs at no other size that was tried")
            return []
        sizes, tied = [seen, *ran], (name, *(other for other, kept in self.same.items() if kept == name))
        least = own or Declared(min=min(sizes), max=max(sizes))
        step = least.multiple or self._step(tied, source, first)
        self.dims[name] = Dim(min=least.min or min(sizes), max=least.max or max(sizes), multiple=step)
        if own is not None and own.max is None:
            found = self.dims[name]
            self.notes.append(
                f"{name} is declared without max, and goes to {found.max}, the greatest size that was run: engines are "
                f"built up to there; dims: {{{name}: {{min: {found.min}, max: <size>}}}} says what you need"
            )
        at = {**first, **dict.fromkeys(tied, step)}
        if own is None and step < min(sizes) and self._refuses(source, at) is None:
            self.edges.append(source.feed(at))
        return list(ran.values())

    def _together(self, name: str, source: Source, first: Mapping[str, int], limit: float) -> dict[int, Feed]:
        """Feeds at other sizes of a dimension and of the first others that it runs together with: one, or all."""
        decided = {name, *self.same, *self.dims, *self.fixed, *self.declared}
        alike = [d for d in self.free if d not in decided and first[d] == first[name]]
        for others in [*((d,) for d in alike), *([tuple(alike)] if len(alike) > 1 else [])]:
            ran = self._run((name, *others), source, first, limit)
            if ran.keys() <= {1}:
                continue
            for other in others:
                self.same[other] = name
                self.notes.append(f"{other} is always the size of {name}, and goes by its name")
            return ran
        return {}

    def _run(self, names: tuple[str, ...], source: Source, first: Mapping[str, int], limit: float) -> dict[int, Feed]:
        """Feeds that the model takes with other sizes of these dimensions, which move together, by size."""
        name, seen = names[0], first[names[0]]
        own = self.declared.get(name, Declared())
        step = own.multiple or self._step(names, source, first)
        if off := [b for b in (own.min, own.max) if b is not None and b % step]:
            raise ConfigError(
                f"{name} is declared to take {off[0]}, the model takes multiples of {step}", where=f"dims.{name}"
            )
        low = own.min or (1 if self._is_batch(name) else seen // 2)
        high = own.max or (BATCHES if self._is_batch(name) else 2) * seen
        found: dict[int, Feed] = {}
        for size in _others(low, high, seen, step, int(seen * max(limit, 1))):
            at = {**first, **dict.fromkeys(names, size)}
            said = self._refuses(source, at)
            if said is None:
                found[size] = source.feed(at)
            elif size in (own.min, own.max) or (own.min is not None and own.max is not None):
                raise ConfigError(
                    f"{name} takes {size} by declaration, but not in the model: {said}", where=f"dims.{name}"
                )
        if own.max is not None and own.max not in (*found, seen):
            self.notes.append(
                f"{name} was run up to {max([*found, seen])} of {own.max}: more would take too much memory"
            )
        return found

    def _step(self, names: tuple[str, ...], source: Source, first: Mapping[str, int]) -> int:
        """The smallest step to a size that the model takes; 1 where none of those tried is one."""
        seen = first[names[0]]
        fits = (s for s in _STEPS if seen % s == 0)
        at = ((s, {**first, **dict.fromkeys(names, seen + s)}) for s in fits)
        return next((s for s, at_size in at if self._refuses(source, at_size) is None), 1)

    def _refuses(self, source: Source, at: Mapping[str, int]) -> str | None:
        """Also where something runs empty that does not at the first sizes: no builder takes that."""
        key = tuple(sorted(at.items()))
        if key not in self._known:
            try:
                counts = self.elements(source.feed(at))
            except StageError as error:
                self._known[key] = first_line(error.what)
            else:
                empty = next((v for v, count in counts.items() if not count and v in self._full), None)
                self._known[key] = f"{empty} becomes empty" if empty else None
        return self._known[key]

    def _counted(self) -> Light:
        nodes = self.model.model.graph.node
        values = [o for n in nodes if n.op_type != "Constant" for o in n.output if o]
        types = OnnxRuntime().open(self.model, values).types
        kept = {v for v in values if types[v][0] in _COUNTABLE}
        taken = {o for g in onnx_files.graphs(self.model.model) for n in g.node for o in n.output}
        counts = {v: fresh_name(_COUNT + v, taken) for v in values if v in kept}
        self._counts = {count: v for v, count in counts.items()}
        counted = self.model.copy()
        graph = counted.model.graph
        del graph.node[:]
        if kept:  # a graph has to give something
            del graph.output[:]
        for node in nodes:
            graph.node.append(node)
            # Counted right where it is made: at the end, every value would have to live until then.
            made = [v for v in node.output if v in kept]
            graph.node.extend(helper.make_node("Size", [v], [counts[v]]) for v in made)
            graph.output.extend(helper.make_empty_tensor_value_info(counts[v]) for v in made)
        return counted


def _others(low: int, high: int, seen: int, step: int, limit: int) -> list[int]:
    """Both bounds, or what is worth its memory, and the sizes next to them and to `seen`; multiples of `step`."""
    low, high = -(-max(low, 1) // step) * step, high // step * step
    top = max(low, min(high, limit // step * step))
    for wanted in ({low, top, seen + step}, {low, top, seen + step, low + step, top - step}):
        others = sorted(s for s in wanted if low <= s <= high and s != seen)
        if len(others) > 1:
            break
    return others


def _likeliest(lists: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Combinations of one of each, those of early entries first; at most TRIES."""
    start = (0,) * len(lists)
    heap, known = [(0, start)], {start}
    for _ in range(TRIES):
        if not heap:
            return
        rank, places = heapq.heappop(heap)
        yield tuple(values[p] for values, p in zip(lists, places, strict=True))
        for i, values in enumerate(lists):
            after = (*places[:i], places[i] + 1, *places[i + 1 :])
            if after[i] < len(values) and after not in known:
                known.add(after)
                heapq.heappush(heap, (rank + 1, after))


def told(at: Mapping[str, int]) -> str:
    """Sizes by name, in words."""
    return ", ".join(f"{n}={s}" for n, s in at.items()) or "its only size"
