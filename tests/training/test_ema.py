"""T32 and T33: what is averaged, what is copied, and the numbers of every update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import EmaConfig
from layerline.training.loop import ema
from layerline.training.state import checkpoint


def _scalar(**training: Any) -> tuple[nn.Linear, ModelOptimizer]:
    """w = 0, and every step adds exactly 1 to it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "training": training})


def _steps(model: nn.Linear, mo: ModelOptimizer, n: int) -> list[float]:
    seen = []
    for _ in range(n):
        mo.step(-model.weight.sum())
        seen.append(mo.export()["weight"].item())
    return seen


def test_updates_by_hand() -> None:
    assert _steps(*_scalar(ema_decay=0.5), 3) == [0.5, 1.25, 2.125]


def test_before_the_start_step_the_average_is_the_weights() -> None:
    assert _steps(*_scalar(ema_decay=0.5, ema_start_step=3), 5) == [1.0, 2.0, 3.0, 3.5, 4.25]


@pytest.mark.parametrize(
    ("decay", "warmup", "update", "expected"),
    [
        (0.9999, 2000, 1, 0.9999 * (1 - math.exp(-1 / 2000))),
        (0.9999, 2000, 5001, 0.918),
        (0.9999, 2000, 10**6, 0.9999),
        (0.999, True, 1, 2 / 11),
        (0.999, True, 90, 0.91),
        (0.999, True, 10**5, 0.999),
        (0.999, False, 1, 0.999),
    ],
)
def test_decay_by_hand(decay: float, warmup: Any, update: int, expected: float) -> None:
    assert ema.decay_at(EmaConfig(decay=decay, warmup=warmup), update) == pytest.approx(expected, abs=5e-4)
    if update == 1 and warmup == 2000:
        assert ema.decay_at(EmaConfig(decay=decay, warmup=warmup), update) == pytest.approx(0.0005, abs=1e-6)


@given(decay=st.floats(0.01, 0.9999), tau=st.floats(1, 1e5), n=st.integers(1, 10**6))
def test_warm_up_rises_to_the_decay(decay: float, tau: float, n: int) -> None:
    for warmup in (True, tau):
        config = EmaConfig(decay=decay, warmup=warmup)
        assert 0 < ema.decay_at(config, n) <= ema.decay_at(config, n + 1) <= decay


