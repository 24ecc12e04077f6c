"""Corrects the declared shapes of inner values by their shapes on real feeds.

A runtime plans its memory by declared shapes: two values that are declared to have one size share a buffer. If a shape
is wrong, the model fails at some sizes, or at all but one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx import helper

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import fresh_name
from layerline.graph.io import onnx_files

Shapes = Mapping[str, Sequence[int]]
"""Sizes of values on one feed, by name."""


def watching(light: Light, values: Collection[str]) -> tuple[Light, dict[str, str]]:
    """The model with the shape of these values as further outputs, and the value behind the name of each."""
    watched = light.copy()
    graph = watched.model.graph
    taken: set[str] = set()
    for inner in onnx_files.graphs(light.model):
        for node in inner.node:
            taken.update(node.output)
    value_of: dict[str, str] = {}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        for value in node.output:
            if value in values:
                name = fresh_name(f"shape of {value}", taken)
                value_of[name] = value
                # Taken right where it is made: at the end, every value would have to live until then.
                graph.node.append(helper.make_node("Shape", [value], [name]))
                graph.output.append(helper.make_empty_tensor_value_info(name))
    return watched, value_of


def declared(model: onnx.ModelProto, taps: Iterable[str] = ()) -> set[str]:
    """The inner values that the model declares a shape of; those in `taps` show theirs themselves."""
    inner = set[str]()
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        # onnxruntime has no Shape of float8 and smaller types.
        if kind.shape.dim and kind.elem_type < onnx.TensorProto.FLOAT8E4M3FN:
            inner.add(value.name)
    return inner - {*taps, *(o.name for o in model.graph.output)}


def shapes(outputs: Mapping[str, Array], value_of: Mapping[str, str]) -> dict[str, Sequence[int]]:
    """Sizes of every value among the outputs of such a model."""
    sizes: dict[str, Sequence[int]] = {}
    for name, array in outputs.items():
        if name in value_of:
            sizes[value_of[name]] = array.tolist()
        elif hasattr(array, "shape"):  # a sequence has none
            sizes[name] = array.shape
    return sizes


def measured(light: Light, feeds: Iterable[Feed]) -> list[tuple[Feed, Shapes]]:
    """The feeds, each with the sizes of every inner value on it."""
    watched, value_of = watching(light, declared(light.model))
    session = OnnxRuntime(few_runs=True).open(watched)
    return [(feed, shapes(session.run(feed), value_of)) for feed in feeds]


def correct(model: onnx.ModelProto, runs: Sequence[tuple[Feed, Shapes]]) -> list[str]:
    """Gives every wrongly declared size of an inner value a name of its own, in place.

    A unique name lets a runtime assume nothing. Without a name it would infer the size, and its inference may be what
    was wrong in the first place.

    Returns:
        The values whose shape was wrong.
    """
    runs_with_symbols = [(_symbols(model, feed), sizes_by_value) for feed, sizes_by_value in runs]
    wrong: list[str] = []
    for info in model.graph.value_info:
        shape = info.type.tensor_type.shape
        measured = [(symbols, sizes[info.name]) for symbols, sizes in runs_with_symbols if info.name in sizes]
        if not measured or not info.type.tensor_type.HasField("shape"):
            continue
        if any(len(sizes) != len(shape.dim) for _, sizes in measured):
            info.type.tensor_type.ClearField("shape")
            wrong.append(info.name)
            continue
        # All axes are checked before the first is renamed: a size may occur twice.
        wrong_axes: list[int] = []
        for axis, dim in enumerate(shape.dim):
            if not all(_may_be(dim, sizes[axis], symbols) for symbols, sizes in measured):
                wrong_axes.append(axis)
        for axis in wrong_axes:
            shape.dim[axis].dim_param = f"{info.name}#{axis}"
        if wrong_axes:
            wrong.append(info.name)
    return wrong


def _symbols(model: onnx.ModelProto, feed: Feed) -> dict[str, int]:
    """The size of every named dimension of the inputs."""
    symbols: dict[str, int] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        # A feed of another rank tells nothing about the names of its sizes.
        if value.name not in feed or len(dims) != feed[value.name].ndim:
            continue
        for dim, size in zip(dims, feed[value.name].shape, strict=True):
            if dim.dim_param:
                symbols[dim.dim_param] = size
    return symbols


def _may_be(dim: onnx.TensorShapeProto.Dimension, size: int, symbols: dict[str, int]) -> bool:
    """Whether a declared size can be this one. A name without a size gets the first size it is compared with."""
    if dim.HasField("dim_value"):
        return bool(dim.dim_value == size)
    if not dim.dim_param:
        return True
    if dim.dim_param not in symbols:
        computed = _evaluate(dim.dim_param, symbols)
        symbols[dim.dim_param] = size if computed is None else computed
    return symbols[dim.dim_param] == size


def _evaluate(text: str, symbols: Mapping[str, int]) -> int | None:
    """The value of a size such as `2*t + 1`; None for anything else. Nothing of the text is run as code."""
    if "**" in text or len(text) > 200:
        return None  # the text may be a stranger's, and 9**9**9 takes sympy forever
    try:
        value = ir.SymbolicDim(text).evaluate(symbols)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if isinstance(value, int) else None
