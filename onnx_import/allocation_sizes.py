"""Estimates what an imported graph takes before it runs: bytes of values with static sizes, and endless loops.

A file of a few hundred bytes can ask for any amount of memory or time. Only what holds for every input is counted here,
so that nothing is refused wrongly; a run has limits of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from layerline.backends.light import weightless
from layerline.graph.analysis.ir_queries import first_output, names, optional_input, reads, stored_tensor, subgraphs
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.errors import StageError

MOST_ROUNDS = 10**9
"""Most rounds of a Loop whose condition never ends it: at a microsecond each, a quarter of an hour."""
_FAILS = (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError, onnx.checker.ValidationError)


def refuse_unbounded(model: ir.Model, limit: int, hint: str) -> None:
    """Refuses, before anything runs, what would take memory or time without an end."""
    refuse_endless(model)
    refuse_large(model, limit, hint)


def refuse_large(model: ir.Model, limit: int, hint: str) -> None:
    """Refuses a graph whose values can't be held in `limit` bytes, with sizes that are open taken as 1.

    Raises StageError: names the largest values that are alive together. `hint` says what sets the limit.
    """
    try:
        # Not with data propagation: that writes the values of a ConstantOfShape out, 2^31 of them in hours.
        inferred = onnx.shape_inference.infer_shapes(weightless(model))
    except _FAILS:
        return  # the runtime explains what is wrong with the model, and runs it within the same limit
    for graph in as_ir(inferred).graphs():
        sizes = _sizes(graph)
        alive, total = _most(graph, sizes)
        if total <= limit:
            continue
        largest = sorted(alive, key=sizes.__getitem__, reverse=True)[:3]
        makers = {name: node for node in graph for name in names(node.outputs)}
        listed = ", ".join(f"{makers[value].op_type} {value} of {_gigabytes(sizes[value])}" for value in largest)
        if len(alive) > 3:
            listed += f" and {len(alive) - 3} more"
        what = f"it holds {_gigabytes(total)} at once for any input, and may take {_gigabytes(limit)}: {listed}"
        raise StageError(what, where=f"node {makers[largest[0]].name or makers[largest[0]].op_type}", hint=hint)


def refuse_endless(model: ir.Model) -> None:
    """Refuses a Loop that no input can end. Raises StageError: names it and its number of rounds."""
    for node, rounds in loops(model):
        if (rounds is None or rounds > MOST_ROUNDS) and _never_ends(node):
            count = "without an end" if rounds is None else f"{rounds} rounds"
            raise StageError(
                f"it runs {count}: its condition is always true", where=f"node {node.name or first_output(node)}",
                hint=f"{MOST_ROUNDS} rounds are the most that a Loop without a condition may have",
            )  # fmt: skip


def loops(model: ir.Model) -> Iterator[tuple[ir.Node, int | None]]:
    """Every Loop, with its greatest number of rounds; None where that isn't known."""
    for node in model.graph.all_nodes():
        if node.op_type == "Loop":
            yield node, _number(optional_input(node, 0))


def described_loops(model: ir.Model) -> list[str]:
    """The first loops in words, for the error of a run that has to be ended."""
    described = []
    for node, rounds in list(loops(model))[:3]:
        count = "an unknown number of" if rounds is None else f"up to {rounds}"
        described.append(f"its Loop node {node.name or first_output(node)} runs {count} rounds")
    return described


def _never_ends(node: ir.Node) -> bool:
    """Whether the condition of a Loop is true at the start, and its body always leaves it true."""
    body = next(iter(subgraphs(node)), None)
    if body is None or not body.outputs:
        return False
    start = optional_input(node, 1)
    if start is not None and _number(start) is not True:
        return False
    count = optional_input(node, 0)
    if count is not None and _number(count) is None:
        return False  # the number of rounds is computed
    # Exporters put these between, where the condition is passed on.
    condition: ir.Value | None = body.outputs[0]
    maker = body.outputs[0].producer()
    while maker is not None and maker.op_type in ("Identity", "Cast"):
        condition = maker.inputs[0]
        maker = None if condition is None else condition.producer()
    # The body's second input is the condition of the round before.
    passed_on = len(body.inputs) > 1 and condition is body.inputs[1]
    return passed_on or _number(condition) is True


def _number(value: ir.Value | None) -> int | bool | None:
    """The one number that a value holds in every run: a bool for a bool."""
    tensor = stored_tensor(value)
    if tensor is None or tensor.size != 1 or isinstance(tensor, ir.ExternalTensor):
        return None
    number = tensor.numpy().reshape(()).item()
    if isinstance(number, bool):
        return number
    return int(number)


def _sizes(graph: ir.Graph) -> dict[str, int]:
    """Least bytes of every value that a node of this graph computes, by its static type."""
    sizes: dict[str, int] = {}
    for node in graph:
        if node.op_type != "Constant":
            sizes.update((value.name, _bytes(value)) for value in node.outputs if value.name)
    return sizes


def _bytes(value: ir.Value) -> int:
    dtype = value.dtype
    if value.shape is None or not isinstance(value.type, ir.TensorType) or dtype is None:
        return 0
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        return 0
    count: int = dtype.numpy().itemsize
    for size in value.shape:
        # An open size is at least 1.
        if isinstance(size, int):
            count *= max(size, 1)
    return count


def _most(graph: ir.Graph, sizes: dict[str, int]) -> tuple[list[str], int]:
    """The values that are alive together where they take most, and their bytes. Each lives until its last reader."""
    # Outputs live to the end.
    last_use = dict.fromkeys(names(graph.outputs), len(graph))
    for index, node in enumerate(graph):
        for name in names(reads(node)):
            last_use[name] = max(last_use.get(name, index), index)
    freed_after: dict[int, list[str]] = {}
    # A dict for its order: equal sizes are listed as they were computed.
    alive: dict[str, None] = {}
    total = most = 0
    alive_at_most: list[str] = []
    # While a node runs, what it reads and what it writes are there at once: values are freed behind it.
    for index, node in enumerate(graph):
        for name in names(node.outputs):
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
