"""Reads the signature of an ONNX model, its inputs and outputs, from the graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from layerline.backends.light import Light
from layerline.export.signature import Dim, Signature, Value
from layerline.pipeline.errors import StageError


def signature(
    light: Light, dims: Mapping[str, Dim] | None = None, ranges: Mapping[str, tuple[int, int]] | None = None
) -> Signature:
    """Inputs without a default, and outputs, in order.

    Args:
        dims: bounds of symbolic sizes, by name.
        ranges: (low, high) of integer inputs, by name.

    Raises:
        StageError: an input that is not a tensor.
    """
    inputs = tuple(_value(info, ranges or {}) for info in light.fed)
    outputs = tuple(_value(info, {}) for info in light.model.graph.output)
    return Signature(inputs=inputs, outputs=outputs, dims=dict(dims or {}))


def _value(info: onnx.ValueInfoProto, ranges: Mapping[str, tuple[int, int]]) -> Value:
    tensor_type = info.type.tensor_type
    if not tensor_type.elem_type:
        raise StageError("only tensors can be inputs and outputs", where=info.name)
    low, high = ranges.get(info.name, (None, None))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type).name
    shape: list[int | str] = []
    for dim in tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            shape.append(dim.dim_value)
        else:
            shape.append(dim.dim_param or "?")
    return Value(name=info.name, dtype=dtype, shape=tuple(shape), low=low, high=high)
