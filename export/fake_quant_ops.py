"""How torch's fake quantisation is written in ONNX: QuantizeLinear and DequantizeLinear, in any integer range.

torch's own translation takes three ranges alone. Here a range that is narrower than its type is kept by clipping the
float value first, which gives the same numbers and leaves Q and DQ side by side, as TensorRT wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18

# Typed loosely: what onnxscript traces are its own symbolic values.
_op: Any = opset18


def table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations by torch operator, for `torch.onnx.export(custom_translation_table=…)`."""
    return {
        torch.ops.aten.fake_quantize_per_tensor_affine.default: _per_tensor,
        torch.ops.aten.fake_quantize_per_tensor_affine.tensor_qparams: _per_tensor,
        torch.ops.aten.fake_quantize_per_channel_affine.default: _per_channel,
    }


def container(low: int, high: int) -> ir.DataType:
    """The 8-bit type that holds a range of integers. Raises NotImplementedError if none does."""
    if low >= -128 and high <= 127:
        return ir.DataType.INT8
    if low >= 0 and high <= 255:
        return ir.DataType.UINT8
    raise NotImplementedError(f"fake quantisation to {low}..{high}: QuantizeLinear takes what 8 bits hold")


def _per_tensor(x, scale, zero_point, quant_min, quant_max):  # type: ignore[no-untyped-def]
    return _pair(x, scale, zero_point, None, quant_min, quant_max)


def _per_channel(x, scale, zero_point, axis, quant_min, quant_max):  # type: ignore[no-untyped-def]
    return _pair(x, scale, zero_point, axis, quant_min, quant_max)


def _pair(x: Any, scale: Any, point: Any, axis: int | None, low: int, high: int) -> Any:
    kind = container(low, high)
    dtype = x.type.dtype
    if dtype != ir.DataType.FLOAT:
        x = _op.Cast(x, to=ir.DataType.FLOAT)
    # torch keeps scales in float64 where they are plain numbers; Q and DQ want the type of x.
    if isinstance(scale, float) or scale.type.dtype != ir.DataType.FLOAT:
        scale = _op.Cast(scale, to=ir.DataType.FLOAT)
    whole = (-128, 127) if kind == ir.DataType.INT8 else (0, 255)
    # QuantizeLinear itself saturates at the ends of its type alone.
    if (low, high) != whole:
        x = _clipped(x, scale, _op.Cast(point, to=ir.DataType.FLOAT), axis, low, high)
    point = _op.Cast(point, to=kind)
    attributes = {} if axis is None else {"axis": axis}
    fake = _op.DequantizeLinear(_op.QuantizeLinear(x, scale, point, **attributes), scale, point, **attributes)
    if dtype != ir.DataType.FLOAT:
        fake = _op.Cast(fake, to=dtype)
    return fake


def _clipped(x: Any, scale: Any, point: Any, axis: int | None, low: int, high: int) -> Any:
    ends = []
    for end in (low, high):
        bound = _op.Mul(_op.Sub(_op.Constant(value_float=float(end)), point), scale)
        if axis is not None:
            # One bound a channel, along the channels' axis.
            shape = [1] * len(x.shape)
            shape[axis] = -1
            bound = _op.Reshape(bound, _op.Constant(value_ints=shape))
        ends.append(bound)
    return _op.Min(_op.Max(x, ends[0]), ends[1])
