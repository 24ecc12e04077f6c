"""How far rounding alone can move each value of a model: the floor under every error that is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import onnx
from onnx import helper, numpy_helper

from layerline.backends.base import Array
from layerline.backends.light import Light, Model, Weight, bodies, split
from layerline.graph.analysis.ir_queries import RANDOM

# Operators whose stored floats are weights. Elsewhere a float may be a size (Resize scales), a bound or a switch, where
# one rounding step more is another program and not noise.
_WEIGHTED = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "BatchNormalization",
        "InstanceNormalization",
    }
    | {"LayerNormalization", "GroupNormalization", "RMSNormalization", "PRelu", "LSTM", "GRU", "RNN", "Gather"}
)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
_SHIFTED = "layerline rounding step of "


def perturbed(model: Model, seed: int = 0) -> Light:
    """A copy in which every weight is moved by one step of its type, up or down at random, and every float input by
    one.

    What a value of the copy differs by is what rounding may do to it, to within a small factor: its noise floor.
    """
    out, rng = split(model).copy(), np.random.default_rng(seed)
    graph = out.model.graph
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    for name, tensor in stored(graph):
        if tensor.data_type in _FLOATS and readers.get(name, set()) <= _WEIGHTED:
            keep = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(_step(numpy_helper.to_array(tensor), rng), keep))
    for index, (name, weight) in enumerate(out.weights.items()):
        if weight.kind in _FLOATS and readers.get(name, set()) <= _WEIGHTED:
            out.weights[name] = Weight(weight.kind, weight.shape, partial(_moved, weight, (seed, index)))
    _shift_inputs(out)
    return out


def drawn(model: onnx.ModelProto) -> dict[str, str]:
    """Values of the main graph that depend on a random operator, each with that operator's name."""
    found: dict[str, str] = {}
    never = _false(model.graph)
    for node in model.graph.node:
        random = _random_inside(node, never) or next((found[v] for v in node.input if v in found), None)
        if random is not None:
            found.update(dict.fromkeys(node.output, random))
    return found


def unjudged(graph: onnx.GraphProto, random: Mapping[str, str]) -> dict[str, str]:
    """A report's figure for what nobody could compare, the outputs before all: an untested one must not pass for equal.

    Args:
        random: values that are drawn, each with the operator, as `drawn` finds them.
    """
    outputs = [o.name for o in graph.output if o.name in random]
    if not random:
        return {}
    which = f"output {', '.join(outputs)}" if outputs else f"{len(random)} inner values"
    return {"not_judged": f"{which}: random ({random[next(iter(outputs or random))]})"}


def _moved(weight: Weight, seed: tuple[int, int]) -> Array:
    array = weight.array.view(helper.tensor_dtype_to_np_dtype(weight.kind))
    return _step(array, np.random.default_rng(seed)).reshape(-1).view(weight.array.dtype)


def _step(array: Array, rng: np.random.Generator) -> Array:
    up = array.dtype.type(np.inf)
    towards = np.where(rng.integers(0, 2, array.shape, dtype=np.bool_), up, -up)
    with np.errstate(over="ignore"):
        moved = np.nextafter(array, towards)
    # Zeros are structure, and the greatest finite number is a mask: neither is rounded.
    return np.where((array == 0) | ~(np.abs(array) < np.finfo(array.dtype).max), array, moved)


def stored(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Name and tensor of everything stored in one graph, Constant nodes included."""
    yield from ((t.name, t) for t in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def _shift_inputs(light: Light) -> None:
    graph = light.model.graph
    for given in light.fed:
        kind = given.type.tensor_type.elem_type
        if kind not in _FLOATS:
            continue
        dtype, shifted = helper.tensor_dtype_to_np_dtype(kind), _SHIFTED + given.name
        for node in graph.node:
            node.input[:] = [shifted if v == given.name else v for v in node.input]
        factor = np.array(1 + np.finfo(dtype).eps, dtype)
        graph.initializer.append(numpy_helper.from_array(factor, f"{shifted} factor"))
        graph.node.insert(0, helper.make_node("Mul", [given.name, f"{shifted} factor"], [shifted]))


def _false(graph: onnx.GraphProto) -> set[str]:
    """Stored tensors that say no: the training_mode of a Dropout that never drops."""
    switches = {name: t for name, t in stored(graph) if t.data_type == onnx.TensorProto.BOOL}
    return {name for name, tensor in switches.items() if not numpy_helper.to_array(tensor).any()}


def _random_inside(node: onnx.NodeProto, never: set[str]) -> str | None:
    trains = node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] and node.input[2] not in never
    if node.op_type in RANDOM or trains:
        return str(node.op_type)
    return next((r for b in bodies(node) for n in b.node if (r := _random_inside(n, never))), None)
