"""Constant folding: whatever depends on constants alone is computed once, here, unless that makes the file much larger.

TensorRT needs it: axes of reductions, scales of Resize and the like must be stored tensors. Random operators are never
folded, nor QuantizeLinear and DequantizeLinear, which say how a weight is to be stored.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import Array, is_random, static, subgraphs
from layerline.graph.fusion.constant_folding import evaluate
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule
from layerline.pipeline.errors import StageError

KEPT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant"})
# The size of these results depends on the data, and never exceeds a small multiple of the input's.
DATA_SIZED = frozenset({"NonZero", "Unique", "Compress"})


def run(work: Rewriting) -> None:
    for graph in work.graphs():
        # Each wave makes constants out of shapes, which lets the next wave know its sizes.
        while _wave(graph, work):
            work.infer()


def _wave(graph: ir.Graph, work: Rewriting) -> bool:
    chosen: dict[ir.Node, None] = {}
    for node in graph:
        if _is_constant(node, chosen) and all(work.permits(RULE.name, o) for o in node.outputs):
            reason = next(filter(None, (_refusal(node, o, chosen, work) for o in node.outputs)), None)
            if reason is None:
                chosen[node] = None
            else:
                work.decline(RULE.name, node.outputs[0], reason)
    wanted = [
        v for n in chosen for v in n.outputs if v.is_graph_output() or any(u.node not in chosen for u in v.uses())
    ]
    wanted = _afforded(wanted, list(chosen), work)
    if not wanted:
        return False
    found = _evaluate(list(chosen), wanted, work)
    return sum(_replace(value, found[value.name or ""], work) for value in wanted if value.name in found) > 0


def _afforded(wanted: list[ir.Value], chosen: list[ir.Node], work: Rewriting) -> list[ir.Value]:
    """The values that may still be stored: together they may not add more than `fold_total` to the file."""
    afforded, freed = [], set[ir.Value]()
    for value in wanted:
        size, needed = _bytes(value) or 0, _needed(value, chosen)
        read = {v for n in needed for v in n.inputs if v is not None and v.const_value is not None} - freed
        gone = {v for v in read if all(u.node in chosen for u in v.uses())}
        added = max(size - sum(_bytes(v) or 0 for v in gone), 0)
        node = value.producer()
        if node is not None and node.op_type == "Cast" and gone:
            added = 0
        if added and work.folded + added > work.fold_total:
            work.decline(RULE.name, value, f"{value.name} would add {added} bytes to the file, and folded constants "
                         f"have added {work.folded} of {work.fold_total} already")  # fmt: skip
            continue
        work.folded += added
        freed |= gone
        afforded.append(value)
    return afforded


def _replace(value: ir.Value, array: Array, work: Rewriting) -> bool:
    # The runtime hands 8-bit floats and the like over as plain integers.
    if value.dtype is None or array.dtype != value.dtype.numpy():
        work.decline(RULE.name, value, f"{value.name} of type {value.dtype} doesn't come back from onnxruntime")
        return False
    return work.fold(RULE.name, value, ir.tensor(array))


def _is_constant(node: ir.Node, chosen: dict[ir.Node, None]) -> bool:
    if node.domain != "" or node.op_type in KEPT or is_random(node) or subgraphs(node):
        return False
    given = [v for v in node.inputs if v is not None]
    stored = all(v.producer() in chosen or (v.producer() is None and v.const_value is not None) for v in given)
    return stored and (bool(given) or node.op_type != "Constant")


def _refusal(node: ir.Node, output: ir.Value, chosen: dict[ir.Node, None], work: Rewriting) -> str | None:
    """Why a constant node stays; None when it may be folded."""
    if not isinstance(output.type, ir.TensorType) or output.dtype == ir.DataType.STRING:
        return f"{node.op_type} {output.name} gives {output.type}"
    freed = sum(
        _bytes(v) or 0
        for v in node.inputs
        if v is not None and all(u.node in chosen or u.node is node for u in v.uses())
    )
    size = _bytes(output)
    if size is None:
        return None if node.op_type in DATA_SIZED else f"size of {node.op_type} {output.name} is not known beforehand"
    # A weight behind a Cast must become a weight, though float32 takes twice the bytes of float16.
    added = 0 if node.op_type == "Cast" and freed else size - freed
    if added > work.fold_limit:
        return f"{node.op_type} {output.name} would add {added} bytes to the file (fold_limit: {work.fold_limit})"
    return None


def _bytes(value: ir.Value) -> int | None:
    if value.const_value is not None:
        return value.const_value.nbytes
    shape = static(value)
    return None if shape is None or value.dtype is None else math.ceil(math.prod(shape) * value.dtype.itemsize)


def _evaluate(nodes: list[ir.Node], wanted: list[ir.Value], work: Rewriting) -> dict[str, Array]:
    """All at once; when something fails, each value on its own, so that one odd operator costs only itself."""
    try:
        return evaluate(nodes, wanted, work.model)
    except StageError:
        found: dict[str, Array] = {}
    for value in wanted:
        try:
            found |= evaluate(_needed(value, nodes), [value], work.model)
        except StageError as error:
            work.decline(RULE.name, value, f"{value.name}: {error.what}")
    return found


def _needed(value: ir.Value, nodes: list[ir.Node]) -> list[ir.Node]:
    needed: set[ir.Node | None] = {value.producer()}
    for node in reversed(nodes):
        if node in needed:
            needed.update(v.producer() for v in node.inputs if v is not None)
    return [n for n in nodes if n in needed]


RULE = Rule("fold", "nodes that depend on constants alone computed once (never random ones; see fold_limit)", run)
