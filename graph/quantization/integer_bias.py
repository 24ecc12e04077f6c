"""Biases as int32, in steps of the input's scale times the weight's, for kernels that sum in integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import FreshNames, add_initializer, constant, copied, first_output, parent
from layerline.graph.quantization.weight_sources import drop_unread, weight_of

_LIMIT = 2.0**31 - 1


def store(model: ir.Model) -> ir.Model:
    """A copy of a quantised model in which every int8 Conv or Gemm with a stored float bias has an int32 one."""
    work = copied(model)
    names = FreshNames(work)
    for node in list(work.graph):
        if node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 3:
            continue
        # The steps of the bias would have to be multiplied by alpha and beta.
        if node.attributes.get_float("alpha", 1.0) != 1.0 or node.attributes.get_float("beta", 1.0) != 1.0:
            continue
        bias, scales = weight_of(node.inputs[2]), [_scale(value) for value in node.inputs[:2]]
        if bias is None or bias.ndim != 1 or scales[0] is None or scales[1] is None:
            continue
        steps = np.broadcast_to(scales[0].reshape(-1) * scales[1].reshape(-1), bias.shape)
        numbers = np.rint(bias.astype(np.float64) / steps)
        # One beyond int32 would wrap around.
        if np.abs(numbers).max(initial=0.0) <= _LIMIT:
            _replace(work.graph, names, node, numbers.astype(np.int32), steps.astype(bias.dtype))
    return work


def _scale(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The scales of a dequantised 8-bit value."""
    node = parent(value, "DequantizeLinear")
    if node is None or node.inputs[0] is None:
        return None
    if node.inputs[0].dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return None
    return constant(node.inputs[1])


def _replace(
    graph: ir.Graph, names: FreshNames, node: ir.Node, numbers: npt.NDArray[Any], steps: npt.NDArray[Any]
) -> None:
    old = node.inputs[2]
    assert old is not None
    stored: list[ir.Value] = []
    for suffix, array in (("quantized", numbers), ("scale", steps), ("zero_point", np.zeros_like(numbers))):
        stored.append(add_initializer(graph, names.fresh(f"{first_output(node)}/bias/{suffix}"), array))
    name = names.fresh(f"{first_output(node)}/bias/dequantized")
    output = ir.Value(name=name, shape=old.shape, type=ir.TensorType(stored[1].dtype or ir.DataType.FLOAT))
    node.prepend(ir.node("DequantizeLinear", stored, {"axis": 0}, outputs=[output], name=f"{name}/DequantizeLinear"))
    node.replace_input_with(2, output)
    drop_unread(old)
