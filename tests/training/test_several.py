"""An update rule per name pattern, against two optimizers held by hand; resumed, joined and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.norm(self.embed(ids)))


MUON = {"match": "body.*", "name": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0}
CONFIG: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "groups": [MUON]},
    "scheduler": {"name": "cosine", "total_steps": 12, "warmup_steps": 2},
    "clip": {"max_norm": 0.2},
}
MATRICES = ["body.0.weight", "body.2.weight"]


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _loss(net: nn.Module, step: int) -> Tensor:
    ids = torch.randint(0, 9, (8, 4), generator=torch.Generator().manual_seed(step))
    return net(ids).square().mean()


def _train(net: nn.Module, mo: ModelOptimizer, start: int, end: int) -> None:
    for step in range(start, end):
        mo.step(_loss(net, step))


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_two_rules_are_the_two_optimizers_one_would_hold() -> None:
    net, other = _net(), _net()
    mo = ModelOptimizer(net, CONFIG)
    assert mo.optimizer.parts["muon"].param_groups[0]["momentum"] == 0.9
    params = dict(other.named_parameters())
    decayed = [params["embed.weight"]]
    rest = [p for n, p in params.items() if n not in MATRICES and n != "embed.weight"]
    optimizers = [
        torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                          lr=1e-2, fused=True),
        torch.optim.Muon([params[n] for n in MATRICES], lr=0.02, momentum=0.9, weight_decay=0.0),
    ]  # fmt: skip
    bases = (1e-2, 0.02)
    for step in range(6):
        for optimizer, base in zip(optimizers, bases, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * mo.lanes[""].rate.schedule(step)
        loss = _loss(other, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        result = mo.step(_loss(net, step))
        assert result.moved and result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert mo.grad_norm > 0.2, "the clip was at work, over all parameters"
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rules", [
    [MUON],
    [{"match": "*", "name": "lion", "lr_scale": 0.1}],
    [{"match": "embed.*", "name": "adamw", "betas": (0.5, 0.9)}, {"match": "*", "name": "muon"},
     {"match": "*.bias", "name": "sgd", "momentum": 0.9, "nesterov": True}],
    [{"match": "body.*", "name": "lamb"}, {"match": "norm.*", "name": "adafactor"}],
])  # fmt: skip
def test_resuming_and_copying_go_on_bit_for_bit(rules: list[dict[str, Any]], tmp_path: Path) -> None:
    config = {**CONFIG, "optimizer": {**CONFIG["optimizer"], "groups": rules}, "accumulate": {"steps": 2}}
    net = _net()
    mo = ModelOptimizer(net, config)
    _train(net, mo, 0, 7)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    other, twin = Net(), copy.deepcopy(mo)
    resumed = ModelOptimizer(other, config)
    resumed.load_ckpt(path)
    for model, optimizer in ((net, mo), (other, resumed), (twin.model, twin)):
        _train(model, optimizer, 7, 16)
    assert _same(net, other) and _same(net, twin.model)


@pytest.mark.filterwarnings("ignore:resuming with another configuration")
def test_a_state_is_not_given_to_another_rule(tmp_path: Path) -> None:
    net = _net()
    mo = ModelOptimizer(net, CONFIG)
    _train(net, mo, 0, 2)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    groups = [{**MUON, "match": "body.2.*"}]
    other = ModelOptimizer(_net(), {**CONFIG, "optimizer": {**CONFIG["optimizer"], "groups": groups}})
    with pytest.raises(StageError, match="muon stepped it when the checkpoint was written, and adamw") as caught:
        other.load_ckpt(path)
    assert caught.value.where == "body.0.weight"


def test_parameters_that_join_go_to_their_rule() -> None:
    net = _net()
    mo = ModelOptimizer(net, CONFIG)
    _train(net, mo, 0, 3)
    net.body.append(nn.Linear(5, 5))
    assert mo.join() == ["body.3.weight", "body.3.bias"]
    _train(net, mo, 3, 6)
    parts = mo.optimizer.parts
    assert any(p is net.body[3].weight for g in parts["muon"].param_groups for p in g["params"])
    assert any(p is net.body[3].bias for g in parts["adamw"].param_groups for p in g["params"])
    rate = mo.lanes[""].rate
    shares = {g["lr"] / base for g, base in zip(mo.param_groups, rate._bases, strict=True)}
    assert max(shares) == pytest.approx(min(shares)), "all follow the one schedule"
    plain = ModelOptimizer(_net(), {"optimizer": {"groups": [{**MUON, "match": "body.*"}]}})
    plain.model.extra = nn.Linear(2, 2)
    assert plain.join() == ["extra.weight", "extra.bias"]


def test_the_plan_names_rules() -> None:
    net = _net()
    mo = ModelOptimizer(net, CONFIG)
    plan = mo.plan()
    assert plan.optimizer.startswith("AdamW(lr=0.01") and " + Muon(lr=" in plan.optimizer
    assert plan.groups["body.0.weight"][0] == "muon, no decay, lr 0.02"
    assert plan.groups["body.0.bias"][0] == "no decay", "a bias that matches keeps the configured rule and rate"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "muon"}, "norm.weight has the shape"),
        ({"groups": [{"match": "*", "name": "custom"}]}, "steps the whole model"),
        ({"groups": [{"match": "*", "name": "lion", "momentum": 0.5}]}, "momentum is not for lion"),
        ({"groups": [{"match": "*", "lr": 0.1, "betas": (0.5, 0.9)}]}, "betas needs name"),
        ({"groups": [{"match": "*", "name": "sgd", "nesterov": True}]}, "nesterov needs momentum"),
        ({"groups": [{"match": "*", "name": "adamm"}]}, "adamm"),
    ],
)
def test_what_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(_net(), {"optimizer": optimizer})
    assert caught.value.where.startswith("optimizer") and message in str(caught.value)


def test_names_are_the_same_in_upper_and_lower_case() -> None:
    mo = ModelOptimizer(_net(), {"optimizer": {"groups": [{"match": "body.*", "name": "Muon"}]}})
    assert list(mo.optimizer.parts) == ["adamw", "muon"]
