"""How far rounding alone can move each value of a model: the floor under every error that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array
from layerline.backends.light import large
from layerline.graph.analysis.ir_queries import RANDOM, add_initializer, copied, fed, names, stored, subgraphs

# Operators whose stored floats are weights. Elsewhere a float may be a size (Resize scales), a bound or a switch, where
# one rounding step more is another program and not noise.
_WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "PRelu", "LSTM", "GRU", "RNN", "Gather"}
    | {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"}
)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_SHIFTED = "layerline rounding step of "


def perturbed(model: ir.Model, seed: int = 0) -> ir.Model:
    """A copy in which every weight and float input is moved by one step of its type, weights up or down at random.

    What a value of the copy differs by is what rounding may do to it, to within a small factor: its noise floor.
    """
    out = copied(model)
    graph = out.graph
    rng = np.random.default_rng(seed)
    large_weights: list[ir.Value] = []
    # One generator for all small tensors, in order, and one for each large one, which is moved when it is read.
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in _FLOATS or not _is_weight(value):
            continue
        if large(tensor.dtype, tensor.nbytes):
            large_weights.append(value)
        else:
            value.const_value = ir.tensor(_step(tensor.numpy(), rng), name=value.name)
    for node in graph:
        constant = node.attributes.get("value")
        if node.op_type == "Constant" and constant is not None and _is_weight(node.outputs[0]):
            tensor = constant.as_tensor()
            if tensor.dtype in _FLOATS:
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_step(tensor.numpy(), rng)))
    for index, value in enumerate(large_weights):
        tensor = value.const_value
        assert tensor is not None
        moved = partial(_moved, tensor, (seed, index))
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.LazyTensor(moved, tensor.dtype, shape, cache=True, name=value.name)
    _shift_inputs(out)
    return out


def _is_weight(value: ir.Value) -> bool:
    # What bodies read is passed over: a reader there may be any operator.
    return all(use.node.op_type in _WEIGHTED for use in value.uses() if use.node.graph is value.graph)


def drawn(model: ir.Model) -> dict[str, str]:
    """Values of the main graph that depend on a random operator, each with that operator's name."""
    operators: dict[str, str] = {}
    # False throughout: as the training_mode of a Dropout, such a tensor never drops.
    booleans = [(name, tensor) for name, tensor in stored(model.graph) if tensor.dtype == ir.DataType.BOOL]
    off_switches = {name for name, tensor in booleans if not tensor.numpy().any()}
    for node in model.graph:
        operator = _random_inside(node, off_switches)
        for name in names(node.inputs):
            operator = operator or operators.get(name)
        if operator is not None:
            operators.update(dict.fromkeys(names(node.outputs), operator))
    return operators


def random_note(random: Mapping[str, str]) -> list[str]:
    """One note for all values that are drawn, as `drawn` finds them: a report's rows show which values follow."""
    return [f"{value} and what follows is drawn at random ({op}): not judged" for value, op in list(random.items())[:1]]


def unjudged(graph: ir.Graph, random: Mapping[str, str]) -> dict[str, str]:
    """A report's figure for what nobody could compare (`random`, as `drawn` finds it), the outputs before all.

    An untested one must not pass for equal.
    """
    if not random:
        return {}
    outputs = [name for name in names(graph.outputs) if name in random]
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


def _shift_inputs(model: ir.Model) -> None:
    graph = model.graph
    for value in fed(model):
        if value.dtype not in _FLOATS or value.dtype is None:
            continue
        shifted = f"{_SHIFTED}{value.name}"
        readers = [use for use in value.uses() if use.node.graph is graph]
        if not readers:
            continue
        dtype = value.dtype.numpy()
        # One step of the type upwards: inputs are real numbers that were rounded as well.
        factor = add_initializer(graph, f"{shifted} factor", np.array(1 + np.finfo(dtype).eps, dtype))
        mul = ir.node("Mul", [value, factor], name="")
        mul.outputs[0].name = shifted
        graph.insert_before(graph[0], mul)
        for node, index in readers:
            node.replace_input_with(index, mul.outputs[0])


def _random_inside(node: ir.Node, off_switches: set[str]) -> str | None:
    """The random operator that a node is, or holds in a body; None where there is none."""
    nodes = [node]
    for body in subgraphs(node):
        nodes += body.all_nodes()
    for inner in nodes:
        switch = names(inner.inputs[2:3])
        drops = inner.op_type == "Dropout" and bool(switch) and switch[0] not in off_switches
        if inner.op_type in RANDOM or drops:
            return inner.op_type
    return None
