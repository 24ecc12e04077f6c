"""Helpers for tensors that may be split over ranks (DTensor): the whole, the local part, another tensor split alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """The whole of a split tensor, on the CPU of every rank; any other tensor unchanged. A collective call: every rank
    must call it, in the same order."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    # Gathered on the device of the split, over that device's links. The whole model may be larger than a GPU's memory.
    full: Tensor = tensor.to(device_of(tensor).type).full_tensor()  # type: ignore[attr-defined]
    return full.cpu()


def device_of(tensor: Tensor) -> torch.device:
    """The device on which layers compute with a parameter; what `fully_shard` offloads is in CPU memory in between."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or mesh.device_type == tensor.device.type:
        return tensor.device
    return torch.device(mesh.device_type)


def is_split(model: nn.Module) -> bool:
    """Whether the model has parameters that are split over ranks."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a split tensor; any other tensor unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(target: Tensor, full: Tensor) -> Tensor:
    """`full`, which every rank has, split as `target` is, without communication."""
    if not hasattr(target, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    # torch puts the result on the device of the split; an offloaded target is in CPU memory.
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to(target.device)
