"""Q/DQ after TensorRT's rules: symmetric, signed, activations per tensor, biases left in float."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from layerline.backends.tensorrt.checks_types import QUANTIZED
from layerline.backends.tensorrt.node_site import NodeSite, Refusal, is_foldable, is_quantizer
from layerline.graph.analysis import ir_queries


def quantizers(site: NodeSite) -> Iterator[Refusal]:
    """Q/DQ: symmetric int8 (or fp8, int4, fp4), scales above 0, activations per tensor, biases left in float."""
    node = site.node
    if not is_quantizer(node):
        return
    data = node.inputs[0]
    stored = node.outputs[0] if node.op_type == "QuantizeLinear" else data
    dtype = _stored_type(node)
    if dtype == ir.DataType.INT32:
        yield site.refuse(data, "it is an int32 bias behind DequantizeLinear", "leave biases in float32")
    elif dtype is not None and dtype not in QUANTIZED:
        symmetric = "TensorRT takes symmetric int8, zero point 0"
        yield site.refuse(stored, f"it is quantised to {dtype.name.lower()}; {symmetric}", "quantise to signed int8")
    yield from _zero_point(site, stored)
    yield from _scale(site, data)


def _zero_point(site: NodeSite, stored: ir.Value | None) -> Iterator[Refusal]:
    point = site.node.inputs[2] if len(site.node.inputs) > 2 else None
    if point is None:
        return
    numbers = ir_queries.constant(point)
    if numbers is None:
        yield site.refuse(point, "the zero point is not a constant", "quantise symmetrically, zero point 0")
        return
    nonzero = numbers.astype(np.float32) != 0
    if nonzero.any():
        first = numbers.ravel()[int(np.argmax(nonzero))]
        what = f"its zero point is {first}; TensorRT takes symmetric quantisation, zero point 0"
        yield site.refuse(stored, what, "quantise symmetrically to int8")


def _scale(site: NodeSite, data: ir.Value | None) -> Iterator[Refusal]:
    scale = site.node.inputs[1]
    numbers = ir_queries.constant(scale)
    if numbers is None:
        return
    wide = numbers.astype(np.float32)
    bad = ~(np.isfinite(wide) & (wide > 0))
    if bad.any():
        what = f"the scale is {wide.ravel()[int(np.argmax(bad))]}; expected a finite number above 0"
        yield site.refuse(scale, what, "calibrate this tensor again; a constant tensor needs any scale above 0")
    if wide.size > 1 and not is_foldable(data):
        what = f"it is an activation with {wide.size} scales; TensorRT quantises activations per tensor"
        yield site.refuse(data, what, "use one scale for it; only weights are quantised per channel")


def _stored_type(node: ir.Node) -> ir.DataType | None:
    """The quantised type of a Q or DQ. ONNX's default for QuantizeLinear is uint8."""
    if node.op_type == "DequantizeLinear":
        data = node.inputs[0]
        return None if data is None else data.dtype
    point = node.inputs[2] if len(node.inputs) > 2 else None
    if point is not None:
        return point.dtype
    return ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)
