"""Tensors that may be split over ranks, for code that treats all alike: a whole, this rank's part, one split alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """The whole of a split tensor, on the CPU of every rank (all of them must ask, in one order); any other as it is.

    It is put together on the device of the split, over that device's links, and doesn't stay there: the whole of a
    split model may be more than a GPU holds.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    here: Tensor = tensor.to(device_of(tensor).type).full_tensor()  # type: ignore[attr-defined]
    return here.cpu()


def device_of(tensor: Tensor) -> torch.device:
    """Where layers compute with a parameter: one whose part is kept in CPU memory comes to the device of its split."""
    mesh = getattr(tensor, "device_mesh", None)
    return tensor.device if mesh is None or mesh.device_type == tensor.device.type else torch.device(mesh.device_type)


def is_split(model: nn.Module) -> bool:
    """Whether parameters of the model are split over ranks."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a split tensor; any other as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(target: Tensor, full: Tensor) -> Tensor:
    """`full`, which every rank has, split as `target` is (no communication)."""
    if not hasattr(target, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    # Torch puts it on the device of the split, where an offloaded target is not.
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to(target.device)
