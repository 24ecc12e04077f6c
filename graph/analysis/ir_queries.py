"""Questions asked of a graph: who reads a value, what a body captures, what a constant holds, which name is free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]
ShapeLike = ir.Shape | tuple[int | str, ...]


LIMITS: dict[ir.DataType, tuple[float, float]] = {}
"""Of the types that graphs compute in: the largest number, and the distance from 1 to the next one."""
for _kind in (ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
    _info = ml_dtypes.finfo(_kind.numpy())  # type: ignore[no-untyped-call]
    LIMITS[_kind] = (float(_info.max), float(_info.eps))

# Each run gives other numbers, so none of these may ever become a constant or be merged with its like.
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)

# Operators of several inputs that stretch them to a common shape.
BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater"}
    | {"GreaterOrEqual", "Max", "Min"}
)


def is_random(node: ir.Node) -> bool:
    """Whether two runs of the node may differ."""
    return node.op_type in RANDOM or (node.op_type == "Dropout" and trains(node))


def trains(dropout: ir.Node) -> bool:
    """Whether a Dropout may drop: its training_mode input (opset 12) is anything but a constant false."""
    if len(dropout.inputs) < 3 or dropout.inputs[2] is None:
        return False
    mode = constant(dropout.inputs[2])
    return mode is None or bool(mode.any())


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a control-flow node, in order of its attributes."""
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            bodies.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies += attribute.as_graphs()
    return bodies


def captures(node: ir.Node) -> list[ir.Value]:
    """Values from outside that the bodies of a node read, each once."""
    inner: set[ir.Value] = set()
    read: dict[ir.Value, None] = {}
    for graph in subgraphs(node):
        for body in (graph, *graph.subgraphs()):
            inner.update(graph_values(body))
            for reader in body:
                read.update((value, None) for value in reader.inputs if value is not None)
            read.update(dict.fromkeys(body.outputs))
    return [value for value in read if value not in inner]


def graph_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value of one graph: inputs, stored tensors, outputs of nodes; those of bodies are not among them."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def values_by_name(graph: ir.Graph) -> dict[str | None, ir.Value]:
    """Every value of one graph, by its name."""
    return {value.name: value for value in graph_values(graph)}


def names(values: Iterable[ir.Value | None]) -> list[str]:
    """Names of values, without those that are left out or have none."""
    return [value.name for value in values if value is not None and value.name]


def may_be_equal(a: ShapeLike | None, b: ShapeLike | None) -> bool:
    """Whether two shapes can be the same. Exporters give equal sizes different symbols, so only numbers differ."""
    if a is None or b is None:
        return True
    if len(a) != len(b):
        return False
    for size_a, size_b in zip(a, b, strict=True):
        if isinstance(size_a, int) and isinstance(size_b, int) and size_a != size_b:
            return False
    return True


def copied(model: ir.Model) -> ir.Model:
    """A copy to change; tensors are shared.

    Its values have types of their own: onnx_ir's clones share them, and setting a value's dtype changes the type.
    """
    out = model.clone()
    for graph in out.graphs():
        for value in graph_values(graph):
            if isinstance(value.type, ir.TensorType):
                value.type = ir.TensorType(value.type.dtype, denotation=value.type.denotation)
    return out


def first_output(node: ir.Node) -> str:
    """The identity of a node: the name of its first output that has one."""
    return next(iter(names(node.outputs)), "")


def node_label(node: ir.Node) -> str:
    """What a message calls a node: its name, or else its operator and first output."""
    return node.name or f"{node.op_type} of {first_output(node) or 'nothing'}"


def fed(model: ir.Model) -> list[ir.Value]:
    """The inputs that have to be fed. Files before ONNX IR 4 list their initializers as inputs, too."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def reads(node: ir.Node) -> list[ir.Value]:
    """Values that a node reads, those that its bodies take from outside among them."""
    return [value for value in node.inputs if value is not None] + captures(node)


def stored(graph: ir.Graph) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Name and tensor of everything stored in one graph, Constant nodes included."""
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            yield name, value.const_value
    for node in graph:
        tensor = constant_tensor(node)
        if tensor is not None:
            yield first_output(node), tensor


