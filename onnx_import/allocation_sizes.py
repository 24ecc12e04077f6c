"""What a foreign graph will take before it is run: bytes of values whose sizes are written in it, loops without an end.

A file of a few hundred bytes can ask for any amount of memory or time. What depends on inputs shows at run time alone,
which has limits of its own; here only what holds for every input is counted, so that nothing is refused wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper, numpy_helper

from layerline.backends.light import Light, bodies, weightless
from layerline.graph.analysis.proto_queries import stored
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError

MOST_ROUNDS = 10**9
"""Rounds of a Loop that nothing ends before: at a microsecond each, a quarter of an hour."""
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
        return  # the runtime says what it has against the model, and runs it within the same limit
    for graph in onnx_files.graphs(inferred):
        sizes = _sizes(graph)
        alive, total = _most(graph, sizes)
        if total <= limit:
            continue
        largest = sorted(alive, key=sizes.__getitem__, reverse=True)[:3]
        makers = {o: n for n in graph.node for o in n.output}
        told = ", ".join(f"{makers[v].op_type} {v} of {_gigabytes(sizes[v])}" for v in largest)
        more = f" and {len(alive) - 3} more" if len(alive) > 3 else ""
        raise StageError(
            f"it holds {_gigabytes(total)} at once, whatever it is fed with, and may take {_gigabytes(limit)}: "
            f"{told}{more}",
            where=f"node {makers[largest[0]].name or makers[largest[0]].op_type}",
            hint=hint,
        )


def refuse_endless(light: Light) -> None:
    """Refuses a Loop that no input can end.

    Raises:
        StageError: names it and its number of rounds.
    """
    for node, rounds in loops(light.model):
        if (rounds is None or rounds > MOST_ROUNDS) and _never_ends(node, light.model.graph):
            told = "without an end" if rounds is None else f"{rounds} rounds"
            raise StageError(
                f"it runs {told}: its condition is always true", where=f"node {node.name or node.output[0]}",
                hint=f"{MOST_ROUNDS} rounds are the most that a Loop without a condition may have",
            )  # fmt: skip


def loops(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, int | None]]:
    """Every Loop, with its greatest number of rounds; None where that isn't known."""
    for graph in onnx_files.graphs(model):
        constants = {**dict(stored(model.graph)), **dict(stored(graph))}
        for node in graph.node:
            if node.op_type == "Loop":
                tensor = constants.get(node.input[0]) if node.input and node.input[0] else None
                yield node, None if tensor is None else _number(tensor)


def _never_ends(node: onnx.NodeProto, outer: onnx.GraphProto) -> bool:
    """Whether the condition of a Loop is true from the start on, and what its body gives for it as well."""
    body = next(iter(bodies(node)), None)
    if body is None or not body.output:
        return False
    constants = {**dict(stored(outer)), **dict(stored(body))}
    start = node.input[1] if len(node.input) > 1 else ""
    if start and not _is_true(constants.get(start)):
        return False
    if len(node.input) > 0 and node.input[0] and node.input[0] not in constants:
        return False  # the number of rounds is computed
    makers = {o: n for n in body.node for o in n.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    return (len(body.input) > 1 and name == body.input[1].name) or _is_true(constants.get(name))


def _is_true(tensor: TensorProto | None) -> bool:
    return tensor is not None and tensor.data_type == TensorProto.BOOL and _number(tensor) == 1


def _number(tensor: TensorProto) -> int | None:
    if math.prod(tensor.dims) != 1 or tensor.data_location == TensorProto.EXTERNAL:
        return None
    return int(numpy_helper.to_array(tensor).reshape(()))


def _sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Least bytes of every value that a node of this graph computes, by its static type."""
    computed = {o for n in graph.node if n.op_type != "Constant" for o in n.output}
    return {v.name: _bytes(v) for v in (*graph.value_info, *graph.output) if v.name in computed}


def _bytes(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    if not kind.HasField("shape") or kind.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    try:
        width: int = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    except KeyError:
        return 0
    elements: int = math.prod(d.dim_value if d.dim_value > 0 else 1 for d in kind.shape.dim)
    return width * elements


def _most(graph: onnx.GraphProto, sizes: dict[str, int]) -> tuple[list[str], int]:
    """The values that are alive together where they take most, and their bytes; each is from its node to its last
    reader."""
    last = {o.name: len(graph.node) for o in graph.output}
    for index, node in enumerate(graph.node):
        for name in (*node.input, *(r for b in bodies(node) for r in _read(b))):
            last[name] = max(last.get(name, index), index)
    ends: dict[int, list[str]] = {}
    alive, total, most, at = dict[str, None](), 0, 0, list[str]()
    for index, node in enumerate(graph.node):
        for name in node.output:
            if sizes.get(name, 0):
                alive[name] = None
                total += sizes[name]
                ends.setdefault(last.get(name, index), []).append(name)
        if total > most:
            most, at = total, list(alive)
        for name in ends.pop(index, []):
            del alive[name]
            total -= sizes[name]
    return at, most


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (o.name for o in graph.output)
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from _read(body)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
