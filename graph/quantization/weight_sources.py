"""Weights wherever a model keeps them: initializers, Constant nodes, or either behind Cast, Identity, Transpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant
from layerline.graph.fusion.rewriter import drop_initializer

_THROUGH = frozenset({"Identity", "Transpose", "Cast"})


def weight_of(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The numbers of a floating-point value that no run can change; None for any other value."""
    found = _resolve(value)
    return found if found is not None and _is_float(found) else None


def drop_unread(value: ir.Value) -> None:
    """Removes a constant that nothing reads any more, with the nodes that only led to it."""
    node = value.producer()
    if value.uses() or value.is_graph_output():
        return
    if node is None:
        drop_initializer(value)
        return
    read = [v for v in node.inputs if v is not None]
    if node.graph is not None:
        node.graph.remove(node, safe=True)
    for each in read:
        drop_unread(each)


def _resolve(value: ir.Value | None) -> npt.NDArray[Any] | None:
    found = constant(value)
    node = value.producer() if value is not None else None
    if found is not None or node is None or node.domain != "" or node.op_type not in _THROUGH:
        return found
    inner = _resolve(node.inputs[0])
    if inner is None or node.op_type == "Identity":
        return inner
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes.get_int("to", 0))
        return inner.astype(to.numpy()) if _is_float(inner) and to.is_floating_point() else None
    order = node.attributes.get("perm")
    return np.transpose(inner, None if order is None else order.as_ints())


def _is_float(array: npt.NDArray[Any]) -> bool:
    # bfloat16 is no subtype of numpy's floating; its kind is "V".
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
