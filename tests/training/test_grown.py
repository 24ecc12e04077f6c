"""Buffers that a module's own loading resizes, as fake quantisation's do at the first forward pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training.state import checkpoint, state_dict_match


class Quantized(nn.Module):
    """One scale for each of the four output channels, known after the first forward pass."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(3, channels)
        self.wq = FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
                               dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.wq(self.linear.weight), self.linear.bias)


class Hooked(nn.Module):
    """A list of rows that grows, resized by a hook before loading."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rows", torch.zeros(0, 2))
        self.register_load_state_dict_pre_hook(Hooked._resize)

    @staticmethod
    def _resize(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.rows = torch.zeros_like(state[f"{prefix}rows"])

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach()])
        return x * self.weight + self.rows.sum()


def _make(kind: Any) -> ModelOptimizer:
    torch.manual_seed(0)
    return ModelOptimizer(kind(), {"optimizer": {"lr": 0.01}, "training": {"ema_decay": 0.9}})


def _run(mo: ModelOptimizer, first: int, last: int) -> None:
    width = 3 if isinstance(mo.model, Quantized) else 2
    for step in range(first, last):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
        mo.step((mo.model(x) - 1).square().mean())


@pytest.mark.parametrize("kind", [Quantized, Hooked])
def test_what_grew_is_loaded_and_goes_on_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    mo, again = _make(kind), _make(kind)
    _run(mo, 0, 4)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    again.load_ckpt(path)
    twin = copy.deepcopy(mo)
    _run(mo, 4, 8)
    for each in (again, twin):
        _run(each, 4, 8)
        now = each.model.state_dict()
        assert all(torch.equal(tensor, now[name]) for name, tensor in mo.model.state_dict().items())
    fresh = kind()
    checkpoint.load_weights(fresh, path, ema=False)
    assert {n: b.shape for n, b in fresh.named_buffers()} == {n: b.shape for n, b in mo.model.named_buffers()} or (
        kind is Hooked and fresh.rows.shape == (8, 2)
    )
    online, _ = state_dict_match.choose(torch.load(_saved(mo, tmp_path), weights_only=True), kind())
    assert online is not None and online.complete


def _saved(mo: ModelOptimizer, folder: Path) -> Path:
    torch.save(mo.model.state_dict(), folder / "plain.pt")
    return folder / "plain.pt"


def test_another_number_of_channels_is_still_refused(tmp_path: Path) -> None:
    mo = _make(Quantized)
    _run(mo, 0, 2)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    other = ModelOptimizer(Quantized(5), {"optimizer": {"lr": 0.01}, "training": {"ema_decay": 0.9}})
    before = {n: t.clone() for n, t in other.model.state_dict().items()}
    with pytest.raises(StageError, match=r"linear\.weight is \(4, 3\), the model has \(5, 3\)"):
        other.load_ckpt(path)
    assert all(torch.equal(t, before[n]) for n, t in other.model.state_dict().items())


def test_a_buffer_that_torch_refuses_is_refused(tmp_path: Path) -> None:
    def make(size: int) -> ModelOptimizer:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(size))
        return ModelOptimizer(model, {})

    path = make(3).save_ckpt(tmp_path / "a.safetensors")
    with pytest.raises(StageError, match=r"table is \(3,\), the model has \(4,\)"):
        make(4).load_ckpt(path)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rejected_step_leaves_the_ranges_of_fake_quantisation(steps: int) -> None:
    torch.manual_seed(0)
    activations = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    model = nn.Sequential(activations, Quantized())
    mo = ModelOptimizer(model)
    for _ in range(steps):
        mo.step(model(torch.randn(5, 3)).square().mean())
    before = copy.deepcopy(model.state_dict())
    assert not mo.step(model(torch.full((5, 3), torch.nan)).square().mean())
    after = model.state_dict()
    # What has grown in the first forward pass stays, and is of the weights alone here.
    kept = [name for name, tensor in before.items() if after[name].shape == tensor.shape]
    assert "0.scale" in kept and all(torch.equal(after[name], before[name]) for name in kept)
    assert mo.step(model(torch.randn(5, 3)).square().mean()) and after["0.scale"].isfinite().all()


def test_a_rejected_step_leaves_the_switches_of_fake_quantisation() -> None:
    activations = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    model = nn.Sequential(activations, Quantized())
    mo = ModelOptimizer(model)
    mo.step(model(torch.randn(5, 3)).square().mean())
    activations.disable_observer()
    assert not mo.step(model(torch.randn(5, 3)).square().mean() * torch.nan)
    assert int(activations.observer_enabled[0]) == 0


@pytest.mark.parametrize("kind", ["switched", "bare"])
def test_validation_leaves_the_ranges_of_observers(kind: str) -> None:
    observer: nn.Module = MovingAverageMinMaxObserver()
    if kind == "switched":
        observer = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    model = nn.Sequential(nn.Linear(2, 2), observer)
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.5}})
    mo.step(model(torch.ones(3, 2)).sum())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mo.validate(lambda net: net(100 * torch.ones(3, 2)).sum())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_validation_before_the_first_step_leaves_a_range_that_has_not_grown() -> None:
    model = nn.Sequential(nn.Linear(3, 4), MovingAveragePerChannelMinMaxObserver(ch_axis=1))
    ModelOptimizer(model, {}).validate(lambda net: net(torch.ones(2, 3)).sum())
    assert model[1].min_val.shape == (0,)


def test_the_online_metric_is_without_torchaos_fake_quantisation() -> None:
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    model = nn.Sequential(nn.Linear(4, 4), IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, "per_channel")))
    x = torch.linspace(-1, 1, 8).view(2, 4)
    figures = ModelOptimizer(model, {}).validate(lambda net: net(x)[0, 0])
    assert figures["online"] == model[0](x)[0, 0].item() and figures["deploy"] == model(x)[0, 0].item()
    assert figures["gap"] != 0 and model[1].enabled
