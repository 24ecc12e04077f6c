"""A run in any order of memory goes on bit for bit, and the fused kernel sees all of a parameter in one order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.training.optimizers.registry import TABLE
from layerline.training.state import safetensors_io

# muon takes matrices alone: see test_several.py.
OF_ANY_SHAPE = [name for name in TABLE if name != "muon"]

LAST = torch.channels_last


def _net(kind: str = "channels_last") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(36, 2))
    if kind == "channels_last":
        model.to(memory_format=LAST)
    elif kind == "views":
        model[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3).mul(0.2).transpose(2, 3))
        model[4].weight = nn.Parameter(torch.randn(36, 2).mul(0.2).t())
    elif kind == "gaps":
        model[4].weight = nn.Parameter(torch.randn(2, 72).mul(0.2)[:, ::2])
    return model


def _loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    loss: Tensor = (model(x.to(dtype)).float() - 1).square().mean()
    return loss


def _run(mo: ModelOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        mo.step(_loss(mo.model, step))


def _config(name: str) -> dict[str, Any]:
    momentum = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    return {"optimizer": {"name": name, "lr": 0.01, **momentum}, "training": {"ema_decay": 0.9, "accumulate_steps": 2}}


def _same(one: ModelOptimizer, other: ModelOptimizer) -> bool:
    pairs = [(one.lanes[""].named.tensors, other.lanes[""].named.tensors), (one.export(), other.export())]
    return all(torch.equal(tensor, b[name]) for a, b in pairs for name, tensor in a.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["channels_last", "views"])
@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_each_rule_goes_on_in_any_order_of_memory(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From a file, from a copy, in mid-window; half weights have masters in the same order."""
    mo = ModelOptimizer(_net(kind).to(dtype), _config(name))
    _run(mo, 0, 7)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    again = ModelOptimizer(_net(kind).to(dtype), _config(name))
    again.load_ckpt(path)
    twin = copy.deepcopy(mo)
    for each in (mo, again, twin):
        _run(each, 7, 13)
    assert _same(mo, again) and _same(mo, twin)


def test_the_file_tells_strides_and_state_has_them(tmp_path: Path) -> None:
    mo = ModelOptimizer(_net(), {"optimizer": {"name": "adam"}})
    _run(mo, 0, 2)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    _, meta = safetensors_io.load(path)
    assert meta["forms"]["online/0.weight"] == {"strides": [27, 1, 9, 3]}
    assert meta["forms"]["optimizer/state/0.weight/exp_avg"] == {"strides": [27, 1, 9, 3]}
    assert "optimizer/state/4.weight/exp_avg" not in meta["forms"]
    again = ModelOptimizer(_net(), {"optimizer": {"name": "adam"}})
    again.load_ckpt(path)
    param = again.lanes[""].params[0]
    assert again.lanes[""].optimizer.state[param]["exp_avg"].stride() == param.stride() == (27, 1, 9, 3)


@pytest.mark.parametrize("saved", ["contiguous", "channels_last"])
@pytest.mark.parametrize("custom", [True, False])
def test_a_state_in_another_order_is_the_same_state(custom: bool, saved: str, tmp_path: Path) -> None:
    """Written by a model in one memory format, loaded into one in the other: elements, not addresses, are kept."""

    def make(kind: str) -> ModelOptimizer:
        model = _net(kind)
        own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True) if custom else None
        return ModelOptimizer(model, {} if custom else _config("adam"), optimizer=own)

    mo, again = make(saved), make("channels_last" if saved == "contiguous" else "contiguous")
    _run(mo, 0, 6)
    again.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    for param, other in zip(mo.lanes[""].params, again.lanes[""].params, strict=True):
        one, two = (m.lanes[""].optimizer.state[p]["exp_avg"] for m, p in ((mo, param), (again, other)))
        assert torch.equal(one, two)
        assert param.ndim < 4 or two.is_contiguous(memory_format=LAST) is other.is_contiguous(memory_format=LAST)
    _run(mo, 6, 10)
    _run(again, 6, 10)
    for param, other in zip(mo.lanes[""].params, again.lanes[""].params, strict=True):
        assert torch.allclose(param, other, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_memory_format_on_the_way(name: str, dtype: torch.dtype) -> None:
    """Against the same rule without its fused kernel."""
    fused, plain = (ModelOptimizer(_net("contiguous").to(dtype), {"optimizer": {"name": name}}) for _ in range(2))
    for group in plain.lanes[""].optimizer.param_groups:
        group["fused"] = False
    for mo in (fused, plain):
        _run(mo, 0, 5)
        mo.model.to(memory_format=LAST)
        _run(mo, 5, 10)
    for one, other in zip(fused.lanes[""].stepped, plain.lanes[""].stepped, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    assert fused.lanes[""].optimizer.param_groups[0]["fused"]


def test_a_gradient_in_another_order_is_put_in_order() -> None:
    """One that a loop writes by hand: w = 0, g = i, so that sgd moves element i by -0.1 i."""
    model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=LAST)
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}})
    wanted = torch.arange(24.0).reshape(3, 2, 2, 2)
    mo.backward(model.weight.sum())
    model.weight.grad = wanted.clone()
    mo.lanes[""].window.witness = None
    mo.step()
    assert torch.allclose(model.weight, -0.1 * wanted)


def test_weights_with_gaps_are_not_fused() -> None:
    model, other = _net("gaps"), _net("gaps")
    mo = ModelOptimizer(model, {"optimizer": {"name": "adam", "lr": 0.01}})
    assert not any(g["fused"] for g in mo.lanes[""].optimizer.param_groups)
    custom = ModelOptimizer(other, {}, optimizer=torch.optim.Adam(other.parameters(), lr=0.01, fused=True))
    _run(mo, 0, 4)
    _run(custom, 0, 4)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_rolled_back_it_goes_on_from_the_very_state(tmp_path: Path) -> None:
    config = {**_config("adamw"), "nonfinite": {"policy": "rollback", "limit": 1}}
    mo, straight = ModelOptimizer(_net(), config), ModelOptimizer(_net(), config)
    _run(mo, 0, 6)
    mo.save_ckpt(tmp_path / "a.safetensors")
    _run(mo, 6, 10)
    bad = _loss(mo.model, 10)
    mo.step(bad * float("nan"))
    mo.step(_loss(mo.model, 11))
    _run(straight, 0, 6)
    assert mo.global_step == straight.global_step == 3
    _run(mo, 6, 12)
    _run(straight, 6, 12)
    assert _same(mo, straight)


def test_a_state_dict_is_taken_over_as_a_copy() -> None:
    mo, again = (ModelOptimizer(_net(), _config("adamw")) for _ in range(2))
    _run(mo, 0, 4)
    again.load_state_dict(mo.state_dict())
    _run(mo, 4, 8)
    _run(again, 4, 8)
    assert _same(mo, again)
