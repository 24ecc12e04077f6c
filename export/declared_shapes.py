"""The shapes that a graph declares for its inner values, put right by what they are on real feeds.

A runtime plans its memory by them: two values that are declared to have one size share a buffer. Where a shape is
wrong, the model fails at some sizes, or at all but one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime

_SHAPE = "shape of "

Shapes = Mapping[str, Sequence[int]]
"""Sizes of values on one feed, by name."""


def watching(light: Light, taps: Iterable[str]) -> Light:
    """The model with the shape of every inner value as one more output, but for the values in `taps`."""
    watched = light.copy()
    graph = watched.model.graph
    without = {*taps, *(o.name for o in graph.output)}
    declared = {v.name for v in graph.value_info if v.type.tensor_type.shape.dim} - without
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        for value in (o for o in node.output if o in declared):
            # Taken right where it is made: at the end, every value would have to live until then.
            graph.node.append(helper.make_node("Shape", [value], [_SHAPE + value]))
            graph.output.append(helper.make_empty_tensor_value_info(_SHAPE + value))
    return watched


def shapes(found: Mapping[str, Array]) -> dict[str, Sequence[int]]:
    """Sizes of every value among the outputs of such a model."""
    told = {n.removeprefix(_SHAPE): a.tolist() for n, a in found.items() if n.startswith(_SHAPE)}
    return {n: a.shape for n, a in found.items() if not n.startswith(_SHAPE) and hasattr(a, "shape")} | told


def without_shapes(found: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of such a model that the model itself has."""
    return {n: a for n, a in found.items() if not n.startswith(_SHAPE)}


def measured(light: Light, feeds: Iterable[Feed]) -> list[tuple[Feed, Shapes]]:
    """The feeds, each with the sizes of every inner value on it."""
    session = OnnxRuntime(few_runs=True).open(watching(light, ()))
    return [(feed, shapes(session.run(feed))) for feed in feeds]


def correct(model: onnx.ModelProto, runs: Sequence[tuple[Feed, Shapes]]) -> list[str]:
    """Gives every declared size of an inner value that is another on a feed a name of its own, in place.

    A name that no other size has lets a runtime assume nothing; leaving the size out would let it infer one, and its
    inference may be what was wrong in the first place.

    Returns:
        The values whose shape was wrong.
    """
    symbols = [_symbols(model, feed) for feed, _ in runs]
    wrong: list[str] = []
    for info in model.graph.value_info:
        seen = [(known, list(found[info.name])) for known, (_, found) in zip(symbols, runs, strict=True)
                if info.name in found]  # fmt: skip
        shape = info.type.tensor_type.shape
        if not seen or not info.type.tensor_type.HasField("shape"):
            continue
        if any(len(sizes) != len(shape.dim) for _, sizes in seen):
            info.type.tensor_type.ClearField("shape")
            wrong.append(info.name)
            continue
        off = [a for a, dim in enumerate(shape.dim) if any(not _may_be(dim, s[a], known) for known, s in seen)]
        for axis in off:
            shape.dim[axis].dim_param = f"{info.name}#{axis}"
        wrong += [info.name] * bool(off)
    return wrong


def _symbols(model: onnx.ModelProto, feed: Feed) -> dict[str, int]:
    """The size of every named dimension of the inputs."""
    named: dict[str, int] = {}
    for given in model.graph.input:
        dims = given.type.tensor_type.shape.dim
        if given.name in feed and len(dims) == feed[given.name].ndim:
            named |= {d.dim_param: s for d, s in zip(dims, feed[given.name].shape, strict=True) if d.dim_param}
    return named


def _may_be(dim: onnx.TensorShapeProto.Dimension, size: int, symbols: dict[str, int]) -> bool:
    """Whether a declared size can be this one; a name that nothing is known of is what its first value says."""
    if dim.HasField("dim_value"):
        return bool(dim.dim_value == size)
    if not dim.dim_param:
        return True
    if dim.dim_param not in symbols:
        worked_out = _evaluate(dim.dim_param, symbols)
        symbols[dim.dim_param] = size if worked_out is None else worked_out
    return symbols[dim.dim_param] == size


def _evaluate(text: str, symbols: Mapping[str, int]) -> int | None:
    """What a size such as `2*t + 1` is; None where it is no such sum. Nothing of it is run as code."""
    try:
        return _value(ast.parse(text, mode="eval").body, symbols)
    except (SyntaxError, KeyError, ValueError, RecursionError, ZeroDivisionError):
        return None


def _value(node: ast.AST, symbols: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, symbols)
        case ast.BinOp(left=left, right=right):
            a, b = _value(left, symbols), _value(right, symbols)
    match getattr(node, "op", None):
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
    raise ValueError("not a sum, a product or a quotient")
