"""Corrects the declared shapes of inner values by their shapes on real feeds.

A runtime plans its memory by declared shapes: two values that are declared to have one size share a buffer. If a shape
is wrong, the model fails at some sizes, or at all but one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import copied, fresh_name, value_names
from layerline.graph.io.ir_convert import as_ir

Shapes = Mapping[str, Sequence[int]]
"""Sizes of values on one feed, by name."""


def watching(model: ir.Model, values: Collection[str]) -> tuple[ir.Model, dict[str, str]]:
    """The model with the shape of these values as further outputs, and the value behind the name of each."""
    watched = copied(as_ir(model))
    graph = watched.graph
    taken = value_names(watched)
    value_of: dict[str, str] = {}
    for node in list(graph):
        for value in reversed(node.outputs):
            if value.name in values:
                name = fresh_name(f"shape of {value.name}", taken)
                value_of[name] = value.name or ""
                shape = ir.node("Shape", [value], name="")
                shape.outputs[0].name = name
                # Taken right where it is made: at the end, every value would have to live until then.
                graph.insert_after(node, shape)
                graph.outputs.append(shape.outputs[0])
    return watched, value_of


def declared(model: ir.Model, taps: Iterable[str] = ()) -> set[str]:
    """The inner values that the model declares a shape of; those in `taps` show theirs themselves."""
    inner = set[str]()
    for node in as_ir(model).graph:
        for value in node.outputs:
            # onnxruntime has no Shape of float8 and smaller types.
            shown = isinstance(value.type, ir.TensorType) and value.type.dtype < ir.DataType.FLOAT8E4M3FN
            if shown and value.shape and value.name and not value.is_graph_output():
                inner.add(value.name)
    return inner.difference(taps)


def shapes(outputs: Mapping[str, Array], value_of: Mapping[str, str]) -> dict[str, Sequence[int]]:
    """Sizes of every value among the outputs of such a model."""
    sizes: dict[str, Sequence[int]] = {}
    for name, array in outputs.items():
        if name in value_of:
            sizes[value_of[name]] = array.tolist()
        elif hasattr(array, "shape"):  # a sequence has none
            sizes[name] = array.shape
    return sizes


def measured(model: ir.Model, feeds: Iterable[Feed]) -> list[tuple[Feed, Shapes]]:
    """The feeds, each with the sizes of every inner value on it."""
    watched, value_of = watching(model, declared(model))
    session = OnnxRuntime(few_runs=True).open(watched)
    return [(feed, shapes(session.run(feed), value_of)) for feed in feeds]


def correct(model: ir.Model, runs: Sequence[tuple[Feed, Shapes]]) -> list[str]:
    """Gives every wrongly declared size of an inner value a name of its own, in place; returns those values.

    A unique name lets a runtime assume nothing. Without a name it would infer the size, and its inference may be what
    was wrong in the first place.
    """
    runs_with_symbols = [(_symbols(model, feed), sizes_by_value) for feed, sizes_by_value in runs]
    wrong: list[str] = []
    for value in [value for node in model.graph for value in node.outputs]:
        name = value.name or ""
        measured = [(symbols, sizes[name]) for symbols, sizes in runs_with_symbols if name in sizes]
        if not measured or value.shape is None or value.is_graph_output():
            continue
        if any(len(sizes) != len(value.shape) for _, sizes in measured):
            value.shape = None
            wrong.append(name)
            continue
        # All axes are checked before the first is renamed: a size may occur twice.
        wrong_axes: list[int] = []
        for axis, dim in enumerate(value.shape):
            if not all(_may_be(dim, sizes[axis], symbols) for symbols, sizes in measured):
                wrong_axes.append(axis)
        if wrong_axes:
            value.shape = value.shape.copy()
            for axis in wrong_axes:
                value.shape[axis] = f"{name}#{axis}"
            wrong.append(name)
    return wrong


def _symbols(model: ir.Model, feed: Feed) -> dict[str, int]:
    """The size of every named dimension of the inputs."""
    symbols: dict[str, int] = {}
    for value in model.graph.inputs:
        # A feed of another rank tells nothing about the names of its sizes.
        fed = feed.get(value.name or "")
        if fed is None or value.shape is None or len(value.shape) != fed.ndim:
            continue
        for dim, size in zip(value.shape, fed.shape, strict=True):
            if not isinstance(dim, int) and dim.value:
                symbols[dim.value] = size
    return symbols


def _may_be(dim: int | ir.SymbolicDim, size: int, symbols: dict[str, int]) -> bool:
    """Whether a declared size can be this one. A name without a size gets the first size it is compared with."""
    if isinstance(dim, int):
        return dim == size
    if not dim.value:
        return True
    if dim.value not in symbols:
        computed = _evaluate(dim.value, symbols)
        if computed is None:
            computed = size
        symbols[dim.value] = computed
    return symbols[dim.value] == size


def _evaluate(text: str, symbols: Mapping[str, int]) -> int | None:
    """The value of a size such as `2*t + 1`; None for anything else. Nothing of the text is run as code."""
    if "**" in text or len(text) > 200:
        return None  # the text may be a stranger's, and 9**9**9 takes sympy forever
    try:
        value = ir.SymbolicDim(text).evaluate(symbols)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if isinstance(value, int) else None
