"""One norm, whichever way it is taken: joined where gradients are few and small, tensor by tensor elsewhere."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.training.loop import step_engine
from layerline.training.optimizers import gradient_norm


def _grads() -> list[Tensor]:
    """3, 4 and 12: a norm of 13, once in another memory format and once in a scalar."""
    picture = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    picture[1, 2, 3, 0] = 3.0
    return [picture, torch.tensor(4.0), torch.tensor([[0.0, 12.0]]).t()]


@pytest.mark.parametrize("by", ["joined", "each"])
def test_the_norm_of_all(by: str) -> None:
    grads = _grads()
    norm = gradient_norm.norm(grads) if by == "joined" else gradient_norm.total_norm(torch._foreach_norm(grads))
    assert norm == pytest.approx(13.0, rel=1e-6)
    assert grads[2].shape == (2, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    grads = _grads()
    grads[1].fill_(bad)
    assert not math.isfinite(gradient_norm.norm(grads))


def test_only_few_float32_numbers_on_the_cpu_are_joined() -> None:
    assert gradient_norm.is_small([torch.zeros(64, 64), torch.zeros(64)])
    assert gradient_norm.is_small([torch.zeros(8, 8)] * 600)
    assert not gradient_norm.is_small([torch.zeros(256, 256)])
    assert not gradient_norm.is_small([torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)])
    assert not gradient_norm.is_small([torch.zeros(4, device="meta")])


@pytest.mark.parametrize("width", [4, 200])
@pytest.mark.parametrize("unused", [False, True])
def test_both_ways_are_the_norm_that_torch_gives(width: int, unused: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, width), nn.Linear(3, 3)])
    mo = ModelOptimizer(layers, {"optimizer": {"lr": 1e-3}})
    assert mo.lanes[""].small is (width == 4)
    loss = layers[1](layers[0](torch.randn(5, 8))).square().mean() * 1e3
    if not unused:
        loss = loss + layers[2](torch.ones(3)).sum()
    parameters = [p for p in layers.parameters() if unused is False or p.shape[0] != 3]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True)
    mo.step(loss)
    assert mo.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-5)


def test_a_small_gradient_beyond_float32_squares_is_measured_in_float64() -> None:
    model = nn.Linear(3, 1, bias=False)
    mo = ModelOptimizer(model, {"optimizer": {"lr": 1e-3}, "training": {"grad_clip_norm": 1.0}})
    mo.step((model.weight * torch.tensor([3e25, 0.0, 4e25])).sum())
    assert mo.grad_norm == pytest.approx(5e25, rel=1e-6)


def test_norms_of_each_parameter_are_still_there_on_request() -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {"optimizer": {"lr": 1e-3}, "monitor": {"per_layer": True, "log_interval": 1}})
    mo.step(3 * model.weight.sum() + model.bias.sum())
    row = dict(zip(mo.lanes[""].monitor.columns, mo.lanes[""].monitor.rows[0], strict=True))
    assert row["grad_norm/weight"] == pytest.approx(math.sqrt(18)) and row["grad_norm/bias"] == pytest.approx(1.0)


@pytest.mark.parametrize("width", [4, 200])
def test_watching_each_layer_changes_nothing(width: int) -> None:
    def trained(per_layer: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        watch = {"per_layer": per_layer, "log_interval": 3}
        mo = ModelOptimizer(model, {"training": {"grad_clip_norm": 0.01}, "monitor": watch})
        for _ in range(7):
            mo.step(model(torch.randn(5, 8)).square().mean())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("width", [4, 40])
def test_a_run_with_joined_layers_is_resumed_to_the_last_bit(width: int, tmp_path: Path) -> None:
    """The late ones lie in the middle of the model, where a run that starts with them has them."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(20)), nn.Linear(width, 3))

    def go(net: nn.Module, mo: ModelOptimizer) -> list[float]:
        torch.manual_seed(1)
        norms = []
        for _ in range(5):
            mo.step(net(torch.randn(6, 8)).square().mean())
            norms.append(mo.grad_norm)
        return norms

    config = {"optimizer": {"lr": 1e-2}, "training": {"grad_clip_norm": 1e-3, "ema_decay": 0.9}}
    first = model()
    for layer in (first[2], first[9]):
        layer.requires_grad_(False)
    mo = ModelOptimizer(first, config)
    go(first, mo)
    for layer in (first[9], first[2]):
        layer.requires_grad_(True)
    assert mo.join() == ["2.weight", "2.bias", "9.weight", "9.bias"]
    assert mo.lanes[""].names == [n for n, _ in first.named_parameters()]
    go(first, mo)
    path = mo.save_ckpt(tmp_path / "c.safetensors")
    second = model()
    again = ModelOptimizer(second, config)
    again.load_ckpt(path)
    assert go(first, mo) == go(second, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(t, again.export()[n]) for n, t in mo.export().items())


def test_memory_of_large_gradients_is_free_before_the_next_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4)
    monkeypatch.setattr(step_engine, "_LARGE", layer.weight.nbytes + layer.bias.nbytes)
    mo = ModelOptimizer(layer, {"optimizer": {"name": "sgd"}})
    mo.backward(layer(torch.ones(1, 4)).sum())
    first = weakref.ref(layer.weight.grad)
    mo.step()
    assert layer.weight.grad is None and first() is not None
    there: list[bool] = []
    out = layer(torch.ones(1, 4))
    out.register_hook(lambda _: there.append(first() is not None))
    mo.step(out.sum())
    assert there == [False]


def test_small_gradients_are_freed_at_once() -> None:
    layer = nn.Linear(4, 4)
    mo = ModelOptimizer(layer, {"optimizer": {"name": "sgd"}})
    mo.backward(layer(torch.ones(1, 4)).sum())
    gradient = weakref.ref(layer.weight.grad)
    mo.step()
    assert layer.weight.grad is None and gradient() is None
