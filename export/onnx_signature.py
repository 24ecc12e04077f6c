"""The signature of an ONNX model: what it takes and gives, read from the graph itself."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from layerline.backends.light import Light
from layerline.export.signature import Dim, Signature, Value
from layerline.pipeline.errors import StageError


def signature(
    light: Light, dims: Mapping[str, Dim] | None = None, ranges: Mapping[str, tuple[int, int]] | None = None
) -> Signature:
    """Inputs that have to be fed, and outputs, in order.

    Args:
        dims: bounds of symbolic sizes, by name.
        ranges: (low, high) of integer inputs, by name.

    Raises:
        StageError: an input that is not a tensor.
    """
    inputs = tuple(_value(i, ranges or {}) for i in light.fed)
    outputs = tuple(_value(o, {}) for o in light.model.graph.output)
    return Signature(inputs=inputs, outputs=outputs, dims=dict(dims or {}))


def _value(info: onnx.ValueInfoProto, ranges: Mapping[str, tuple[int, int]]) -> Value:
    kind = info.type.tensor_type
    if not kind.elem_type:
        raise StageError("only tensors can go in and come out", where=info.name)
    low, high = ranges.get(info.name, (None, None))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim)
    return Value(name=info.name, dtype=dtype, shape=shape, low=low, high=high)
