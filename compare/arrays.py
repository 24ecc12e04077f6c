"""Converts tensors to the arrays that ONNX uses: complex numbers as pairs, float32 for types that numpy lacks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from layerline.backends.base import Array
from layerline.compare.tensor_distance import diff_arrays
from layerline.pipeline.report import LayerDiff

# Element types of torch that numpy lacks; onnxruntime can't return them to Python either.
NOT_IN_NUMPY = frozenset({torch.bfloat16}) | {
    t for n, t in vars(torch).items() if n.startswith("float8_") and isinstance(t, torch.dtype)
}


def array(tensor: Tensor) -> Array:
    """Converts to numpy. Complex numbers become (real, imaginary) along a new last axis, as the exporter writes them.

    Types that numpy lacks become float32, which holds all their values.
    """
    # Lazy conjugates and negations have no numpy form.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in NOT_IN_NUMPY:
        tensor = tensor.float()
    converted: Array = tensor.numpy()
    return converted


def tensor(array: Array, *, complex_pairs: bool = False) -> Tensor:
    """Copies an array into a tensor; with `complex_pairs` the last axis becomes complex numbers."""
    # In order and writable, as torch wants it.
    copy = torch.from_numpy(np.array(array, order="C"))
    if complex_pairs:
        return torch.view_as_complex(copy)
    return copy


def tensor_row(name: str, op: str, module: str, before: Tensor, after: Tensor) -> LayerDiff:
    """A report's row of one tensor under two sets of weights, not gated."""
    measures = diff_arrays(array(before), array(after)).measures()
    dtype = str(after.dtype).removeprefix("torch.")
    return LayerDiff(name=name, op=op, module=module, shape=tuple(after.shape), dtype=dtype, **measures)
