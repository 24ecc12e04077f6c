"""ONNX operators in torch, with gradients: opset 13 and later, those that networks are made of.

Each function takes the attributes of a node and its inputs, None for an optional one that is left out. What is not in
`TABLE` has no gradient here; `graph_module.py` computes it by onnx's own reference where none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Attrs = Mapping[str, Any]
Operator = Callable[..., Any]
OUTPUTS = "outputs"
"""An attribute that every node has here: the number of its outputs."""
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""torch's type of each element type of ONNX."""
_CONVS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}
_MAX_POOLS = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
_AVG_POOLS = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}
_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _ints(value: Any) -> list[int]:
    """A list of integers, whether it is a tensor, an attribute or missing."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        value = value.reshape(-1).tolist()
    return [int(v) for v in value]


def _axes(attrs: Attrs, axes: Tensor | None) -> list[int]:
    """Axes are an input from opset 13 or 18 on, and an attribute before."""
    return _ints(attrs.get("axes") if axes is None else axes)


def _without_attributes(function: Operator, attrs: Attrs, *inputs: Tensor | None) -> Any:  # noqa: ARG001
    return function(*inputs)


# Convolution and pooling.


def _pads(attrs: Attrs, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """What is added before and after each spatial axis."""
    rank = len(kernel)
    auto = attrs.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        pads = [0] * (2 * rank) if auto == "VALID" else _ints(attrs.get("pads")) or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    strides, dilations = _window(attrs, rank)
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if auto == "SAME_UPPER" else large)
        after.append(large if auto == "SAME_UPPER" else small)
    return before, after


def _window(attrs: Attrs, rank: int) -> tuple[list[int], list[int]]:
    """Strides and dilations."""
    return _ints(attrs.get("strides")) or [1] * rank, _ints(attrs.get("dilations")) or [1] * rank


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """The last axes with constants before and after them; torch lists them from the last axis on."""
    pairs = [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
    return F.pad(x, pairs, value=value) if any(pairs) else x


def _conv(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    before, after = _pads(attrs, x.shape[2:], weight.shape[2:])
    strides, dilations = _window(attrs, x.ndim - 2)
    padding: list[int] = before
    if before != after:
        x, padding = _padded(x, before, after), [0] * len(before)
    return _CONVS[x.ndim](x, weight, bias, strides, padding, dilations, attrs.get("group", 1))


def _conv_transpose(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.ndim - 2
    if attrs.get("output_shape") or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("ConvTranspose with output_shape or auto_pad")
    pads = _ints(attrs.get("pads")) or [0] * (2 * rank)
    strides, dilations = _window(attrs, rank)
    extra = _ints(attrs.get("output_padding")) or [0] * rank
    group = attrs.get("group", 1)
    if pads[:rank] == pads[rank:]:
        return _TRANSPOSED[x.ndim](x, weight, bias, strides, pads[:rank], extra, group, dilations)
    whole = _TRANSPOSED[x.ndim](x, weight, bias, strides, 0, extra, group, dilations)
    for axis in range(rank):
        size = whole.shape[axis + 2] - pads[axis] - pads[axis + rank]
        whole = whole.narrow(axis + 2, pads[axis], size)
    return whole


def _max_pool(attrs: Attrs, x: Tensor) -> Tensor:
    if attrs[OUTPUTS] > 1:
        raise NotImplementedError("the indices of MaxPool")
    kernel = _ints(attrs["kernel_shape"])
    before, after = _pads(attrs, x.shape[2:], kernel)
    strides, dilations = _window(attrs, len(kernel))
    padded = _padded(x, before, after, -math.inf)
    return _MAX_POOLS[x.ndim](padded, kernel, strides, 0, dilations, bool(attrs.get("ceil_mode", 0)))


def _average_pool(attrs: Attrs, x: Tensor) -> Tensor:
    kernel = _ints(attrs["kernel_shape"])
    before, after = _pads(attrs, x.shape[2:], kernel)
    strides, dilations = _window(attrs, len(kernel))
    counts_padding, ceil = bool(attrs.get("count_include_pad", 0)), bool(attrs.get("ceil_mode", 0))
    if any(d != 1 for d in dilations) or (before != after and ceil):
        raise NotImplementedError("AveragePool with dilations, or with uneven pads and ceil_mode")
    pool = _AVG_POOLS[x.ndim]
    if before == after and all(2 * pad <= width for pad, width in zip(before, kernel, strict=True)):
        return pool(x, kernel, strides, before, ceil, counts_padding)
    total = pool(_padded(x, before, after), kernel, strides)
    if counts_padding:
        return total
    # Both are means over whole windows: their ratio is the mean over what is no padding.
    return total / pool(_padded(torch.ones_like(x), before, after), kernel, strides)


def _global_pool(function: Callable[..., Tensor]) -> Operator:
    return lambda x: function(x, dim=tuple(range(2, x.ndim)), keepdim=True)


def _resize(attrs: Attrs, x: Tensor, *rest: Tensor | None) -> Tensor:
    """Nearest and linear, one axis after the other."""
    _, scales, sizes = (*rest, None, None, None)[:3]
    mode = attrs.get("mode", "nearest")
    stretch = attrs.get("keep_aspect_ratio_policy", "stretch")
    if mode == "cubic" or attrs.get("antialias", 0) or stretch != "stretch":
        raise NotImplementedError(f"Resize with mode {mode}, antialias or keep_aspect_ratio_policy")
    dims = [d % x.ndim for d in _ints(attrs.get("axes"))] or list(range(x.ndim))
    new_sizes = _ints(sizes)
    for place, dim in enumerate(dims):
        size = x.shape[dim]
        if new_sizes:
            factor = new_sizes[place] / size
            new_size = new_sizes[place]
        else:
            assert scales is not None
            factor = float(scales[place])
            new_size = math.floor(size * factor)
        if factor == 1:
            continue
        at = _source_places(attrs, size, new_size, factor).to(x.device)
        if mode == "nearest":
            x = x.index_select(dim, _rounded(attrs, at).clamp(0, size - 1).long())
            continue
        lower = at.floor()
        share = (at - lower).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        low, high = (x.index_select(dim, (lower + i).clamp(0, size - 1).long()) for i in (0, 1))
        x = low * (1 - share) + high * share
    return x


def _source_places(attrs: Attrs, size: int, new_size: int, factor: float) -> Tensor:
    """Where each element of a resized axis lies on the axis before."""
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    at = torch.arange(new_size, dtype=torch.float32)
    if mode == "asymmetric":
        return at / factor
    if mode == "align_corners":
        return at * (size - 1) / (size * factor - 1) if new_size > 1 else at
    if mode == "pytorch_half_pixel" and new_size == 1:
        return at
    if mode not in ("half_pixel", "pytorch_half_pixel"):
        raise NotImplementedError(f"Resize with coordinates {mode}")
    return (at + 0.5) / factor - 0.5


def _rounded(attrs: Attrs, at: Tensor) -> Tensor:
    mode = attrs.get("nearest_mode", "round_prefer_floor")
    if mode == "floor":
        return at.floor()
    if mode == "ceil":
        return at.ceil()
    return (at - 0.5).ceil() if mode == "round_prefer_floor" else (at + 0.5).floor()


# Products and normalisation.


def _gemm(attrs: Attrs, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.mT if attrs.get("transA", 0) else a
    b = b.mT if attrs.get("transB", 0) else b
    product: Tensor = a @ b * attrs.get("alpha", 1.0)
    if c is not None:
        product = product + c * attrs.get("beta", 1.0)
    return product


def _batch_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """With the statistics that the model stores: they stay as they are."""
    return F.batch_norm(x, mean.detach(), variance.detach(), scale, bias, False, 0.0, attrs.get("epsilon", 1e-5))


def _instance_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, attrs.get("epsilon", 1e-5))


def _layer_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if attrs[OUTPUTS] > 1:
        raise NotImplementedError("mean and deviation of LayerNormalization")
    axis = attrs.get("axis", -1) % x.ndim
    normalized = F.layer_norm(x, x.shape[axis:], eps=attrs.get("epsilon", 1e-5)) * scale
    return normalized if bias is None else normalized + bias


def _rms_norm(attrs: Attrs, x: Tensor, scale: Tensor) -> Tensor:
    axis = attrs.get("axis", -1) % x.ndim
    return F.rms_norm(x, x.shape[axis:], eps=attrs.get("epsilon", 1e-5)) * scale


def _group_norm(attrs: Attrs, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = attrs["num_groups"]
    if scale.numel() != x.shape[1]:  # before opset 21: one number a group
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, attrs.get("epsilon", 1e-5))


def _softmax(function: Callable[..., Tensor]) -> Operator:
    return lambda attrs, x: function(x, dim=attrs.get("axis", -1))


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None and high is None:
        return x
    return torch.clamp(x, low, high)


def _hard_sigmoid(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.clamp(x * attrs.get("alpha", 0.2) + attrs.get("beta", 0.5), 0.0, 1.0)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _pow(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(x, exponent).to(x.dtype)


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


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
    values, indices = torch.sort(x, dim=axis, descending=bool(attrs.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, int(count)), indices.narrow(axis, 0, int(count))


# Shapes and places.


def _reshape(attrs: Attrs, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    if not attrs.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(tuple(sizes))


def _flatten(attrs: Attrs, x: Tensor) -> Tensor:
    axis = attrs.get("axis", 1)
    if axis < 0:
        axis += x.ndim
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(attrs: Attrs, x: Tensor) -> Tensor:
    return x.permute(tuple(_ints(attrs.get("perm")) or range(x.ndim)[::-1]))


def _squeeze(attrs: Attrs, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _axes(attrs, axes)
    return x.squeeze(tuple(dims)) if dims else x.squeeze()


def _unsqueeze(attrs: Attrs, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _axes(attrs, axes)
    rank = x.ndim + len(dims)
    for dim in sorted(d % rank for d in dims):
        x = x.unsqueeze(dim)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, *rest: Tensor | None) -> Tensor:
    axes, steps = (*rest, None, None)[:2]
    first, last = _ints(starts), _ints(ends)
    dims = _ints(axes) if axes is not None else list(range(len(first)))
    strides = _ints(steps) if steps is not None else [1] * len(first)
    for start, end, dim, step in zip(first, last, dims, strides, strict=True):
        places = range(*slice(start, end, step).indices(x.shape[dim]))
        if step == 1:
            x = x.narrow(dim, min(places.start, x.shape[dim]), len(places))
        else:
            x = x.index_select(dim, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    return x


def _split(attrs: Attrs, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attrs.get("axis", 0)
    lengths = _ints(attrs.get("split") if sizes is None else sizes)
    # Without lengths the parts are equal, and the last one is what is left.
    equal_length = -(-x.shape[axis] // attrs[OUTPUTS])
    return torch.split(x, lengths or equal_length, axis)


def _pad(attrs: Attrs, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    amounts = _ints(pads)
    dims = [d % x.ndim for d in _ints(axes)] or list(range(x.ndim))
    before, after = [0] * x.ndim, [0] * x.ndim
    for place, dim in enumerate(dims):
        before[dim], after[dim] = amounts[place], amounts[place + len(dims)]
    mode = _PAD_MODES[attrs.get("mode", "constant")]
    if mode == "constant":
        return _padded(x, before, after, 0.0 if value is None else float(value))
    # torch takes two leading axes, which must not be padded, and up to three others.
    lead = max(x.ndim - 3, 1) if x.ndim > 2 else 0
    if any(before[:lead] + after[:lead]):
        raise NotImplementedError(f"Pad with mode {mode} of the first axes")
    pairs = [amount for pair in zip(before[lead:][::-1], after[lead:][::-1], strict=True) for amount in pair]
    widened = x.reshape(1, -1, *x.shape[lead:])
    return F.pad(widened, pairs, mode=mode).reshape(*x.shape[:lead], *(
        size + low + high for size, low, high in zip(x.shape[lead:], before[lead:], after[lead:], strict=True)
    ))  # fmt: skip


def _nonnegative(indices: Tensor, size: int) -> Tensor:
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
    sizes = torch.broadcast_shapes(x.shape, tuple(_ints(shape)))  # type: ignore[no-untyped-call]
    return x.broadcast_to(sizes)


def _depth_to_space(attrs: Attrs, x: Tensor) -> Tensor:
    size = attrs["blocksize"]
    if attrs.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    n, c, h, w = x.shape
    return F.pixel_shuffle(x.reshape(n, size * size, -1, h, w).transpose(1, 2).reshape(n, c, h, w), size)


def _shape(attrs: Attrs, x: Tensor) -> Tensor:
    sizes = list(x.shape)[attrs.get("start", 0) : attrs.get("end")]
    return torch.tensor(sizes, dtype=torch.int64, device=x.device)


def _constant_of_shape(attrs: Attrs, shape: Tensor) -> Tensor:
    value: Tensor = attrs.get("value", torch.zeros(1))
    return value.to(shape.device).reshape(()).expand(tuple(_ints(shape))).clone()


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
    "Not": torch.logical_not, "Or": torch.logical_or, "PRelu": _prelu, "Pow": _pow, "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Slice": _slice,
    "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Sub": torch.sub,
    "Sum": lambda *inputs: reduce(torch.add, inputs), "Tan": torch.tan, "Tanh": torch.tanh,
    "Tile": lambda x, repeats: x.repeat(_ints(repeats)), "Where": torch.where, "Xor": torch.logical_xor,
    "Range": lambda start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype,
                                                   device=start.device),
}  # fmt: skip
"""Operators without attributes that matter: functions of the inputs alone."""
TABLE: Mapping[str, Operator] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm, "Cast": _cast,
    "Concat": lambda attrs, *inputs: torch.cat(inputs, attrs["axis"]), "ConstantOfShape": _constant_of_shape,
    "Conv": _conv, "ConvTranspose": _conv_transpose, "DepthToSpace": _depth_to_space,
    "Einsum": lambda attrs, *inputs: torch.einsum(attrs["equation"], *inputs),
    "Elu": lambda attrs, x: F.elu(x, attrs.get("alpha", 1.0)), "Flatten": _flatten, "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gelu": lambda attrs, x: F.gelu(x, approximate=attrs.get("approximate", "none")), "Gemm": _gemm,
    "GroupNormalization": _group_norm, "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm, "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda attrs, x: F.leaky_relu(x, attrs.get("alpha", 0.01)), "LogSoftmax": _softmax(torch.log_softmax),
    "MaxPool": _max_pool, "Pad": _pad, "RMSNormalization": _rms_norm,
    "ReduceL1": _reduce(lambda x, dims, keep: x.abs().sum(dims, keep)),
    "ReduceL2": _reduce(lambda x, dims, keep: x.square().sum(dims, keep).sqrt()),
    "ReduceLogSumExp": _reduce(torch.logsumexp), "ReduceMax": _reduce(torch.amax), "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin), "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(lambda x, dims, keep: x.square().sum(dims, keep)), "Reshape": _reshape,
    "Resize": _resize, "ScatterND": _scatter_nd, "Shape": _shape,
    "Softmax": _softmax(torch.softmax), "Split": _split, "Squeeze": _squeeze,
    "Swish": lambda attrs, x: x * torch.sigmoid(x * attrs.get("alpha", 1.0)), "TopK": _top_k,
    "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    **{name: partial(_without_attributes, function) for name, function in PLAIN.items()},
}  # fmt: skip
