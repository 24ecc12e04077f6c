"""ONNX operators in torch, with gradients: opset 13 and later, those that networks are made of.

Each function takes the attributes of a node and its inputs, None for an optional one that is left out. What is not in
`TABLE` has no gradient here; `graph_module.py` computes it by onnx's own reference where none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from layerline.qat import recurrent, windows
from layerline.qat.windows import OUTPUTS, Attrs, Operator, ints, padded

DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""torch's type of each element type of ONNX."""
_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _axes(attrs: Attrs, axes: Tensor | None) -> list[int]:
    """Axes are an input from opset 13 or 18 on, and an attribute before."""
    if axes is None:
        return ints(attrs.get("axes"))
    return ints(axes)


def _without_attributes(function: Operator, attrs: Attrs, *inputs: Tensor | None) -> Any:  # noqa: ARG001
    return function(*inputs)


# Products and normalisation.


def _gemm(attrs: Attrs, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    if attrs.get("transA", 0):
        a = a.mT
    if attrs.get("transB", 0):
        b = b.mT
    product: Tensor = a @ b * attrs.get("alpha", 1.0)
    if c is not None:
        product = product + c * attrs.get("beta", 1.0)
    return product


def _batch_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """With the statistics that the model stores: they stay as they are."""
    return F.batch_norm(x, mean.detach(), variance.detach(), scale, bias, False, 0.0, attrs.get("epsilon", 1e-5))


def _layer_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if attrs[OUTPUTS] > 1:
        raise NotImplementedError("mean and deviation of LayerNormalization")
    axis = attrs.get("axis", -1) % x.ndim
    # ONNX broadcasts scale and bias to x; torch wants them in the normalised shape, so they are applied here.
    normalized = F.layer_norm(x, x.shape[axis:], eps=attrs.get("epsilon", 1e-5)) * scale
    if bias is None:
        return normalized
    return normalized + bias


def _rms_norm(attrs: Attrs, x: Tensor, scale: Tensor) -> Tensor:
    axis = attrs.get("axis", -1) % x.ndim
    return F.rms_norm(x, x.shape[axis:], eps=attrs.get("epsilon", 1e-5)) * scale


def _group_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = attrs["num_groups"]
    if scale.numel() != x.shape[1]:  # before opset 21: one number a group
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, attrs.get("epsilon", 1e-5))


def _global_pool(function: Callable[..., Tensor]) -> Operator:
    return lambda x: function(x, dim=tuple(range(2, x.ndim)), keepdim=True)


def _softmax(function: Callable[..., Tensor]) -> Operator:
    return lambda attrs, x: function(x, dim=attrs.get("axis", -1))


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None and high is None:
        return x
    return torch.clamp(x, low, high)


