"""What TensorRT can't build about a single node: its element types, indices and Q/DQ.

TensorRT lacks some element types, takes some at the edges only, narrows others, and quantises symmetrically to int8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis import ir_queries
from layerline.graph.analysis.refusals import NodeSite, Refusal

# What Q and DQ may store; these exist between the two and nowhere else.
_QUANTIZED = frozenset({ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN, ir.DataType.INT4, ir.DataType.FLOAT4E2M1})
_TAKEN = frozenset(
    ir.DataType[name]
    for name in "UNDEFINED FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT32 INT64 BOOL UINT8".split()  # noqa: SIM905  # a table
)
# Where each of these takes its indices.
_INDEXED = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "ScatterND": 1}


def is_foldable(value: ir.Value | None) -> bool:
    """Whether the value is computed from constants alone."""
    pending = [value]
    visited = set[ir.Value]()
    while pending:
        current = pending.pop()
        if current is None or current.const_value is not None or current in visited:
            continue
        visited.add(current)
        node = current.producer()
        # Graph inputs are no constants, random operators give other numbers each time.
        if node is None or ir_queries.is_random(node) or ir_queries.subgraphs(node):
            return False
        pending += node.inputs
    return True


def is_quantizer(node: ir.Node) -> bool:
    """Whether it is one of Q/DQ."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def edge(value: ir.Value) -> Iterator[Refusal]:
    """Types of the model's own inputs and outputs."""
    what = _bad_type(value.dtype)
    if what:
        kind = "input" if value.is_graph_input() else "output"
        yield Refusal(value.name or "", f"{kind} {value.name}", f"the {kind} {what}", _retype(value.dtype))


def _types(site: NodeSite) -> Iterator[Refusal]:
    """Element types that TensorRT lacks: it prints them raw or refuses them without a name."""
    if is_quantizer(site.node):
        return
    # `edge` checks the outputs of the main graph.
    outputs = [v for v in site.node.outputs if not v.is_graph_output() or site.inside]
    for value in (*_first_read(site), *outputs):
        what = _bad_type(value.dtype)
        if what:
            yield site.refuse(value, f"it {what}", _retype(value.dtype))


def _float64(site: NodeSite) -> Iterator[Refusal]:
    """Constants that become infinite in float32, to which TensorRT narrows float64 silently."""
    for value in (*_first_read(site), *site.node.outputs):
        if value.dtype != ir.DataType.DOUBLE or cast_away(value):
            continue
        # Only what is stored or folded is known before the run.
        wide = ir_queries.constant(value)
        if wide is None:
            continue
        lost = np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)
        if lost.any():
            what = f"it holds {wide[lost][0]}, infinity in float32; TensorRT has no float64"
            yield site.refuse(value, what, "scale it down in the model")


def _first_read(site: NodeSite) -> list[ir.Value]:
    """Stored tensors of which this node is the first reader, so that each is reported once."""
    return [v for v in site.node.inputs if v is not None and v.is_initializer() and v.consumers()[0] is site.node]


def cast_away(value: ir.Value) -> bool:
    """Whether the value is a float64 constant that only Cast nodes read: folding it needs no float64 in the engine."""
    stored = value.const_value is not None or getattr(value.producer(), "op_type", "") == "Constant"
    return stored and all(n.op_type == "Cast" for n in value.consumers())


def _bad_type(dtype: ir.DataType | None) -> str:
    if dtype is None or dtype in _TAKEN or dtype in _QUANTIZED:
        return ""
    return f"is {dtype.name.lower()}, a type that TensorRT does not have"


def _retype(dtype: ir.DataType | None) -> str:
    if dtype == ir.DataType.STRING:
        return "keep text out of the graph: tokenise before it"
    return "cast to int32, int64 or float32 in the model"


