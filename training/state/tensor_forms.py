"""What a safetensors file can't say of a tensor: the order of its memory, and types that the format has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import StageError

ENTRY = "forms"
# Every version of the format has these; other types are written as bytes.
_STORED = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip


def to_file(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as the format has them, and what it can't say of each.

    Raises:
        StageError: a tensor without plain numbers: sparse, quantized or on the meta device.
    """
    out, forms = dict(tensors), {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else tensor.layout
            raise StageError(f"a tensor that is {kind} cannot be saved", where=name)
        form: dict[str, Any] = {}
        if (strides := dense(tensor)) != torch.empty(tensor.shape, device="meta").stride():
            form["strides"] = list(strides)
        if tensor.dtype not in _STORED:
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            out[name] = flat.view(torch.uint8)
            form |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if form:
            forms[name] = form
    return out, forms


def from_file(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors as they were.

    Raises:
        StageError: the notes don't fit the tensors.
    """
    out, name = dict(tensors), ""
    try:
        for name, form in meta.get(ENTRY, {}).items():
            tensor = tensors[name]
            if "dtype" in form:
                dtype = getattr(torch, form["dtype"])
                tensor = (tensor.view(dtype) if tensor.numel() else tensor.to(dtype)).reshape(form["shape"])
            if "strides" in form:
                strides = tuple(form["strides"])
                if not _permutes(tensor.shape, strides):
                    raise ValueError(f"strides {strides} of shape {tuple(tensor.shape)}")
                tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
            out[name] = tensor
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise StageError(f"damaged: what is noted of the tensor does not fit it ({error})", where=name) from error
    return out


def dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the tensor's axes in their order of memory, without gaps: its own, where it has none."""
    return torch.empty_like(tensor, device="meta").stride()


def _permutes(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides only order the axes: others would overlap, or take any amount of memory."""
    if len(shape) != len(strides) or any(s < 0 for s in strides):
        return False
    step = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True
