"""Finds, in the graph, the values that may hold a mask of -Inf or of a type's lowest number.

Their squares have no sum in float32, so they take a measure that costs more than the plain one.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from layerline.graph.analysis.proto_queries import stored

_GREAT = 1e15
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
# What masks are made and applied with. A Softmax, or whatever else reads one, gives ordinary numbers again.
_CARRY = frozenset({"Where", "Add", "Sub", "Mul", "Cast", "Identity"}) | frozenset(
    {"Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Tile", "Trilu"}
)


def extremes(graph: onnx.GraphProto) -> set[str]:
    """Values that a stored number of at least 1e15, NaN or Inf may reach.

    A mask that is an input, or has more than a few hundred elements, is missed here and detected in the first run.
    """
    reached = {name for name, tensor in stored(graph) if tensor.data_type in _FLOATS and _great(tensor)}
    for node in graph.node:
        if node.op_type in _CARRY and not reached.isdisjoint(node.input):
            reached.update(node.output)
    return reached


def _great(tensor: onnx.TensorProto) -> bool:
    return not (np.abs(numpy_helper.to_array(tensor).astype(np.float64)) < _GREAT).all()