class Mixed(nn.Module):
    """Everything that a buffer can be."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1)
        self.bn = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.table += 1
        out: Tensor = self.bn(self.conv(x))
        return out


@pytest.mark.parametrize("training", [{}, {"ema_warmup": True}, {"ema_warmup": 2000}, {"accumulate_steps": 2}])
def test_statistics_follow_and_counters_are_the_models(training: dict[str, Any]) -> None:
    """T32: 20 micro-batches of data with mean 5."""
    model = Mixed()
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9, **training}})
    for _ in range(20):
        mo.step(model(torch.randn(8, 1, 4) + 5).square().mean())
    shipped = mo.export()
    assert not torch.equal(shipped["bn.running_mean"], torch.zeros(2))
    assert not torch.equal(shipped["bn.running_var"], torch.ones(2))
    assert shipped["bn.num_batches_tracked"].dtype == torch.int64
    assert shipped["bn.num_batches_tracked"] == model.bn.num_batches_tracked == 20
    assert shipped["seen"].dtype == torch.int32 and shipped["seen"] == model.seen
    assert torch.equal(shipped["table"], model.table)
    assert torch.equal(shipped["mask"], model.mask), "averaging -inf with -inf gives NaN"


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_the_statistics_of_every_norm_are_averaged(kind: Any) -> None:
    from layerline.training.model.canonical_names import named

    model = nn.Sequential(nn.Conv1d(1, 2, 1), kind(2, affine=True, track_running_stats=True))
    assert sorted(ema.statistics(named(model))) == ["1.running_mean", "1.running_var"]


def test_the_average_equals_torchs_averaged_model() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    theirs.update_parameters(model)  # their first call copies
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"ema_decay": 0.9}})
    for _ in range(10):
        mo.step(model(torch.randn(8, 3)).square().mean())
        theirs.update_parameters(model)
    shipped = mo.export()
    for name, tensor in theirs.module.named_parameters():
        torch.testing.assert_close(shipped[name], tensor.detach())
    torch.testing.assert_close(shipped["1.running_mean"], theirs.module[1].running_mean)


def test_switching_is_in_place_and_exact() -> None:
    model = Mixed()
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9}})
    for _ in range(3):
        mo.step(model(torch.randn(8, 1, 4) + 5).square().mean())
    addresses = [t.data_ptr() for t in model.state_dict().values()]
    online = {n: t.clone() for n, t in model.state_dict().items()}
    shipped = mo.export()
    mo.switch_to_ema()
    mo.switch_to_ema()  # twice is once
    assert all(torch.equal(t, shipped[n]) for n, t in model.state_dict().items())
    assert not torch.equal(model.conv.weight, online["conv.weight"])
    assert all(torch.equal(t, shipped[n]) for n, t in mo.export().items()), "export means the same while switched"
    mo.switch_to_online()
    mo.switch_to_online()
    assert all(torch.equal(t, online[n]) for n, t in model.state_dict().items())
    assert [t.data_ptr() for t in model.state_dict().values()] == addresses
    with mo.ema():
        assert torch.equal(model.conv.weight, shipped["conv.weight"])
    with pytest.raises(KeyError), mo.ema():
        raise KeyError
    assert torch.equal(model.conv.weight, online["conv.weight"])


def test_a_step_on_averaged_weights_is_refused() -> None:
    model, mo = _scalar(ema_decay=0.5)
    mo.switch_to_ema()
    with pytest.raises(ConfigError, match="switch_to_online"):
        mo.step(-model.weight.sum())


def test_switching_without_an_average_is_an_error() -> None:
    _, mo = _scalar()
    with pytest.raises(ConfigError, match="ema_decay"):
        mo.switch_to_ema()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
@pytest.mark.parametrize("masters", [None, False])
def test_the_shadow_is_float32_or_wider(dtype: torch.dtype, masters: bool | None) -> None:
    """Steps of 2^-12 vanish in half precision; the average must see them through the masters, and lose nothing."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 2**-12}, "ema": {"decay": 0.5},
                                "precision": {"master_weights": masters}})  # fmt: skip
    online = []
    for _ in range(4):
        mo.step(-model.weight.sum())
        online.append(model.weight.item())
    shipped = mo.export()["weight"]
    assert shipped.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    moves = not (dtype in (torch.bfloat16, torch.float16) and masters is False)
    expected = 1.0
    for step in range(1, 5):
        expected = (expected + (1 + step * 2**-12 if moves else 1.0)) / 2
    assert shipped.item() == pytest.approx(expected, abs=1e-9)
    before = model.weight.item()
    mo.switch_to_ema()
    assert model.weight.dtype == dtype and model.weight.item() == torch.tensor(expected).to(dtype).item()
    mo.switch_to_online()
    assert model.weight.item() == before and mo.export()["weight"].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("warmup", [False, True, 2000])
