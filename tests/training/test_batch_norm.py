"""How far BatchNorm is from the big batch, by hand; and that a converted model is not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.loop import batch_norm


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4),
                         nn.BatchNorm1d(4), nn.Dropout(0.5))  # fmt: skip


def test_found_where_the_batch_decides() -> None:
    model = _net()
    assert list(batch_norm.batch_norms(model)) == ["1", "5"]
    model[1].eval()
    assert list(batch_norm.batch_norms(model)) == ["5"]
    frozen = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    assert list(batch_norm.batch_norms(frozen)) == ["0"]  # it has nothing but the batch
    assert not batch_norm.batch_norms(nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4)))


def test_the_sentence() -> None:
    assert batch_norm.warning(_net(), 1) == "" == batch_norm.warning(nn.Linear(2, 2), 8)
    said = batch_norm.warning(_net(), 4)
    assert said.startswith("1 and 1 more: BatchNorm sees each micro-batch alone, so 4 of them")


def test_deviation_by_hand() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1, eps=1e-12, affine=False))
    x = torch.tensor([[0.0], [2.0], [4.0], [6.0]])  # mean 3, variance 5; halves have means 1 and 5, variance 1
    seen = batch_norm.deviation(model, [x], 2)
    (layer,) = seen.layers
    assert (layer.name, layer.samples) == ("0", 2)
    assert layer.mean == pytest.approx(2 / math.sqrt(5))
    assert layer.variance == pytest.approx(1 / 5)
    whole = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / math.sqrt(5)
    halves = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    assert layer.output == pytest.approx(float((halves - whole).norm() / whole.norm()))
    assert seen.output == pytest.approx(layer.output, rel=1e-5)


def test_no_deviation_where_the_parts_are_alike() -> None:
    half = torch.randn(6, 3, 8, 8)
    seen = batch_norm.deviation(_net(), [torch.cat([half, half])], 2)
    assert [d.name for d in seen.layers] == ["1", "5"]
    assert seen.output < 1e-5 and all(d.output < 1e-6 and d.mean < 1e-6 for d in seen.layers)
    assert all(d.variance == pytest.approx(1, rel=1e-6) for d in seen.layers)


def test_smaller_micro_batches_deviate_more() -> None:
    x = torch.randn(32, 3, 8, 8)
    seen = [batch_norm.deviation(_net(), [x], n) for n in (2, 4, 16)]
    assert seen[0].output < seen[1].output < seen[2].output
    assert [s.layers[0].samples for s in seen] == [16 * 36, 8 * 36, 2 * 36]
    assert seen[0].layers[1].variance > seen[1].layers[1].variance > seen[2].layers[1].variance


def test_measuring_leaves_no_trace() -> None:
    model = _net()
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    batch_norm.deviation(model, [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))], 2)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and torch.equal(state, torch.get_rng_state())


def test_two_inputs_and_a_function_that_picks_the_output() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"first": a, "second": self.norm(a * b)}

    a, b = torch.randn(2, 8, 3)
    by_default = batch_norm.deviation(Two(), [a, b], 4)
    assert by_default.output == 0.0
    assert batch_norm.deviation(Two(), [a, b], 4, lambda m, *x: m(*x)["second"]).output > 0.1


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="no BatchNorm in training mode"):
        batch_norm.deviation(nn.Linear(2, 2), [torch.zeros(4, 2)], 2)
    with pytest.raises(ConfigError, match="4 parts of 4 samples"):
        batch_norm.deviation(nn.BatchNorm1d(2), [torch.zeros(4, 2)], 4)


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


def test_synchronised_batch_norm() -> None:
    model = _net()
    assert batch_norm.to_sync_batch_norm(model) == ["1", "5"]
    assert isinstance(model[1], nn.SyncBatchNorm) and isinstance(model[5], nn.SyncBatchNorm)
    assert batch_norm.to_sync_batch_norm(model) == []
    assert batch_norm.to_group_norm(model) == []
