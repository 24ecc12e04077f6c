"""Where BatchNorm is not the big batch, and that a converted model is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerline.training.loop import batch_norm


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4),
                         nn.BatchNorm1d(4), nn.Dropout(0.5))  # fmt: skip


def test_found_where_the_batch_decides() -> None:
    model = _net()
    assert batch_norm.batch_norms(model) == ["1", "5"]
    model[1].eval()
    assert batch_norm.batch_norms(model) == ["5"]
    frozen = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    assert batch_norm.batch_norms(frozen) == ["0"]  # it has nothing but the batch
    assert not batch_norm.batch_norms(nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4)))


def test_the_sentence() -> None:
    assert batch_norm.warning(_net(), 1) == "" == batch_norm.warning(nn.Linear(2, 2), 8)
    said = batch_norm.warning(_net(), 4)
    assert said.startswith("BatchNorm (layer 1 and 1 more) sees each micro-batch alone, so 4 of them")


def _gradient(model: nn.Module, x: Tensor, parts: int) -> list[Tensor]:
    model.zero_grad()
    for part in x.split(len(x) // parts):
        (model(part).square().sum() / len(x)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_after_conversion_accumulation_is_the_big_batch() -> None:
    model = _net()
    model[6] = nn.Identity()
    x = torch.randn(8, 3, 8, 8)
    apart = [
        float((a - b).norm() / a.norm()) for a, b in zip(_gradient(model, x, 1), _gradient(model, x, 4), strict=True)
    ]
    assert max(apart) > 0.1
    assert batch_norm.to_group_norm(model, 6) == ["1", "5"]
    assert isinstance(model[1], nn.GroupNorm) and (model[1].num_groups, model[5].num_groups) == (4, 4)
    whole, parts = _gradient(model, x, 1), _gradient(model, x, 4)
    assert max(float((a - b).norm() / a.norm()) for a, b in zip(whole, parts, strict=True)) < 1e-5
    assert not batch_norm.warning(model, 4)


def test_conversion_keeps_scale_shift_mode_and_a_shared_layer_shared() -> None:
    shared = nn.BatchNorm1d(6, eps=1e-3)
    shared.weight.data.fill_(2.0)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.BatchNorm1d(5, affine=False).eval()})
    weight = shared.weight
    assert batch_norm.to_group_norm(model, 4) == ["a", "c", "b.0"]
    new = model["a"]
    assert new is model["b"][0] and new.weight is weight and (new.num_groups, new.eps) == (3, 1e-3)
    assert model["c"].weight is None and not model["c"].training and model["c"].num_groups == 1
