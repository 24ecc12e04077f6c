"""Convolution, pooling and resizing in torch, and what the other operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Attrs = Mapping[str, Any]
Operator = Callable[..., Any]
OUTPUTS = "outputs"
"""An attribute that every node has here: the number of its outputs."""
_CONVS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}
_MAX_POOLS = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
_AVG_POOLS = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


def ints(value: Any) -> list[int]:
    """A list of integers, whether it is a tensor, an attribute or missing."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        value = value.reshape(-1).tolist()
    return [int(v) for v in value]


def _pads(attrs: Attrs, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """What is added before and after each spatial axis."""
    rank = len(kernel)
    auto = attrs.get("auto_pad", "NOTSET")
    if auto == "VALID":
        return [0] * rank, [0] * rank
    if auto == "NOTSET":
        pads = ints(attrs.get("pads")) or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    strides, dilations = _window(attrs, rank)
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        before.append(total // 2)
        after.append(total - total // 2)
    # SAME_UPPER puts the odd element at the end, SAME_LOWER at the start.
    if auto == "SAME_LOWER":
        return after, before
    return before, after


def _window(attrs: Attrs, rank: int) -> tuple[list[int], list[int]]:
    """Strides and dilations."""
    return ints(attrs.get("strides")) or [1] * rank, ints(attrs.get("dilations")) or [1] * rank


def padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """The last axes with constants before and after them; torch lists them from the last axis on."""
    pairs = [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
    if not any(pairs):
        return x
    return F.pad(x, pairs, value=value)


def conv(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    before, after = _pads(attrs, x.shape[2:], weight.shape[2:])
    strides, dilations = _window(attrs, x.ndim - 2)
    padding: list[int] = before
    # torch pads both ends of an axis alike.
    if before != after:
        x, padding = padded(x, before, after), [0] * len(before)
    return _CONVS[x.ndim](x, weight, bias, strides, padding, dilations, attrs.get("group", 1))


def conv_transpose(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.ndim - 2
    if attrs.get("output_shape") or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("ConvTranspose with output_shape or auto_pad")
    pads = ints(attrs.get("pads")) or [0] * (2 * rank)
    strides, dilations = _window(attrs, rank)
    extra = ints(attrs.get("output_padding")) or [0] * rank
    group = attrs.get("group", 1)
    if pads[:rank] == pads[rank:]:
        return _TRANSPOSED[x.ndim](x, weight, bias, strides, pads[:rank], extra, group, dilations)
    # torch crops both ends of an axis alike, so uneven pads are cut off the whole result.
    whole = _TRANSPOSED[x.ndim](x, weight, bias, strides, 0, extra, group, dilations)
    for axis in range(rank):
        size = whole.shape[axis + 2] - pads[axis] - pads[axis + rank]
        whole = whole.narrow(axis + 2, pads[axis], size)
    return whole


def max_pool(attrs: Attrs, x: Tensor) -> Tensor:
    if attrs[OUTPUTS] > 1:
        raise NotImplementedError("the indices of MaxPool")
    kernel = ints(attrs["kernel_shape"])
    before, after = _pads(attrs, x.shape[2:], kernel)
    strides, dilations = _window(attrs, len(kernel))
    # Padding is never the greatest.
    wide = padded(x, before, after, -math.inf)
    return _MAX_POOLS[x.ndim](wide, kernel, strides, 0, dilations, bool(attrs.get("ceil_mode", 0)))


def average_pool(attrs: Attrs, x: Tensor) -> Tensor:
    kernel = ints(attrs["kernel_shape"])
    before, after = _pads(attrs, x.shape[2:], kernel)
    strides, dilations = _window(attrs, len(kernel))
    counts_padding, ceil = bool(attrs.get("count_include_pad", 0)), bool(attrs.get("ceil_mode", 0))
    if any(d != 1 for d in dilations) or (before != after and ceil):
        raise NotImplementedError("AveragePool with dilations, or with uneven pads and ceil_mode")
    pool = _AVG_POOLS[x.ndim]
    # torch refuses pads of more than half the window.
    if before == after and all(2 * pad <= width for pad, width in zip(before, kernel, strict=True)):
        return pool(x, kernel, strides, before, ceil, counts_padding)
    total = pool(padded(x, before, after), kernel, strides)
    if counts_padding:
        return total
    # Both are means over whole windows: their ratio is the mean over what is no padding.
    return total / pool(padded(torch.ones_like(x), before, after), kernel, strides)


def resize(attrs: Attrs, x: Tensor, *rest: Tensor | None) -> Tensor:
    """Nearest and linear, one axis after the other."""
    _, scales, sizes = (*rest, None, None, None)[:3]
    mode = attrs.get("mode", "nearest")
    stretch = attrs.get("keep_aspect_ratio_policy", "stretch")
    if mode == "cubic" or attrs.get("antialias", 0) or stretch != "stretch":
        raise NotImplementedError(f"Resize with mode {mode}, antialias or keep_aspect_ratio_policy")
    dims = [d % x.ndim for d in ints(attrs.get("axes"))] or list(range(x.ndim))
    new_sizes = ints(sizes)
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
        share = (at - lower).reshape(-1, *[1] * (x.ndim - 1 - dim))
        low, high = (x.index_select(dim, (lower + i).clamp(0, size - 1).long()) for i in (0, 1))
        x = low * (1 - share) + high * share
    return x


def _source_places(attrs: Attrs, size: int, new_size: int, factor: float) -> Tensor:
    """Where each element of a resized axis lies on the axis before."""
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    at = torch.arange(new_size, dtype=torch.float32)
    if mode == "asymmetric":
        return at / factor
    if new_size == 1 and mode in ("align_corners", "pytorch_half_pixel"):
        return at
    if mode == "align_corners":
        return at * (size - 1) / (size * factor - 1)
    if mode not in ("half_pixel", "pytorch_half_pixel"):
        raise NotImplementedError(f"Resize with coordinates {mode}")
    return (at + 0.5) / factor - 0.5


def _rounded(attrs: Attrs, at: Tensor) -> Tensor:
    mode = attrs.get("nearest_mode", "round_prefer_floor")
    if mode == "floor":
        return at.floor()
    if mode == "ceil":
        return at.ceil()
    if mode == "round_prefer_floor":
        return (at - 0.5).ceil()
    return (at + 0.5).floor()
