"""Constant folding: whatever depends on constants alone is computed once, here, unless that makes the file much larger.

TensorRT needs it: axes of reductions, scales of Resize and the like must be stored tensors. Random operators are never
folded, nor QuantizeLinear and DequantizeLinear, which say how a weight is to be stored.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import Array, is_random, static, subgraphs
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import everywhere
from layerline.pipeline.errors import StageError

KEPT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant"})
# The size of these results depends on the data, and never exceeds a small multiple of the input's.
DATA_SIZED = frozenset({"NonZero", "Unique", "Compress"})


@everywhere("fold")
def run(work: Rewriting) -> None:
    for graph in work.graphs():
        # Each wave makes constants out of shapes, which lets the next wave know its sizes.
        while _wave(graph, work):
            work.infer()


def _wave(graph: ir.Graph, work: Rewriting) -> bool:
    chosen: dict[ir.Node, None] = {}
    for node in graph:
        # A denied value must not come back through another output of its node.
        if not _is_constant(node, chosen) or not all(work.permits("fold", output) for output in node.outputs):
            continue
        refusals = [_refusal(node, output, chosen, work) for output in node.outputs]
        reason = next(filter(None, refusals), None)
        if reason is None:
            chosen[node] = None
        else:
            work.decline("fold", node.outputs[0], reason)
    outputs = [output for node in chosen for output in node.outputs]
    # What only other chosen nodes read is computed on the way and need not be stored.
    read_outside = [o for o in outputs if o.is_graph_output() or any(use.node not in chosen for use in o.uses())]
    stored = _afforded(read_outside, list(chosen), work)
    if not stored:
        return False
    arrays = _evaluate(list(chosen), stored, work)
    folded = False
    for value in stored:
        if value.name not in arrays:
            continue
        array = arrays[value.name]
        # The runtime hands 8-bit floats and the like over as plain integers.
        if value.dtype is None or array.dtype != value.dtype.numpy():
            work.decline("fold", value, f"{value.name} of type {value.dtype} doesn't come back from onnxruntime")
        elif work.fold("fold", value, ir.tensor(array)):
            folded = True
    return folded


def _afforded(values: list[ir.Value], chosen: list[ir.Node], work: Rewriting) -> list[ir.Value]:
    """The values that may still be stored: together they may not add more than `fold_total` to the file."""
    afforded: list[ir.Value] = []
    freed: set[ir.Value] = set()
    for value in values:
        gone: set[ir.Value] = set()
        for node in _needed(value, chosen):
            for read in node.inputs:
                if read is not None and read.const_value is not None and all(u.node in chosen for u in read.uses()):
                    gone.add(read)
        # Two values may free the same tensor; it counts once.
        gone -= freed
        added = max((_bytes(value) or 0) - sum(_bytes(read) or 0 for read in gone), 0)
        producer = value.producer()
        # A weight behind a Cast must become a weight, as in `_refusal`.
        if producer is not None and producer.op_type == "Cast" and gone:
            added = 0
        if added and work.folded + added > work.fold_total:
            work.decline("fold", value, f"{value.name} would add {added} bytes to the file, and folded constants "
                         f"have added {work.folded} of {work.fold_total} already")  # fmt: skip
            continue
        work.folded += added
        freed |= gone
        afforded.append(value)
    return afforded


def _is_constant(node: ir.Node, chosen: dict[ir.Node, None]) -> bool:
    if node.domain != "" or node.op_type in KEPT or is_random(node) or subgraphs(node):
        return False
    for value in node.inputs:
        if value is None:
            continue
        producer = value.producer()
        is_stored = producer is None and value.const_value is not None
        if producer not in chosen and not is_stored:
            return False
    return True


def _refusal(node: ir.Node, output: ir.Value, chosen: dict[ir.Node, None], work: Rewriting) -> str | None:
    """Why a constant node stays; None when it may be folded."""
    if not isinstance(output.type, ir.TensorType) or output.dtype == ir.DataType.STRING:
        return f"{node.op_type} {output.name} gives {output.type}"
    freed = 0
    for value in node.inputs:
        if value is not None and all(use.node in chosen or use.node is node for use in value.uses()):
            freed += _bytes(value) or 0
    size = _bytes(output)
    if size is None:
        if node.op_type in DATA_SIZED:
            return None
        return f"size of {node.op_type} {output.name} is not known beforehand"
    # A weight behind a Cast must become a weight, though float32 takes twice the bytes of float16.
    added = 0 if node.op_type == "Cast" and freed else size - freed
    if added > work.fold_limit:
        return f"{node.op_type} {output.name} would add {added} bytes to the file (fold_limit: {work.fold_limit})"
    return None


def _bytes(value: ir.Value) -> int | None:
    if value.const_value is not None:
        return value.const_value.nbytes
    shape = static(value)
    if shape is None or value.dtype is None:
        return None
    # Types of half a byte make it a fraction.
    return math.ceil(math.prod(shape) * value.dtype.itemsize)


def _evaluate(nodes: list[ir.Node], wanted: list[ir.Value], work: Rewriting) -> dict[str, Array]:
    """All at once; when something fails, each value on its own, so that one odd operator costs only itself."""
    try:
        return evaluate(nodes, wanted, work.model)
    except StageError:
        arrays: dict[str, Array] = {}
    for value in wanted:
        try:
            arrays |= evaluate(_needed(value, nodes), [value], work.model)
        except StageError as error:
            work.decline("fold", value, f"{value.name}: {error.what}")
    return arrays


def evaluate(nodes: list[ir.Node], wanted: list[ir.Value], model: ir.Model) -> dict[str, Array]:
    """The wanted values by name, of `nodes` in order, fed by constants only. Raises StageError where one fails."""
    try:
        outputs = OnnxRuntime(threads=1, few_runs=True).open(_submodel(nodes, wanted, model)).run({})
        return {name: np.asarray(array) for name, array in outputs.items()}
    except StageError as error:
        where = wanted[0].name or ""
        raise StageError(f"onnxruntime can't compute it ({error.what.splitlines()[0]})", where=where) from error


def _submodel(nodes: list[ir.Node], wanted: list[ir.Value], model: ir.Model) -> ir.Model:
    # A view takes nodes as they are; what they read from outside of it are its stored tensors.
    computed: set[ir.Value] = set()
    for node in nodes:
        computed.update(node.outputs)
    constants: dict[ir.Value, None] = {}
    for node in nodes:
        constants.update((value, None) for value in node.inputs if value is not None and value not in computed)
    view = ir.GraphView([], wanted, nodes=nodes, initializers=list(constants), opset_imports=model.opset_imports)
    graph = view.clone()
    graph.name = "constants"
    for output in graph.outputs:
        # onnxruntime finds type and shape itself, and refuses others.
        output.type = None
        output.shape = None
    return ir.Model(graph, ir_version=model.ir_version)


def _needed(value: ir.Value, nodes: list[ir.Node]) -> list[ir.Node]:
    """Those of some nodes in order that a value is computed from."""
    needed: set[ir.Node | None] = {value.producer()}
    for node in reversed(nodes):
        if node in needed:
            needed.update(v.producer() for v in node.inputs if v is not None)
    return [n for n in nodes if n in needed]
