"""Finds feeds for an imported model and the sizes that it takes, by trial on onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.export.declared_shapes import watching
from layerline.export.signature import Value
from layerline.graph.analysis.ir_queries import names
from layerline.onnx_import.feed_sources import Source, shape
from layerline.pipeline.config.field_types import Dim, Dimension
from layerline.pipeline.errors import ConfigError, StageError, first_line

MEMORY = 64 << 20
"""Bytes that the inner values of one feed may take; a dimension is not run at greater sizes."""
BATCHES = 4
"""Without declared bounds, a batch is run from one sample to this many times those of the first feed; any other
dimension from half to twice its size there."""
BATCH = 2
"""Samples of the first feed, where the model takes any number."""
MOST_DRAWN = 1 << 27
"""Elements of one input that are drawn while sizes are looked for."""
TRIES = 400
"""Combinations of sizes that are tried before a model without samples and bounds is given up."""
# Sizes to try of a batch and of any other dimension, the likeliest first.
_BATCH_SIZES = (BATCH, 1, 4)
_SIZES = (64, 2, 32, 48, 16, 1, 128, 224, 256, 512, 576, 3, 80, 320, 640, 1024, 4096, 16000)
# What is counted: no sequences, no text, and none of the types that onnxruntime knows but computes nothing on.
_COUNTABLE = {f"tensor({t})" for t in ("float", "double", "float16", "bool")}
_COUNTABLE |= {f"tensor({s}int{b})" for s in ("", "u") for b in (8, 16, 32, 64)}
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(kw_only=True)
class Feeder:
    """Finds feeds for one model.

    Args:
        model: the original.
        inputs: inputs of the model; every dimension that may vary has a name.
        declared: declared bounds of dimensions, by name.
        constants: what further inputs of the model are always fed with.

    Attributes:
        dims: bounds of every dimension that varies: as declared, otherwise as tried.
        same: dimensions that always have the size of another one, each with that one.
        fixed: dimensions that take a single size.
        edges: feeds to compare on and not to build for: dimensions of unknown bounds at their least size, integers
            below zero.
        notes: what was left out, and why.
    """

    model: ir.Model
    inputs: Sequence[Value]
    declared: Mapping[str, Dimension]
    constants: Mapping[str, Array] = field(default_factory=dict)
    dims: dict[str, Dim] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    edges: list[Feed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = OnnxRuntime().open(self.model)
        self._counting: OrtSession | None = None
        self._shapes: dict[str, str] = {}
        # Errors by sizes, None where the model runs: one combination is asked for several times.
        self._errors: dict[tuple[tuple[str, int], ...], str | None] = {}
        # Values that hold something at the first sizes, and must at the others: TensorRT builds no empty tensors.
        self._not_empty = set(names(self.model.graph.outputs))
        self.free: list[str] = []
        for value in self.inputs:
            for dim in value.shape:
                if isinstance(dim, str) and dim not in self.free:
                    self.free.append(dim)

    def search(self, source: Source) -> dict[str, int] | str:
        """The first sizes that the model runs at, or its error at the likeliest ones."""
        self._source = source
        self._errors.clear()  # another source draws other numbers, such as indices within a table
        first_error = ""
        candidates = [self._candidates(name) for name in self.free]
        for places in _likeliest([len(sizes) for sizes in candidates]):
            tried: dict[str, int] = {}
            for name, sizes, place in zip(self.free, candidates, places, strict=True):
                tried[name] = sizes[place]
            error = self._error_at(tried)
            if error is None:
                return tried
            # The likeliest sizes fail for the reason that helps most.
            first_error = first_error or f"at {sizes_text(tried)}: {error}"
        return first_error

    def vary(self, source: Source, first: Mapping[str, int]) -> list[Feed]:
        """Feeds at other sizes of every dimension, alone or with those it is tied to. Fills in `dims` and the like.

        Raises ConfigError if the model refuses a declared size.
        """
        feeds: list[Feed] = []
        if not self.free:
            return feeds
        self._source = source
        self._first = first
        counts = self.elements(source.feed(first))
        self._not_empty = {value for value, count in counts.items() if count}
        # How many times the values of the first feed may grow; four bytes an element.
        self._growth = max(MEMORY / max(4 * sum(counts.values()), 1), 1)
        for name in self.free:
            if name not in self.same:
                feeds += self._vary(name)
        return feeds

    def whole(self, feed: Feed) -> Feed:
        """A feed with the constants, as the original model takes it."""
        return {**feed, **self.constants}

    def run(self, feed: Feed) -> dict[str, Array]:
        """The outputs of the original model."""
        return self._session.run(self.whole(feed))

    def refuses(self, feed: Feed) -> str | None:
        """onnxruntime's error on a feed; None if it runs."""
        try:
            self.run(feed)
        except StageError as error:
            return first_line(error.what)
        return None

    def taken(self, feeds: Iterable[Feed]) -> list[Feed]:
        """Those of some feeds that the model runs on."""
        return [feed for feed in feeds if self.refuses(feed) is None]

    def elements(self, feed: Feed) -> dict[str, int]:
        """Elements of every value of the main graph on this feed, by shapes that the graph itself gives."""
        if self._counting is None:
            values: list[str] = []
            for node in self.model.graph:
                if node.op_type != "Constant":
                    values += names(node.outputs)
            types = OnnxRuntime().open(self.model, values).types
            countable = {value for value in values if types[value][0] in _COUNTABLE}
            watched, self._shapes = watching(self.model, countable)
            if countable:  # a graph must have an output
                del watched.graph.outputs[: len(self.model.graph.outputs)]
            self._counting = OnnxRuntime().open(watched)
        # A value's size is the product of its shape; the values themselves are let go while the graph runs.
        outputs = self._counting.run(self.whole(feed))
        return {value: math.prod(outputs[name].tolist()) for name, value in self._shapes.items()}

    def bounds(self, name: str) -> Dimension:
        """The declared bounds of a dimension; open ones where nothing is declared."""
        return self.declared.get(name, Dimension())

    def _candidates(self, name: str) -> list[int]:
        """Sizes to try of a dimension, the likeliest first, within its declared bounds."""
        declared = self.bounds(name)
        sizes = list(_SIZES)
        if self._is_batch(name):
            sizes = list(_BATCH_SIZES)
        if declared.max is not None:
            # None of the usual sizes may lie within the bounds, so some of all that do are tried as well.
            low = declared.min or 1
            spacing = max(1, (declared.max - low) // len(_SIZES))
            sizes += range(low, declared.max + 1, spacing)
        return list(dict.fromkeys(map(declared.fit, sizes)))

    def _is_batch(self, name: str) -> bool:
        return any(value.shape[:1] == (name,) for value in self.inputs)

    def _vary(self, name: str) -> list[Feed]:
        """Feeds at other sizes of one dimension; records its bounds, or that it is fixed."""
        first = self._first[name]
        is_declared = name in self.declared
        feeds = self._run((name,))
        # One sample goes with any number of others by broadcasting, which says nothing about two.
        if not is_declared and feeds.keys() <= {1}:
            feeds = self._together(name) or feeds
        if not is_declared and not feeds:
            self.fixed[name] = first
            self.notes.append(f"{name} is fixed at {first}: the model runs at no other size that was tried")
            return []
        sizes = [first, *feeds]
        tied = [name]
        tied += [other for other, leader in self.same.items() if leader == name]
        declared = self.bounds(name)
        step = declared.multiple or self._step(tied)
        dim = Dim(min=declared.min or min(sizes), max=declared.max or max(sizes), multiple=step)
        self.dims[name] = dim
        if is_declared and declared.max is None:
            self.notes.append(
                f"{name} is declared without max, and goes to {dim.max}, the greatest size that was run. Engines are "
                f"built up to there. To set another limit: dims: {{{name}: {{min: {dim.min}, max: <size>}}}}"
            )
        # The least size that may be fed breaks most easily. Users don't ask for it, so engines are not built for it.
        least = {**self._first, **dict.fromkeys(tied, step)}
        if not is_declared and step < min(sizes) and self._error_at(least) is None:
            self.edges.append(self._source.feed(least))
        return list(feeds.values())

    def _together(self, name: str) -> dict[int, Feed]:
        """Feeds at other sizes of a dimension and of others that must move with it: one other, or all of that size."""
        decided = {name, *self.same, *self.dims, *self.fixed, *self.declared}
        alike = [dim for dim in self.free if dim not in decided and self._first[dim] == self._first[name]]
        groups = [[dim] for dim in alike]
        if len(alike) > 1:
            groups.append(alike)
        for others in groups:
            feeds = self._run((name, *others))
            if feeds.keys() <= {1}:
                continue
            for other in others:
                self.same[other] = name
                self.notes.append(f"{other} is always the size of {name}, and gets its name")
            return feeds
        return {}

    def _run(self, moved: Sequence[str]) -> dict[int, Feed]:
        """Feeds that the model takes with other sizes of these dimensions, which move together, by size."""
        name = moved[0]
        first = self._first[name]
        declared = self.bounds(name)
        step = declared.multiple or self._step(moved)
        # Bounds between two multiples would promise sizes that the model refuses.
        for bound in (declared.min, declared.max):
            if bound is not None and bound % step:
                what = f"{name} is declared to take {bound}, the model takes multiples of {step}"
                raise ConfigError(what, where=f"dims.{name}")
        low, high = first // 2, 2 * first
        if self._is_batch(name):
            low, high = 1, BATCHES * first
        # Both bounds are a promise: every size between them has to run.
        fully_declared = declared.min is not None and declared.max is not None
        feeds: dict[int, Feed] = {}
        for size in _others(declared.min or low, declared.max or high, first, step, int(first * self._growth)):
            sizes = {**self._first, **dict.fromkeys(moved, size)}
            error = self._error_at(sizes)
            if error is None:
                feeds[size] = self._source.feed(sizes)
            elif fully_declared or size in (declared.min, declared.max):
                what = f"{name} is declared to take {size}, but the model does not run there: {error}"
                raise ConfigError(what, where=f"dims.{name}")
        if declared.max is not None and declared.max not in (*feeds, first):
            reached = max([*feeds, first])
            self.notes.append(f"{name} was run up to {reached} of {declared.max}: more would take too much memory")
        return feeds

    def _step(self, moved: Sequence[str]) -> int:
        """The smallest step to a size that the model takes; 1 if none of those tried is one."""
        size = self._first[moved[0]]
        for step in _STEPS:
            if size % step == 0 and self._error_at({**self._first, **dict.fromkeys(moved, size + step)}) is None:
                return step
        return 1

    def _error_at(self, sizes: Mapping[str, int]) -> str | None:
        """What is wrong at these sizes: an input too large to be drawn, the model's error, or a value that is empty."""
        key = tuple(sorted(sizes.items()))
        if key not in self._errors:
            self._errors[key] = self._try(sizes)
        return self._errors[key]

    def _try(self, sizes: Mapping[str, int]) -> str | None:
        for value in self.inputs:
            elements = math.prod(shape(value, sizes))
            if elements > MOST_DRAWN:
                return f"{value.name} has {elements:.3g} elements"
        try:
            counts = self.elements(self._source.feed(sizes))
        except StageError as error:
            return first_line(error.what)
        for name, count in counts.items():
            if not count and name in self._not_empty:
                return f"{name} becomes empty"
        return None


def _others(low: int, high: int, first: int, step: int, limit: int) -> list[int]:
    """Sizes to run beside the first: both bounds and the next step; more sizes if that leaves only one."""
    # Multiples of the step within the bounds.
    low = math.ceil(max(low, 1) / step) * step
    high = high // step * step
    # As far up as memory allows, but for the least size, which is always run.
    top = max(low, min(high, limit // step * step))
    sizes: list[int] = []
    for wanted in ({low, top, first + step}, {low, top, first + step, low + step, top - step}):
        sizes = sorted(size for size in wanted if low <= size <= high and size != first)
        if len(sizes) > 1:
            break
    return sizes


def _likeliest(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Places in lists of these lengths, one in each, those of the least sum first; at most TRIES."""
    tries = 0
    for total in range(sum(counts) - len(counts) + 1):
        for places in _places(counts, total):
            if tries == TRIES:
                return
            tries += 1
            yield places


def _places(counts: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Places whose sum is `total`."""
    # Not by recursion: a file may have more open sizes than Python's stack has frames.
    pending: list[tuple[int, ...]] = [()]
    while pending:
        places = pending.pop()
        rest = total - sum(places)
        if len(places) < len(counts):
            following = range(min(rest + 1, counts[len(places)]))
            pending += [(*places, place) for place in reversed(following)]
        elif rest == 0:
            yield places


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes by name, in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "its only size"