def _uint8(site: NodeSite) -> Iterator[Refusal]:
    """UINT8 may only enter, straight into a Cast, and leave."""
    node = site.node
    if is_quantizer(node):
        return
    hint = "cast the uint8 input to float32 or int32 before any other operator"
    for value in node.inputs:
        if value is not None and value.dtype == ir.DataType.UINT8 and value.is_graph_input():
            passed_on = all(o.is_graph_output() for o in node.outputs)
            if node.op_type != "Cast" and not (node.op_type == "Identity" and passed_on):
                yield site.refuse(value, f"the uint8 input goes into {node.op_type}; it may go into Cast alone", hint)
    for value in node.outputs:
        inner = not value.is_graph_output() or value.uses() or site.inside
        if value.dtype == ir.DataType.UINT8 and node.op_type != "Constant" and inner:
            yield site.refuse(value, "it is uint8 inside the network, where TensorRT has no uint8", hint)


def _indices(site: NodeSite) -> Iterator[Refusal]:
    """Constant indices past the end, also INT64 ones past 2^31: TensorRT silently reads another element."""
    node = site.node
    position = _INDEXED.get(node.op_type)
    if position is None:
        return
    numbers = ir_queries.constant(node.inputs[position])
    if numbers is None or not numbers.size:
        return
    # Of ND forms each column has an axis of its own; 2^31 is beyond all of them.
    limit = 2**31
    bound = "no axis has 2^31 elements"
    if not node.op_type.endswith("ND"):
        size = ir_queries.dim(node.inputs[0], node.attributes.get_int("axis", 0))
        if isinstance(size, int):
            limit = size
            bound = f"the axis has {size} elements"
    outside = (numbers >= limit) | (numbers < -limit)
    if outside.any():
        what = f"the index {numbers[outside][0]} is out of range: {bound}"
        yield site.refuse(node.inputs[position], what, "correct the index in the model")


def _quantizers(site: NodeSite) -> Iterator[Refusal]:
    """Q/DQ: symmetric int8 (or fp8, int4, fp4), scales above 0, activations per tensor, biases left in float."""
    node = site.node
    if not is_quantizer(node):
        return
    data = node.inputs[0]
    stored = node.outputs[0] if node.op_type == "QuantizeLinear" else data
    dtype = _stored_type(node)
    if dtype == ir.DataType.INT32:
        yield site.refuse(data, "it is an int32 bias behind DequantizeLinear", "leave biases in float32")
    elif dtype is not None and dtype not in _QUANTIZED:
        symmetric = "TensorRT takes symmetric int8, zero point 0"
        yield site.refuse(stored, f"it is quantised to {dtype.name.lower()}; {symmetric}", "quantise to signed int8")
    yield from _zero_point(site, stored)
    yield from _scale(site, data)


def _zero_point(site: NodeSite, stored: ir.Value | None) -> Iterator[Refusal]:
    point = ir_queries.optional_input(site.node, 2)
    if point is None:
        return
    numbers = ir_queries.constant(point)
    if numbers is None:
        yield site.refuse(point, "the zero point is not a constant", "quantise symmetrically, zero point 0")
        return
    nonzero = numbers.astype(np.float32) != 0
    if nonzero.any():
        what = f"its zero point is {numbers[nonzero][0]}; TensorRT takes symmetric quantisation, zero point 0"
        yield site.refuse(stored, what, "quantise symmetrically to int8")


def _scale(site: NodeSite, data: ir.Value | None) -> Iterator[Refusal]:
    scale = site.node.inputs[1]
    numbers = ir_queries.constant(scale)
    if numbers is None:
        return
    wide = numbers.astype(np.float32)
    bad = ~(np.isfinite(wide) & (wide > 0))
    if bad.any():
        what = f"the scale is {wide[bad][0]}; expected a finite number above 0"
        yield site.refuse(scale, what, "calibrate this tensor again; a constant tensor needs any scale above 0")
    if wide.size > 1 and not is_foldable(data):
        what = f"it is an activation with {wide.size} scales; TensorRT quantises activations per tensor"
        yield site.refuse(data, what, "use one scale for it; only weights are quantised per channel")


def _stored_type(node: ir.Node) -> ir.DataType | None:
    """The quantised type of a Q or DQ. ONNX's default for QuantizeLinear is uint8."""
    if node.op_type == "DequantizeLinear":
        return getattr(node.inputs[0], "dtype", None)
    point = ir_queries.optional_input(node, 2)
    if point is not None:
        return point.dtype
    return ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)


NODE_CHECKS = (_types, _float64, _uint8, _indices, _quantizers)
