"""Tensors that may be split over ranks, for code that treats all alike: a whole, this rank's part, one split alike."""

from __future__ import annotations

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """The whole of a split tensor, on every rank (all of them must ask, in one order); any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


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
    return distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
