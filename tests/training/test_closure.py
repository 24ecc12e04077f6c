"""Optimizers that evaluate the loss themselves: against the loops one writes for them by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _loss(net: nn.Module) -> Tensor:
    return (net(X) - X.sum(1, keepdim=True)).square().mean()


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=5)


def _sam(params: Any) -> torch.optim.Optimizer:
    return pytorch_optimizer.SAM(params, torch.optim.SGD, rho=0.05, lr=0.1)


def _by_hand(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> list[Tensor]:
    net = _net()
    optimizer = make(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(net)
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, pytorch_optimizer.SAM):
            closure()
        optimizer.step(closure)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("make", [_lbfgs, _sam], ids=["LBFGS", "SAM"])
def test_it_steps_as_the_loop_by_hand(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    net = _net()
    mo = ModelOptimizer(net, {"training": {"ema_decay": 0.5}}, optimizer=make(net.parameters()))
    first = _loss(net).item()
    results = [mo.step(closure=lambda: _loss(net)) for _ in range(3)]
    assert all(results)
    assert float(results[0]) == pytest.approx(first)
    assert mo.global_step == 3
    for ours, theirs in zip(net.parameters(), _by_hand(make, 3), strict=True):
        assert torch.equal(ours, theirs)
    assert mo.lanes[""].loss < first


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    def train(net: nn.Module, mo: ModelOptimizer, steps: int) -> None:
        for _ in range(steps):
            mo.step(closure=lambda: _loss(net))

    net, other = _net(), _net()
    mo = ModelOptimizer(net, {}, optimizer=_lbfgs(net.parameters()))
    train(net, mo, 2)
    mo.save_ckpt(tmp_path / "x.safetensors")
    resumed = ModelOptimizer(other, {}, optimizer=_lbfgs(other.parameters()))
    resumed.load_ckpt(tmp_path / "x.safetensors")
    train(net, mo, 2)
    train(other, resumed, 2)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_not_finite_is_rejected_and_changes_nothing() -> None:
    net = _net()
    mo = ModelOptimizer(net, {}, optimizer=_lbfgs(net.parameters()))
    before = [p.detach().clone() for p in net.parameters()]
    assert not mo.step(closure=lambda: _loss(net) * math.nan)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    assert mo.lanes[""].skipped == 1


@pytest.mark.parametrize("make", [_lbfgs, lambda p: pytorch_optimizer.AliG(p)], ids=["LBFGS", "AliG"])
def test_without_a_closure_it_says_how_to_give_one(make: Callable[[Any], Any]) -> None:
    net = _net()
    mo = ModelOptimizer(net, {}, optimizer=make(net.parameters()))
    with pytest.raises(ConfigError) as caught:
        mo.step(_loss(net))
    assert "closure=" in caught.value.hint


@pytest.mark.parametrize(("config", "word"), [
    ({"training": {"accumulate_steps": 2}}, "accumulate.steps"), ({"precision": {"amp": "fp16"}}, "bf16"),
])  # fmt: skip
def test_what_does_not_go_with_a_closure_is_refused(config: dict[str, Any], word: str) -> None:
    net = _net()
    mo = ModelOptimizer(net, config, optimizer=_lbfgs(net.parameters()))
    with pytest.raises(ConfigError, match=word):
        mo.step(closure=lambda: _loss(net))


def test_an_optimizer_of_the_table_needs_none() -> None:
    net = _net()
    with pytest.raises(ConfigError, match=r"mo.step\(loss\)"):
        ModelOptimizer(net, {}).step(closure=lambda: _loss(net))


def test_wsam_with_batch_norm_follows_the_batch_and_resumes_exactly(tmp_path: Path) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def wsam(model: nn.Module) -> torch.optim.Optimizer:
        return pytorch_optimizer.WSAM(model, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def closure() -> Tensor:
        loss = _loss(by_hand)
        loss.backward()
        return loss

    by_hand = net()
    optimizer = wsam(by_hand)
    for _ in range(6):
        optimizer.zero_grad()
        optimizer.step(closure)
    straight, resumed = net(), net()
    mo = ModelOptimizer(straight, {}, optimizer=wsam(straight))
    for step in range(6):
        if step == 3:
            mo.save_ckpt(tmp_path / "a.safetensors")
        mo.step(closure=lambda: _loss(straight))
    again = ModelOptimizer(resumed, {}, optimizer=wsam(resumed))
    again.load_ckpt(tmp_path / "a.safetensors")
    for _ in range(3):
        again.step(closure=lambda: _loss(resumed))
    for name, tensor in by_hand.state_dict().items():
        assert torch.equal(tensor, straight.state_dict()[name]), name
        assert torch.equal(tensor, resumed.state_dict()[name]), name
