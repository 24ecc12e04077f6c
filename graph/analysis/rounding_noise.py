"""How far rounding alone can move each value of a model: the floor under every error that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from layerline.backends.base import Array
from layerline.backends.light import Light, Model, all_nodes, split
from layerline.graph.analysis.ir_queries import RANDOM
from layerline.graph.analysis.proto_queries import stored

# Operators whose stored floats are weights. Elsewhere a float may be a size (Resize scales), a bound or a switch, where
# one rounding step more is another program and not noise.
_WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "PRelu", "LSTM", "GRU", "RNN", "Gather"}
    | {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"}
)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
_SHIFTED = "layerline rounding step of "


def perturbed(model: Model, seed: int = 0) -> Light:
    """A copy in which every weight and float input is moved by one step of its type, weights up or down at random.

    What a value of the copy differs by is what rounding may do to it, to within a small factor: its noise floor.
    """
    out = split(model).copy()
    graph = out.model.graph
    rng = np.random.default_rng(seed)
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    for name, tensor in stored(graph):
        if tensor.data_type in _FLOATS and readers.get(name, set()) <= _WEIGHTED:
            # The name of a Constant's tensor is not that of its value.
            tensor.CopyFrom(numpy_helper.from_array(_step(numpy_helper.to_array(tensor), rng), tensor.name))
    for index, (name, weight) in enumerate(out.weights.items()):
        if weight.dtype in _FLOATS and readers.get(name, set()) <= _WEIGHTED:
            moved = partial(_moved, weight, (seed, index))
            out.weights[name] = ir.LazyTensor(
                moved, weight.dtype, ir.Shape(weight.shape.numpy()), cache=True, name=name
            )
    _shift_inputs(out)
    return out


def drawn(model: onnx.ModelProto) -> dict[str, str]:
    """Values of the main graph that depend on a random operator, each with that operator's name."""
    operators: dict[str, str] = {}
    # False throughout: as the training_mode of a Dropout, such a tensor never drops.
    booleans = [(name, tensor) for name, tensor in stored(model.graph) if tensor.data_type == onnx.TensorProto.BOOL]
    off_switches = {name for name, tensor in booleans if not numpy_helper.to_array(tensor).any()}
    for node in model.graph.node:
        operator = _random_inside(node, off_switches)
        for name in node.input:
            operator = operator or operators.get(name)
        if operator is not None:
            operators.update(dict.fromkeys(node.output, operator))
    return operators


def random_note(random: Mapping[str, str]) -> list[str]:
    """One note for all values that are drawn, as `drawn` finds them: a report's rows show which values follow."""
    return [f"{value} and what follows is drawn at random ({op}): not judged" for value, op in list(random.items())[:1]]


def unjudged(graph: onnx.GraphProto, random: Mapping[str, str]) -> dict[str, str]:
    """A report's figure for what nobody could compare, the outputs before all: an untested one must not pass for equal.

    `random` are the values that are drawn, each with the operator, as `drawn` finds them.
    """
    if not random:
        return {}
    outputs = [output.name for output in graph.output if output.name in random]
    if outputs:
        which = f"output {', '.join(outputs)}"
        operator = random[outputs[0]]
    else:
        which = f"{len(random)} inner values"
        operator = next(iter(random.values()))
    return {"not_judged": f"{which}: random ({operator})"}


def _moved(weight: ir.TensorProtocol, seed: tuple[int, int]) -> ir.TensorProtocol:
    return ir.Tensor(_step(weight.numpy(), np.random.default_rng(seed)))


def _step(array: Array, rng: np.random.Generator) -> Array:
    up = array.dtype.type(np.inf)
    # One draw an element, in order: the seed gives the same copy in every version.
    towards = np.where(rng.integers(0, 2, array.shape, dtype=np.bool_), up, -up)
    with np.errstate(over="ignore"):
        moved = np.nextafter(array, towards)
    # Zeros are structure, and the greatest finite number is a mask: neither is rounded.
    is_exact = (array == 0) | ~(np.abs(array) < np.finfo(array.dtype).max)
    return np.where(is_exact, array, moved)


def _shift_inputs(light: Light) -> None:
    graph = light.model.graph
    for fed in light.fed:
        kind = fed.type.tensor_type.elem_type
        if kind not in _FLOATS:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        shifted = _SHIFTED + fed.name
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name == fed.name:
                    node.input[index] = shifted
        # One step of the type upwards: inputs are real numbers that were rounded as well.
        factor = np.array(1 + np.finfo(dtype).eps, dtype)
        graph.initializer.append(numpy_helper.from_array(factor, f"{shifted} factor"))
        graph.node.insert(0, helper.make_node("Mul", [fed.name, f"{shifted} factor"], [shifted]))


def _random_inside(node: onnx.NodeProto, off_switches: set[str]) -> str | None:
    """The random operator that a node is, or holds in a body; None where there is none."""
    for inner in all_nodes([node]):
        drops = inner.op_type == "Dropout" and len(inner.input) > 2 and inner.input[2] not in {"", *off_switches}
        if inner.op_type in RANDOM or drops:
            return str(inner.op_type)
    return None