def stored_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor that a value is, as an initializer or the output of a Constant; None for any other value."""
    if value is None:
        return None
    maker = value.producer()
    return value.const_value if maker is None else constant_tensor(maker)


def model_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node: of the main graph, of bodies and of functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def moving(graph: ir.Graph) -> set[str]:
    """Values that may differ from run to run: what is computed from inputs, or drawn at random."""
    changing = {value for value in graph.inputs if not value.is_initializer()}
    for node in graph:
        # A body may draw at random as well, so no control flow counts as constant.
        is_random = node.op_type in RANDOM | {"Dropout"} or bool(subgraphs(node))
        if is_random or not changing.isdisjoint(reads(node)):
            changing.update(node.outputs)
    return set(names(changing))


def constant(value: ir.Value | None) -> Array | None:
    """The numbers of a value known before any run: an initializer, a Constant, or either behind Identity and Cast."""
    passed: dict[ir.Node, None] = {}
    # Not by recursion: a file may hold a chain of any length, and an invalid one may be cyclic.
    while value is not None:
        node = value.producer()
        # On the output of a node const_value is a hint that a pass left; the node itself says what it holds.
        tensor = value.const_value
        if node is not None:
            if node.domain != "":
                return None
            if node.op_type in ("Identity", "Cast"):
                if node in passed:
                    return None
                passed[node] = None
                value = node.inputs[0]
                continue
            tensor = constant_tensor(node)
        if tensor is None:
            return None
        array: Array = tensor.numpy()
        casts = [outer for outer in reversed(passed) if outer.op_type == "Cast"]
        for cast in casts:
            target = np.dtype(ir.DataType(cast.attributes.get_int("to", 0)).numpy())
            # Only floating-point widening is exact in every runtime; anything else is left to constant folding.
            if array.dtype.kind != "f" or target.kind != "f" or target.itemsize < array.itemsize:
                return None
            array = array.astype(target)
        return array
    return None


def constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant node holds; None for other nodes, strings, sparse tensors and attributes of a function."""
    # A Constant has its value in one of several attributes, by type.
    if node.op_type != "Constant" or len(node.attributes) != 1:
        return None
    [attribute] = node.attributes.values()
    if attribute.is_ref():
        return None
    if attribute.name == "value":
        return attribute.as_tensor()
    if attribute.name in ("value_int", "value_ints"):
        return ir.tensor(np.array(attribute.value, np.int64))
    if attribute.name in ("value_float", "value_floats"):
        return ir.tensor(np.array(attribute.value, np.float32))
    return None


def parent(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node that computes a value (as its first output), where it is one of the given operators."""
    if value is None:
        return None
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in ops or node.outputs[0] is not value:
        return None
    return node


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """An input of a node; None where it is left out, at the end or in between."""
    return None if index >= len(node.inputs) else node.inputs[index]


def clip_bounds(clip: ir.Node) -> tuple[float | None, float | None]:
    """Both bounds of a Clip: the upper one wins where it is below the lower one; None for one that is computed."""
    low: float | None = -math.inf
    high: float | None = math.inf
    if optional_input(clip, 1) is not None:
        low = scalar(clip.inputs[1])
    if optional_input(clip, 2) is not None:
        high = scalar(clip.inputs[2])
    return low, high


def reduced_axes(node: ir.Node) -> Array | None:
    """The axes that a reduction names; None where they are computed or left out."""
    # From opset 18 on, and in ReduceSum from 13, they are an input.
    if optional_input(node, 1) is not None:
        return constant(node.inputs[1])
    if "axes" not in node.attributes:
        return None
    return np.array(node.attributes.get_ints("axes"))


def name_of(value: ir.Value | None) -> str | None:
    """The name of a value that may be left out."""
    return None if value is None else value.name


def scalar(value: ir.Value | None) -> float | None:
    """The one number of a constant that holds just one."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiuV":
        return None
    return float(array.reshape(-1)[0])


def rank(value: ir.Value | None) -> int | None:
    """Number of dimensions, where known."""
    return None if value is None or value.shape is None else len(value.shape)


def dim(value: ir.Value | None, axis: int) -> int | str | None:
    """Size of one axis: a number, the name of a symbolic size, or None."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else size.value


def static(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape, where every axis has a known number."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def fresh_name(wanted: str, taken: set[str]) -> str:
    """Returns the first of `wanted`, `wanted_2`, `wanted_3`, … that is not in `taken`, and adds it there."""
    name = wanted
    number = 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


class FreshNames:
    """The names of a model's values and nodes, of which no two graphs may share one; gives out only free ones."""

    def __init__(self, model: ir.Model) -> None:
        self._taken = value_names(model) | node_names(model)

    def fresh(self, name: str) -> str:
        """`name`, or the first of `name_2`, `name_3`, … that is free."""
        return fresh_name(name, self._taken)


def add_initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Stores an array in a graph under a name that is free."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def value_names(model: ir.Model) -> set[str]:
    """Names of all values of a model, bodies included."""
    names: set[str] = set()
    for graph in model.graphs():
        names.update(value.name for value in graph_values(graph) if value.name is not None)
    return names


def node_names(model: ir.Model) -> set[str]:
    """Names of all nodes of a model, bodies included."""
    names: set[str] = set()
    for graph in model.graphs():
        names.update(node.name for node in graph if node.name is not None)
    return names
