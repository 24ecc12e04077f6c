"""Estimates what an imported graph takes before it runs: bytes of values with static sizes, and endless loops.

A file of a few hundred bytes can ask for any amount of memory or time. Only what holds for every input is counted here,
so that nothing is refused wrongly; a run has limits of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper, numpy_helper

from layerline.backends.light import Light, bodies, reads, weightless
from layerline.graph.analysis.proto_queries import stored
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError

MOST_ROUNDS = 10**9
"""Most rounds of a Loop whose condition never ends it: at a microsecond each, a quarter of an hour."""
_FAILS = (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError, onnx.checker.ValidationError)


def refuse_large(light: Light, limit: int, hint: str) -> None:
    """Refuses a graph whose values can't be held, with sizes that are open taken as 1.

    Args:
        limit: bytes that may be alive at once.
        hint: where the limit is set.

    Raises:
        StageError: names the largest values that are alive together, and their sizes.
    """
    try:
        # Not with data propagation: that writes the values of a ConstantOfShape out, 2^31 of them in hours.
        inferred = onnx.shape_inference.infer_shapes(weightless(light))
    except _FAILS:
        return  # the runtime explains what is wrong with the model, and runs it within the same limit
    for graph in onnx_files.graphs(inferred):
        sizes = _sizes(graph)
        alive, total = _most(graph, sizes)
        if total <= limit:
            continue
        largest = sorted(alive, key=sizes.__getitem__, reverse=True)[:3]
        makers = _makers(graph)
        listed = ", ".join(f"{makers[value].op_type} {value} of {_gigabytes(sizes[value])}" for value in largest)
        if len(alive) > 3:
            listed += f" and {len(alive) - 3} more"
        raise StageError(
            f"it holds {_gigabytes(total)} at once for any input, and may take {_gigabytes(limit)}: {listed}",
            where=f"node {makers[largest[0]].name or makers[largest[0]].op_type}",
            hint=hint,
        )


def refuse_endless(light: Light) -> None:
    """Refuses a Loop that no input can end. Raises StageError: names it and its number of rounds."""
    for node, rounds in loops(light.model):
        if (rounds is None or rounds > MOST_ROUNDS) and _never_ends(node, light.model.graph):
            count = "without an end" if rounds is None else f"{rounds} rounds"
            raise StageError(
                f"it runs {count}: its condition is always true", where=f"node {node.name or node.output[0]}",
                hint=f"{MOST_ROUNDS} rounds are the most that a Loop without a condition may have",
            )  # fmt: skip


def loops(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, int | None]]:
    """Every Loop, with its greatest number of rounds; None where that isn't known."""
    for graph in onnx_files.graphs(model):
        constants = {**dict(stored(model.graph)), **dict(stored(graph))}
        for node in graph.node:
            if node.op_type != "Loop":
                continue
            rounds = None
            if node.input and node.input[0] in constants:
                rounds = _number(constants[node.input[0]])
            yield node, rounds


def described_loops(model: onnx.ModelProto) -> list[str]:
    """The first loops in words, for the error of a run that has to be ended."""
    described = []
    for node, rounds in list(loops(model))[:3]:
        count = "an unknown number of" if rounds is None else f"up to {rounds}"
        described.append(f"its Loop node {node.name or node.output[0]} runs {count} rounds")
    return described


def _makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The node that computes each value."""
    makers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        for output in node.output:
            makers[output] = node
    return makers


def _never_ends(node: onnx.NodeProto, outer: onnx.GraphProto) -> bool:
    """Whether the condition of a Loop is true at the start, and its body always leaves it true."""
    body = next(iter(bodies(node)), None)
    if body is None or not body.output:
        return False
    constants = {**dict(stored(outer)), **dict(stored(body))}
    start = node.input[1] if len(node.input) > 1 else ""
    if start and not _is_true(constants.get(start)):
        return False
    if len(node.input) > 0 and node.input[0] and node.input[0] not in constants:
        return False  # the number of rounds is computed
    makers = _makers(body)
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    # The body's second input is the condition of the round before.
    passed_on = len(body.input) > 1 and name == body.input[1].name
    return passed_on or _is_true(constants.get(name))


def _is_true(tensor: TensorProto | None) -> bool:
    return tensor is not None and tensor.data_type == TensorProto.BOOL and _number(tensor) == 1


def _number(tensor: TensorProto) -> int | None:
    if math.prod(tensor.dims) != 1 or tensor.data_location == TensorProto.EXTERNAL:
        return None
    return int(numpy_helper.to_array(tensor).reshape(()))


def _sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Least bytes of every value that a node of this graph computes, by its static type."""
    computed: set[str] = set()
    for node in graph.node:
        if node.op_type != "Constant":
            computed.update(node.output)
    return {info.name: _bytes(info) for info in (*graph.value_info, *graph.output) if info.name in computed}


def _bytes(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    if not kind.HasField("shape") or kind.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    try:
        width: int = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    except KeyError:
        return 0
    # An open size has the value 0, and is at least 1.
    elements: int = math.prod(max(dim.dim_value, 1) for dim in kind.shape.dim)
    return width * elements


def _most(graph: onnx.GraphProto, sizes: dict[str, int]) -> tuple[list[str], int]:
    """The values that are alive together where they take most, and their bytes. Each lives until its last reader."""
    last_use = {output.name: len(graph.node) for output in graph.output}
    for index, node in enumerate(graph.node):
        read = list(node.input)
        for body in bodies(node):
            read += reads(body)
        for name in read:
            last_use[name] = max(last_use.get(name, index), index)
    freed_after: dict[int, list[str]] = {}
    # A dict for its order: equal sizes are listed as they were computed.
    alive: dict[str, None] = {}
    total = most = 0
    alive_at_most: list[str] = []
    for index, node in enumerate(graph.node):
        for name in node.output:
            if sizes.get(name, 0):
                alive[name] = None
                total += sizes[name]
                freed_after.setdefault(last_use.get(name, index), []).append(name)
        if total > most:
            most = total
            alive_at_most = list(alive)
        for name in freed_after.pop(index, []):
            del alive[name]
            total -= sizes[name]
    return alive_at_most, most


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
