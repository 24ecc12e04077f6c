"""Finds weights wherever a model stores them: initializers and Constants, also before Cast, Identity or Transpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant
from layerline.graph.fusion.rewriter import drop_initializer

_THROUGH = frozenset({"Identity", "Transpose", "Cast"})


def weight_of(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The numbers of a constant floating-point value; None for any other value."""
    array = _resolve(value)
    if array is None or not _is_float(array):
        return None
    return array


def drop_unread(value: ir.Value) -> None:
    """Removes a constant that nothing reads any more, with the nodes that only led to it."""
    node = value.producer()
    if node is None:
        if not value.uses() and not value.is_graph_output():
            drop_initializer(value)
        return
    if any(output.uses() or output.is_graph_output() for output in node.outputs):
        return
    read = [v for v in node.inputs if v is not None]
    if node.graph is not None:
        node.graph.remove(node, safe=True)
    for each in read:
        drop_unread(each)


def _resolve(value: ir.Value | None) -> npt.NDArray[Any] | None:
    array = constant(value)
    if array is not None or value is None:
        return array
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in _THROUGH:
        return None
    inner = _resolve(node.inputs[0])
    if inner is None or node.op_type == "Identity":
        return inner
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes.get_int("to", 0))
        if not _is_float(inner) or not to.is_floating_point():
            return None
        return inner.astype(to.numpy())
    order = node.attributes.get("perm")
    if order is None:
        return np.transpose(inner)
    return np.transpose(inner, order.as_ints())


def _is_float(array: npt.NDArray[Any]) -> bool:
    # bfloat16 is no subtype of numpy's floating; its kind is "V".
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