@pytest.mark.parametrize("start", [0, 4, 15])
def test_ten_and_ten_steps_are_twenty(warmup: Any, start: int, tmp_path: Path) -> None:
    """T33: the update counter survives, so the warm-up goes on instead of making the average the raw weights."""

    def make() -> tuple[nn.Module, ModelOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return model, ModelOptimizer(model, {
            "optimizer": {"lr": 0.01}, "scheduler": {"name": "cosine", "total_steps": 20},
            "training": {"ema_decay": 0.999, "ema_start_step": start, "ema_warmup": warmup},
        })  # fmt: skip

    def run(model: nn.Module, mo: ModelOptimizer, steps: int) -> None:
        for _ in range(steps):
            mo.step(model(torch.randn(8, 3)).square().mean())

    model, mo = make()
    run(model, mo, 10)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    run(model, mo, 10)
    again, resumed = make()
    resumed.load_ckpt(path)
    run(again, resumed, 10)
    assert resumed.lanes[""].ema is not None and mo.lanes[""].ema is not None
    assert resumed.lanes[""].ema.updates == mo.lanes[""].ema.updates == 20 - max(start - 1, 0)
    assert resumed.current_lr == mo.current_lr
    assert all(torch.equal(t, resumed.export()[n]) for n, t in mo.export().items())
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_average_that_was_not_saved_starts_at_the_weights(dtype: torch.dtype) -> None:
    sources = {"old": torch.full((2,), 2.0, dtype=dtype), "new": torch.full((3,), 3.0, dtype=dtype)}
    followed = ema.EmaPolicy({n: torch.zeros_like(t) for n, t in sources.items()}, EmaConfig(decay=0.5))
    for source, tensor in zip(followed.sources, sources.values(), strict=True):
        source.copy_(tensor)
    held = followed.shadow[0]
    followed.load({"old": torch.full((2,), 0.25, dtype=held.dtype)}, 7)
    assert followed.updates == 7 and followed.shadow[0] is held, "in place"
    assert [t.tolist() for t in followed.values().values()] == [[0.25, 0.25], [3.0, 3.0, 3.0]]


@pytest.mark.parametrize("how", ["load_state_dict", "load_weights", "written", "several"])
def test_weights_loaded_before_the_first_step_are_where_averaging_starts(how: str, tmp_path: Path) -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    torch.manual_seed(0)
    trained = net()
    trained[1].running_mean.fill_(7.0)
    path = ModelOptimizer(trained).save_ckpt(tmp_path / "trained.safetensors")
    model = net()
    mo = ModelOptimizer({"a": model, "b": net()} if how == "several" else model, {"training": {"ema_decay": 0.999}})
    if how == "load_weights":
        checkpoint.load_weights(model, str(path))
    elif how == "written":
        with torch.no_grad():
            for own, given in zip(model.parameters(), trained.parameters(), strict=True):
                own.copy_(given)
    else:
        model.load_state_dict(trained.state_dict())
    prefix, only = ("a.", "a") if how == "several" else ("", None)
    assert torch.equal(mo.export()[f"{prefix}0.weight"], trained[0].weight)
    for _ in range(3):
        mo.step(model(torch.randn(8, 3)).square().mean(), only=only)
    shipped = mo.export()
    assert (shipped[f"{prefix}0.weight"] - trained[0].weight).abs().max() < 1e-4
    if how != "written":
        assert (shipped[f"{prefix}1.running_mean"] - 7.0).abs().max() < 0.1


def test_swa_is_the_plain_mean_of_the_last_steps_at_a_constant_rate() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    config = {"optimizer": {"name": "sgd", "lr": 1.0}, "swa": {"share": 0.5, "lr": 2.0},
              "scheduler": {"total_steps": 6}}  # fmt: skip
    mo = ModelOptimizer(model, config)
    # Each step adds the rate: 1, 2, 3, then at rate 2 to 5, 7, 9. The mean is taken over the last three.
    assert _steps(model, mo, 6) == [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for weight in (5.0, 7.0, 9.0):
        model.weight.data.fill_(weight)
        averaged.update_parameters(model)
    assert averaged.module.weight.item() == mo.export()["weight"].item() == 7.0


def test_swa_averages_the_statistics_too_and_holds_the_rate_of_its_first_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    config = {"optimizer": {"name": "sgd", "lr": 0.1}, "swa": {"share": 0.4},
              "scheduler": {"name": "polynomial", "total_steps": 5}}  # fmt: skip
    mo, means, rates = ModelOptimizer(model, config), [], []
    for _ in range(5):
        rates.append(mo.current_lr)
        mo.step(model(torch.randn(4, 2)).square().mean())
        means.append(model[1].running_mean.clone())
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.04])
    torch.testing.assert_close(mo.export()["1.running_mean"], (means[3] + means[4]) / 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [({"swa": {"share": 0.5}}, "length of the run"), ({"swa": {"lr": 0.5}}, "lr needs share"),
     ({"swa": {"share": 0.5}, "ema": {"decay": 0.9}, "scheduler": {"total_steps": 9}}, "EMA is on too")],
)  # fmt: skip
def test_what_swa_can_not_mean(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelOptimizer(nn.Linear(1, 1), config)
