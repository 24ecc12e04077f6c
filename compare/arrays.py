"""Tensors as the arrays that ONNX knows: complex numbers as pairs on a last axis, wider types for what numpy lacks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from layerline.backends.base import Array

NOT_IN_NUMPY = frozenset({torch.bfloat16}) | {
    t for n, t in vars(torch).items() if n.startswith("float8_") and isinstance(t, torch.dtype)
}
"""Element types of torch that numpy has not; onnxruntime can't give them to Python either."""


def array(tensor: Tensor) -> Array:
    """As numpy. Complex numbers become (real, imaginary) along one axis more, as the exporter writes them; what numpy
    has no type for becomes float32, which holds all of it."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    found: Array = (tensor.float() if tensor.dtype in NOT_IN_NUMPY else tensor).numpy()
    return found


def tensor(given: Array, *, complex_pairs: bool = False) -> Tensor:
    """A tensor with memory of its own; of complex numbers where the array holds pairs of them."""
    found = torch.from_numpy(np.array(given, order="C"))
    return torch.view_as_complex(found) if complex_pairs else found
