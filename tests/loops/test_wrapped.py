"""A loop around a wrapped model, as Fabric's `setup` returns one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer
from tests.loops import Losses, agree, batches, images


class _FabricModule(nn.Module):
    """Hands a call on to the module it holds under the name `_forward_module`."""

    __module__ = "lightning_fabric.wrappers"  # wrappers are known by their package and name

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)


def classifier() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    return _FabricModule(net), batches(*images(96, 8), 8)


def plain_fabric() -> Losses:
    model, data = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adopted(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[ModelOptimizer, Losses]:
    mo = ModelOptimizer(model, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}, clip={"max_norm": 0.5})
    return mo, [float(mo.step(F.cross_entropy(model(x), y))) for x, y in data]


def adopted_fabric() -> Losses:
    return adopted(*classifier())[1]


def test_fabric() -> None:
    agree(plain_fabric, adopted_fabric, exact=False)


def test_names_are_those_of_the_model_inside(tmp_path: Path) -> None:
    model, data = classifier()
    mo, _ = adopted(model, data)
    inside = model._forward_module
    assert isinstance(inside, nn.Module)
    inside.load_state_dict(mo.export())
    # A checkpoint of the wrapped model fits the plain one.
    torch.manual_seed(3)
    plain = classifier()[0]._forward_module
    assert isinstance(plain, nn.Module)
    other, _ = adopted(plain, data[:1])
    other.load_ckpt(mo.save_ckpt(tmp_path / "wrapped.safetensors"))
    assert all(torch.equal(value, other.export()[name]) for name, value in mo.export().items())