def _div(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return a / b
    # Integers are divided towards zero, as in C.
    return torch.div(a, b, rounding_mode="trunc")


def _reduce(function: Callable[..., Tensor]) -> Operator:
    """A reduction over axes, all of them where none are named; `function` takes (x, axes, keep the axes)."""

    def operator(attrs: Attrs, x: Tensor, axes: Tensor | None = None) -> Tensor:
        dims = _axes(attrs, axes)
        if not dims and attrs.get("noop_with_empty_axes", 0):
            return x
        return function(x, tuple(dims) or tuple(range(x.ndim)), bool(attrs.get("keepdims", 1)))

    return operator


def _top_k(attrs: Attrs, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    axis = attrs.get("axis", -1)
    # Of equal elements ONNX gives the one of lower index first; torch.topk promises no order.
    values, indices = torch.sort(x, dim=axis, descending=bool(attrs.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, int(count)), indices.narrow(axis, 0, int(count))


# Shapes and places.


def _reshape(attrs: Attrs, x: Tensor, shape: Tensor) -> Tensor:
    sizes = ints(shape)
    if not attrs.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(tuple(sizes))


def _flatten(attrs: Attrs, x: Tensor) -> Tensor:
    # A slice counts a negative axis from the end, as ONNX does.
    return x.reshape(math.prod(x.shape[: attrs.get("axis", 1)]), -1)


def _transpose(attrs: Attrs, x: Tensor) -> Tensor:
    return x.permute(tuple(ints(attrs.get("perm")) or range(x.ndim)[::-1]))


def _squeeze(attrs: Attrs, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _axes(attrs, axes) or range(x.ndim)
    return x.squeeze(tuple(dims))


def _unsqueeze(attrs: Attrs, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _axes(attrs, axes)
    rank = x.ndim + len(dims)
    for dim in sorted(d % rank for d in dims):
        x = x.unsqueeze(dim)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, *rest: Tensor | None) -> Tensor:
    axes, steps = (*rest, None, None)[:2]
    first, last = ints(starts), ints(ends)
    dims = ints(axes) or list(range(len(first)))
    strides = ints(steps) or [1] * len(first)
    for start, end, dim, step in zip(first, last, dims, strides, strict=True):
        places = range(*slice(start, end, step).indices(x.shape[dim]))
        # torch's own slices take no negative step.
        if step == 1:
            x = x.narrow(dim, min(places.start, x.shape[dim]), len(places))
        else:
            x = x.index_select(dim, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    return x


def _split(attrs: Attrs, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attrs.get("axis", 0)
    lengths = ints(sizes) or ints(attrs.get("split"))
    # Without lengths the parts are equal, and the last one is what is left.
    equal_length = -(-x.shape[axis] // attrs[OUTPUTS])
    return torch.split(x, lengths or equal_length, axis)


def _pad(attrs: Attrs, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    amounts = ints(pads)
    dims = [d % x.ndim for d in ints(axes)] or list(range(x.ndim))
    before, after = [0] * x.ndim, [0] * x.ndim
    for place, dim in enumerate(dims):
        before[dim], after[dim] = amounts[place], amounts[place + len(dims)]
    mode = _PAD_MODES[attrs.get("mode", "constant")]
    if mode == "constant":
        fill = 0.0
        if value is not None:
            fill = float(value)
        return padded(x, before, after, fill)
    # torch takes two leading axes, which must not be padded, and up to three others.
    lead = 0
    if x.ndim > 2:
        lead = max(x.ndim - 3, 1)
    if any(before[:lead] + after[:lead]):
        raise NotImplementedError(f"Pad with mode {mode} of the first axes")
    pairs = [amount for pair in zip(before[lead:][::-1], after[lead:][::-1], strict=True) for amount in pair]
    widened = x.reshape(1, -1, *x.shape[lead:])
    return F.pad(widened, pairs, mode=mode).reshape(*x.shape[:lead], *(
        size + low + high for size, low, high in zip(x.shape[lead:], before[lead:], after[lead:], strict=True)
    ))  # fmt: skip


def _nonnegative(indices: Tensor, size: int) -> Tensor:
    # torch's index_select and gather count from the front only.
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


def _gather(attrs: Attrs, x: Tensor, indices: Tensor) -> Tensor:
    axis = attrs.get("axis", 0) % x.ndim
    places = _nonnegative(indices, x.shape[axis])
    chosen = x.index_select(axis, places.reshape(-1))
    return chosen.reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))


def _gather_elements(attrs: Attrs, x: Tensor, indices: Tensor) -> Tensor:
    axis = attrs.get("axis", 0)
    return x.gather(axis, _nonnegative(indices, x.shape[axis]))


def _scatter_nd(attrs: Attrs, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if attrs.get("reduction", "none") not in ("none", "add"):
        raise NotImplementedError("ScatterND with a reduction")
    return x.index_put(tuple(indices.long().unbind(-1)), updates, accumulate=attrs.get("reduction") == "add")


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    sizes = torch.broadcast_shapes(x.shape, tuple(ints(shape)))  # type: ignore[no-untyped-call]
    return x.broadcast_to(sizes)


def _depth_to_space(attrs: Attrs, x: Tensor) -> Tensor:
    size = attrs["blocksize"]
    if attrs.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    # DCR has the block's axes before the channels, torch's pixel_shuffle behind them.
    n, c, h, w = x.shape
    return F.pixel_shuffle(x.reshape(n, size * size, -1, h, w).transpose(1, 2).reshape(n, c, h, w), size)


def _shape(attrs: Attrs, x: Tensor) -> Tensor:
    sizes = list(x.shape)[attrs.get("start", 0) : attrs.get("end")]
    return torch.tensor(sizes, dtype=torch.int64, device=x.device)


def _constant_of_shape(attrs: Attrs, shape: Tensor) -> Tensor:
    value: Tensor = attrs.get("value", torch.zeros(1))
    return value.to(shape.device).reshape(()).expand(tuple(ints(shape))).clone()


def _cast(attrs: Attrs, x: Tensor) -> Tensor:
    if attrs["to"] not in DTYPES:
        raise NotImplementedError(f"Cast to element type {attrs['to']}")
    return x.to(DTYPES[attrs["to"]])


PLAIN: Mapping[str, Operator] = {
    "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and,
    "CastLike": lambda x, other: x.to(other.dtype), "Ceil": torch.ceil, "Clip": _clip,
    "Cos": torch.cos, "Div": _div, "Dropout": lambda x, *_: (x, torch.ones_like(x).bool()),
    "Equal": torch.eq, "Erf": torch.erf, "Exp": torch.exp, "Expand": _expand, "Floor": torch.floor,
    "GlobalAveragePool": _global_pool(torch.mean), "GlobalMaxPool": _global_pool(torch.amax), "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "HardSwish": F.hardswish, "Identity": lambda x: x, "IsNaN": torch.isnan,
    "Less": torch.lt, "LessOrEqual": torch.le, "Log": torch.log, "MatMul": torch.matmul,
    "Max": lambda *inputs: reduce(torch.maximum, inputs),
    "Mean": lambda *inputs: reduce(torch.add, inputs) / len(inputs),
    "Min": lambda *inputs: reduce(torch.minimum, inputs), "Mish": F.mish, "Mul": torch.mul, "Neg": torch.neg,
    "Not": torch.logical_not, "Or": torch.logical_or, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Pow": lambda x, exponent: torch.pow(x, exponent).to(x.dtype), "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Slice": _slice,
    "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Sub": torch.sub,
    "Sum": lambda *inputs: reduce(torch.add, inputs), "Tan": torch.tan, "Tanh": torch.tanh,
    "Tile": lambda x, repeats: x.repeat(ints(repeats)), "Where": torch.where, "Xor": torch.logical_xor,
    "Range": lambda start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype,
                                                   device=start.device),
}  # fmt: skip
"""Operators without attributes that matter: functions of the inputs alone."""
TABLE: Mapping[str, Operator] = {
    "AveragePool": windows.average_pool,
    "BatchNormalization": _batch_norm, "Cast": _cast,
    "Concat": lambda attrs, *inputs: torch.cat(inputs, attrs["axis"]), "ConstantOfShape": _constant_of_shape,
    "Conv": windows.conv, "ConvTranspose": windows.conv_transpose, "DepthToSpace": _depth_to_space,
    "Einsum": lambda attrs, *inputs: torch.einsum(attrs["equation"], *inputs),
    "Elu": lambda attrs, x: F.elu(x, attrs.get("alpha", 1.0)), "Flatten": _flatten, "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gelu": lambda attrs, x: F.gelu(x, approximate=attrs.get("approximate", "none")), "Gemm": _gemm,
    "GRU": recurrent.gru, "GroupNormalization": _group_norm,
    "HardSigmoid": lambda attrs, x: (x * attrs.get("alpha", 0.2) + attrs.get("beta", 0.5)).clamp(0.0, 1.0),
    "InstanceNormalization": lambda attrs, x, scale, bias: F.instance_norm(
        x, None, None, scale, bias, use_input_stats=True, eps=attrs.get("epsilon", 1e-5)),
    "LayerNormalization": _layer_norm,
    "LSTM": recurrent.lstm,
    "LeakyRelu": lambda attrs, x: F.leaky_relu(x, attrs.get("alpha", 0.01)), "LogSoftmax": _softmax(torch.log_softmax),
    "MaxPool": windows.max_pool, "Pad": _pad, "RMSNormalization": _rms_norm, "RNN": recurrent.rnn,
    "ReduceL1": _reduce(lambda x, dims, keep: x.abs().sum(dims, keep)),
    "ReduceL2": _reduce(lambda x, dims, keep: x.square().sum(dims, keep).sqrt()),
    "ReduceLogSumExp": _reduce(torch.logsumexp), "ReduceMax": _reduce(torch.amax), "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin), "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(lambda x, dims, keep: x.square().sum(dims, keep)), "Reshape": _reshape,
    "Resize": windows.resize, "ScatterND": _scatter_nd, "Shape": _shape,
    "Softmax": _softmax(torch.softmax), "Split": _split, "Squeeze": _squeeze,
    "Swish": lambda attrs, x: x * torch.sigmoid(x * attrs.get("alpha", 1.0)), "TopK": _top_k,
    "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    **{name: partial(_without_attributes, function) for name, function in PLAIN.items()},
}  # fmt: skip
