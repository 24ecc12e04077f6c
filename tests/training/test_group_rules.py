"""Rates and decays by name pattern, rates by block, and clipping by value: against optimizers made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _loss(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (net(x) - x[:, :2]).square().mean()


def _trained(config: dict[str, Any], steps: int = 4) -> tuple[Net, ModelOptimizer]:
    net = _net()
    mo = ModelOptimizer(net, config)
    for step in range(steps):
        mo.step(_loss(net, step))
    return net, mo


def _by_hand(groups: list[dict[str, Any]], net: Net, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        _loss(net, step).backward()
        optimizer.step()


def test_rules_by_name_are_the_groups_one_would_write() -> None:
    rules = [{"match": "head.*", "lr": 1e-3, "weight_decay": 0}, {"match": "blocks.*", "lr_scale": 0.5}]
    net, mo = _trained({"optimizer": {"lr": 1e-2, "weight_decay": 0.1, "groups": rules}})
    other = _net()
    blocks = [p for n, p in other.named_parameters() if n.startswith("blocks") and p.ndim > 1]
    biases = [p for n, p in other.named_parameters() if n.startswith("blocks") and p.ndim == 1]
    _by_hand([
        {"params": [other.stem.weight], "weight_decay": 0.1}, {"params": [other.stem.bias], "weight_decay": 0.0},
        {"params": blocks, "weight_decay": 0.1, "lr": 5e-3}, {"params": biases, "weight_decay": 0.0, "lr": 5e-3},
        {"params": [*other.head.parameters()], "weight_decay": 0.0, "lr": 1e-3},
    ], other)  # fmt: skip
    for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    text = str(mo.plan())
    assert "no decay, lr 0.001" in text
    assert "decay, lr 0.005" in text


def test_layer_decay_falls_from_block_to_block() -> None:
    _, mo = _trained({"optimizer": {"lr": 1.0, "layer_decay": 0.5}}, steps=0)
    (lane,) = mo.lanes.values()
    rate_of = {id(p): g["lr"] for g in lane.optimizer.param_groups for p in g["params"]}
    rates = {n: rate_of[id(p)] for n, p in zip(lane.names, lane.params, strict=True)}
    assert rates["head.weight"] == 1.0
    assert [rates[f"blocks.{i}.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert rates["stem.bias"] == 0.0625
    assert mo.current_lr == 1.0


def test_layer_decay_in_front_of_a_head_whose_blocks_are_frozen() -> None:
    net = _net()
    net.stem.requires_grad_(False)
    net.blocks.requires_grad_(False)
    mo = ModelOptimizer(net, {"optimizer": {"lr": 1.0, "layer_decay": 0.5}})
    assert [g["lr"] for g in mo.param_groups] == [1.0, 1.0]  # the head's weight, and its bias


def test_layer_decay_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Linear(2, 2), {"optimizer": {"layer_decay": 0.5}})
    assert caught.value.where == "optimizer.layer_decay"


def test_a_pattern_that_matches_nothing_names_the_nearest_parameter() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(_net(), {"optimizer": {"groups": [{"match": "hed.weight", "lr": 1}]}})
    assert caught.value.where == "optimizer.groups.0.match"
    assert "head.weight" in caught.value.hint


def test_rules_follow_the_schedule_and_resume_bit_for_bit(tmp_path: Path) -> None:
    config = {
        "optimizer": {"lr": 1e-2, "groups": [{"match": "head.*", "lr": 1e-3}]},
        "scheduler": {"name": "linear", "total_steps": 8},
    }
    straight, _ = _trained(config, steps=8)
    _, mo = _trained(config, steps=4)
    mo.save_ckpt(tmp_path / "half.safetensors")
    net = _net()
    resumed = ModelOptimizer(net, config)
    resumed.load_ckpt(tmp_path / "half.safetensors")
    (lane,) = resumed.lanes.values()
    assert {g["lr"] for g in lane.optimizer.param_groups} == {5e-3, 5e-4}
    for step in range(4, 8):
        resumed.step(_loss(net, step))
    for (name, ours), theirs in zip(net.named_parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_clipping_by_value_is_torchs() -> None:
    config = {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"grad_clip_value": 0.01}}
    net, _ = _trained(config)
    other = _net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        _loss(other, step).backward()
        torch.nn.utils.clip_grad_value_(other.parameters(), 0.01)
        optimizer.step()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_clipping_by_norm_and_by_value_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        ModelOptimizer(_net(), {"clip": {"max_norm": 1, "value": 1}})


def test_a_rule_matches_a_tied_parameter_by_any_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    config = {"optimizer": {"lr": 1e-2, "groups": [{"match": "head.*", "lr": 1e-3}]}}
    (group,) = ModelOptimizer(Tied(), config).param_groups
    assert group["lr"] == 1e-3


class _Both(nn.Module):
    def __init__(self, encoder_layers: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


def test_layer_decay_refuses_an_encoder_beside_a_decoder() -> None:
    config = {"optimizer": {"lr": 1.0, "layer_decay": 0.5}}
    with pytest.raises(ConfigError, match=r"decoder and encoder"):
        ModelOptimizer(_Both(3), config)
    (lane,) = ModelOptimizer(_Both(2), config).lanes.values()
    assert lane.members[0].share == 2**-5  # the smaller stack comes before the blocks


def test_layer_decay_of_a_model_that_is_its_own_stack() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mo = ModelOptimizer(net, {"optimizer": {"lr": 1.0, "layer_decay": 0.5}})
    assert sorted({g["lr"] for g in mo.param_groups}) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("rule", "where", "what", "hint"),
    [
        ({"lr": 0.1}, ".match", "it is required, and missing", ""),
        ({"math": "head.*", "lr": 0.1}, ".math", "unknown field", "did you mean 'match'?"),
        ({"match": "head.*", "lr": float("nan")}, ".lr", "expected a finite number, saw nan", ""),
    ],
)
def test_a_mistake_in_a_rule_is_told_with_its_field(rule: dict[str, Any], where: str, what: str, hint: str) -> None:
    groups = [{"match": "body.*", "lr": 0.1}, rule]
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(_net(), {"optimizer": {"groups": groups}})
    assert (caught.value.where, caught.value.what) == (f"optimizer.groups.1{where}", what)
    assert caught.value.hint == hint


def test_a_rule_that_an_earlier_one_hides_is_told() -> None:
    rules = [{"match": "head.*", "lr": 0.1}, {"match": "head.weight", "lr": 0.2}, {"match": "*.bias", "name": "muon"}]
    mo = ModelOptimizer(_net(), {"optimizer": {"groups": rules}})
    assert [text.partition(" (")[0] for text in mo.warnings] == ["optimizer.groups.1", "optimizer.groups.2"]


def test_adafactor_beside_a_parameter_without_elements() -> None:
    net = _net()
    net.empty = nn.Parameter(torch.zeros(0, 4))
    mo = ModelOptimizer(net, {"optimizer": {"name": "adafactor", "lr": 0.1}})
    before = net.head.weight.detach().clone()
    assert mo.step(_loss(net, 0)) and not torch.equal(net.head.weight, before)
    assert mo.plan().groups["empty"][2] == 0


@pytest.mark.parametrize("custom", [False, True])
def test_a_parameter_without_elements_that_joins_later_is_left_alone(custom: bool) -> None:
    net = _net()
    optimizer = torch.optim.Adafactor(net.parameters(), lr=0.1) if custom else None
    config = {} if custom else {"optimizer": {"name": "adafactor", "lr": 0.1}}
    mo = ModelOptimizer(net, config, optimizer=optimizer)
    net.empty = nn.Parameter(torch.zeros(0, 4))
    if optimizer is not None:
        optimizer.add_param_group({"params": [net.empty]})
    assert mo.join() == ["empty"]
    before = net.head.weight.detach().clone()
    assert mo.step(_loss(net, 0) + net.empty.sum()) and not torch.equal(net.head.weight, before)
