"""Converts tensors to the arrays that ONNX uses: complex numbers as pairs, float32 for types that numpy lacks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from layerline.backends.base import Array

NOT_IN_NUMPY = frozenset({torch.bfloat16}) | {
    t for n, t in vars(torch).items() if n.startswith("float8_") and isinstance(t, torch.dtype)
}
"""Element types of torch that numpy lacks; onnxruntime can't return them to Python either."""


def array(tensor: Tensor) -> Array:
    """Converts to numpy. Complex numbers become (real, imaginary) along a new last axis, as the exporter writes them.

    Types that numpy lacks become float32, which holds all their values.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in NOT_IN_NUMPY:
        tensor = tensor.float()
    converted: Array = tensor.numpy()
    return converted


def tensor(array: Array, *, complex_pairs: bool = False) -> Tensor:
    """Copies an array into a tensor; with `complex_pairs` the last axis becomes complex numbers."""
    copy = torch.from_numpy(np.array(array, order="C"))
    if complex_pairs:
        return torch.view_as_complex(copy)
    return copy
