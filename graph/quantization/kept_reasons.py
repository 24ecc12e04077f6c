"""Which nodes are listed among what stays float, and why: those that compute, read a large weight, or lie in a body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from layerline.calib.plan import Kept
from layerline.graph.analysis.ir_queries import first_output, subgraphs
from layerline.graph.quantization.naming import kept_float
from layerline.graph.quantization.targets import FORMATS, OPS, WEIGHTED, Target
from layerline.graph.quantization.weight_sources import weight_of

FLOAT = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Activation functions that a quantised layer before them computes as well.
FUSED = ("Relu", "Clip", "LeakyRelu")
# Operators that move numbers without changing them: not worth a line in the list of what stays float.
_MOVES = frozenset(
    "Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Identity Slice Split Gather GatherElements GatherND Pad "  # noqa: SIM905
    "DepthToSpace SpaceToDepth MaxPool GlobalMaxPool Dropout Cast".split()
)
# A float weight with this many elements is listed among what stays float, whatever operator reads it.
_LARGE_WEIGHT = 1024


def is_activation(value: ir.Value | None) -> bool:
    """Whether it is a computed floating-point value."""
    return value is not None and weight_of(value) is None and value.dtype in FLOAT


def listed(
    nodes: Sequence[ir.Node], kept: Mapping[ir.Node, str], quantized: set[str], target: Target, mode: str
) -> Iterator[Kept]:
    """Every node worth a line, in the order of the graph.

    Args:
        nodes: of the main graph.
        kept: nodes that placement left in float, with the reason.
        quantized: first outputs of the nodes that read a quantised value.
        mode: the format that layers have where nothing else is said.
    """
    fused = _fused(nodes, kept, quantized)
    for node in nodes:
        reason = kept.get(node, "")
        if not reason and first_output(node) not in quantized and node.op_type not in OPS:
            reason = _lacks_a_rule(node, fused, target, mode)
        # In blocks of weights all computation is float: only a weight that stays float is worth a line.
        if FORMATS[mode].block and node.op_type not in (*WEIGHTED, "Concat") and not _reads_a_table(node):
            reason = ""
        if reason:
            yield kept_float(node, reason)
        for body in subgraphs(node):
            yield from _in_body(node, body)


def _lacks_a_rule(node: ir.Node, fused: set[ir.Node], target: Target, mode: str) -> str:
    """Why a node without a rule is listed; empty where it is not worth a line."""
    reason = f"there is no {mode} rule for {node.op_type}"
    why = target.reasons.get(node.op_type, "")
    if why:
        why = f": {why}"
    weight = _large_weight(node)
    if weight is not None:
        return f"{reason}, which reads the weight {weight}{why}"
    if node not in fused and _computes(node):
        return f"{reason}{why}"
    return ""


def _fused(nodes: Sequence[ir.Node], kept: Mapping[ir.Node, str], quantized: set[str]) -> set[ir.Node]:
    """Activation functions right after a quantised layer, which compute as part of it."""
    fused = set[ir.Node]()
    for node in nodes:
        if node.op_type not in FUSED or not node.inputs or node.inputs[0] is None:
            continue
        producer = node.inputs[0].producer()
        if producer is None:
            continue
        if producer in fused or (first_output(producer) in quantized and producer not in kept):
            fused.add(node)
    return fused


def _computes(node: ir.Node) -> bool:
    """Whether the node computes new floating-point numbers from activations, rather than moving them."""
    if node.op_type in _MOVES:
        return False
    return any(is_activation(v) for v in node.inputs) and any(is_activation(v) for v in node.outputs)


def _in_body(owner: ir.Node, body: ir.Graph) -> Iterator[Kept]:
    for node in body:
        if node.op_type in WEIGHTED or _large_weight(node) is not None:
            place = f"the body of {owner.op_type} {first_output(owner)}"
            yield kept_float(node, f"it is inside {place}, where ranges are not observed")
        for inner in subgraphs(node):
            yield from _in_body(owner, inner)


def _reads_a_table(node: ir.Node) -> bool:
    """Whether a stored tensor of two or more axes is among its inputs."""
    for value in node.inputs:
        array = weight_of(value)
        if array is not None and array.ndim > 1:
            return True
    return False


def _large_weight(node: ir.Node) -> str | None:
    for value in node.inputs:
        array = weight_of(value)
        if value is not None and array is not None and array.ndim > 1 and array.size >= _LARGE_WEIGHT:
            return value.name
    return None
