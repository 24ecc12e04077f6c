"""Stores the properties of a tensor that a safetensors file lacks: its order in memory, and further types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import StageError

ENTRY = "forms"
# Types that every version of the format has. Tensors of other types are written as bytes.
_STORED = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip


def to_file(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors in the format's types, and for each the properties that it lacks (its form)."""
    out = dict(tensors)
    forms: dict[str, Any] = {}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        form: dict[str, Any] = {}
        strides = dense(tensor)
        if strides != torch.empty(tensor.shape, device="meta").stride():
            form["strides"] = list(strides)
        if tensor.dtype not in _STORED:
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            out[name] = flat.view(torch.uint8)
            form |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if form:
            forms[name] = form
    return out, forms


def from_file(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `to_file` was called with."""
    out = dict(tensors)
    name = ""
    try:
        for name, form in meta.get(ENTRY, {}).items():
            tensor = tensors[name]
            if "dtype" in form:
                dtype = getattr(torch, form["dtype"])
                # view() to a wider type refuses a tensor without elements
                flat = tensor.view(dtype) if tensor.numel() else tensor.to(dtype)
                tensor = flat.reshape(form["shape"])
            if "strides" in form:
                strides = tuple(form["strides"])
                if not _permutes(tensor.shape, strides):
                    raise ValueError(f"strides {strides} of shape {tuple(tensor.shape)}")
                tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
            out[name] = tensor
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise StageError(f"damaged: the stored form does not fit the tensor ({error})", where=name) from error
    return out


def dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides that keep the order of the tensor's axes in memory, without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one storage, and the spans between their first and last elements intersect."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return max(a.storage_offset(), b.storage_offset()) <= min(last_element(a), last_element(b))


def last_element(tensor: Tensor) -> int:
    """Offset in its storage of the element with the greatest address."""
    offset = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offset += (size - 1) * stride
    return offset


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that is no plain block of numbers."""
    if tensor.is_meta:
        raise StageError("it is on the meta device: it has a shape but no data", where=name,
                         hint="save the model after its weights were loaded or initialised")  # fmt: skip
    kind = ""
    if tensor.is_nested:
        kind = "nested"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantized"
    if kind:
        raise StageError(f"it is a {kind} tensor, expected a dense one", where=name, hint="save it as a dense tensor")


def _permutes(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides are a permutation of dense ones."""
    # Others, from a forged file, could overlap or take any amount of memory.
    if len(shape) != len(strides) or min(strides, default=0) < 0:
        return False
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:  # its stride says nothing
            continue
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True
