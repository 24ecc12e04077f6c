"""The norm of a gradient: the one number that each step reads from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Reading a few numbers beats launching two kernels.
_FEW = 32
# One copy of all gradients costs less than a kernel for each where they have so few elements in all, or on average.
_SMALL, _SMALL_ON_AVERAGE = 2**14, 2**11
# Above 16 MB of float32 the copy is felt in memory.
_GREATEST_COPY = 2**22


def is_small(params: Sequence[Tensor]) -> bool:
    """Whether the gradients of `params` are of one kind and so small that one kernel over a copy is faster."""
    total = sum(p.numel() for p in params)
    limit = max(_SMALL, min(_SMALL_ON_AVERAGE * len(params), _GREATEST_COPY))
    return total <= limit and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in params)


def norm(grads: list[Tensor]) -> float:
    """The norm of all of them, over a copy."""
    whole = torch._C._nn.flatten_dense_tensors(grads)
    return math.sqrt(whole.dot(whole).item())


def numbers(values: Sequence[Tensor]) -> list[float]:
    """The numbers in tensors of one element. Of one GPU they are read together: each read waits until it is idle."""
    if len(values) > 1 and values[0].device.type != "cpu" and all(v.device == values[0].device for v in values):
        read: list[float] = torch.stack(list(values)).tolist()
        return read
    return [v.item() for v in values]


def total_norm(parts: Sequence[Tensor]) -> float:
    """The norm of a vector, from the norms of its parts."""
    # Python's floats are float64, which has room for any float32 squared.
    if len(parts) <= _FEW or any(n.device != parts[0].device for n in parts):
        return math.hypot(*numbers(parts))
    return float(torch.linalg.vector_norm(torch.stack(list(parts))).item())
