"""How loops are written: what a step gives back, keywords, and habits of a hand-written loop that are warned of."""

from __future__ import annotations

import copy
import csv
import json
import math
import pickle
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError

SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}


def _net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _loss(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(torch.eye(3)), torch.tensor([0, 1, 1]))


def test_a_step_prints_formats_and_computes_as_its_loss() -> None:
    net = _net()
    mo = ModelOptimizer(net, SGD)
    loss = _loss(net)
    result = mo.step(loss)
    value = loss.item()
    assert result
    assert float(result) == result.item() == value
    assert f"{result:.4f}" == "%.4f" % result == f"{value:.4f}"  # noqa: UP031  # loops log this way, too
    assert str(result) == str(value)
    assert 0 + result == value and result + 1 == value + 1 and result - 1 == value - 1 and 1 - result == 1 - value
    assert result * 2 == 2 * result == 2 * value and result / 2 == value / 2 and 1 / result == 1 / value
    assert sum([result, result]) == 2 * value
    assert np.mean([float(result)]) == value
    assert result < 1e9 and result > -1 and result <= value and result >= value and result == value


def test_a_step_with_a_weight_is_the_mean_and_false_inside_a_window() -> None:
    net = _net()
    mo = ModelOptimizer(net, {**SGD, "training": {"accumulate_steps": 2}})
    first = mo.step(_loss(net) * 3, weight=3)
    assert not first
    assert float(first) == pytest.approx(_loss(net).item())
    assert mo.step(_loss(net) * 3, weight=3)


def test_a_loop_with_a_backward_pass_of_its_own_logs_no_loss(tmp_path: Path) -> None:
    net = _net()
    mo = ModelOptimizer(net, {**SGD, "training": {"log_interval": 1}})
    before = net.weight.clone()
    _loss(net).backward()
    result = mo.step()
    assert result and math.isnan(result.loss)
    assert not torch.equal(net.weight, before)
    mo.export_metrics(tmp_path / "m.csv")
    (row,) = csv.DictReader((tmp_path / "m.csv").open())
    assert row["loss"] == row["loss_smooth"] == ""
    assert float(row["grad_norm"]) > 0


def _trained(config: dict[str, Any], change: Any, steps: int = 4, **arguments: Any) -> list[str]:
    net = _net()
    mo = ModelOptimizer(net, {**SGD, **config})
    for _ in range(steps):
        mo.step(change(_loss(net)), **arguments)
    return mo.warnings


@pytest.mark.parametrize("change", [lambda x: x / 4, lambda x: x * 0.25, lambda x: x / torch.tensor(4.0)])
def test_a_loss_divided_by_the_loop_is_warned_of_once(change: Any) -> None:
    (text,) = _trained({"training": {"accumulate_steps": 4}}, change)
    assert "mo.step(loss)" in text


def test_a_mean_with_a_weight_is_warned_of() -> None:
    (text,) = _trained({}, lambda x: x, weight=3)
    assert "weight=3" in text and "loss * n" in text


def test_a_grad_scaler_that_was_kept_is_warned_of() -> None:
    scaler = torch.amp.GradScaler("cpu")
    (text,) = _trained({}, scaler.scale)
    assert "GradScaler" in text


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x * 0.5, lambda x: x * 3.0, lambda x: x + 0.1])
def test_ordinary_losses_are_not_warned_of(change: Any) -> None:
    assert _trained({"training": {"accumulate_steps": 4}}, change) == []
    assert _trained({}, lambda x: x * 64, weight=64) == []


def test_autocast_that_was_forgotten_is_warned_of() -> None:
    net = _net()
    mo = ModelOptimizer(net, {**SGD, "precision": {"amp": "bf16"}})
    mo.step(_loss(net))
    (text,) = mo.warnings
    assert "with mo.autocast():" in text
    other = _net()
    mo = ModelOptimizer(other, {**SGD, "precision": {"amp": "bf16"}})
    with mo.autocast():
        loss = _loss(other)
    mo.step(loss)
    assert mo.warnings == []


@pytest.mark.parametrize(("ema", "total", "warned"), [
    ({"ema_decay": 0.9999}, 200, True), ({"ema_decay": 0.9999, "ema_warmup": True}, 200, False),
    ({"ema_decay": 0.9}, 200, False), ({"ema_decay": 0.9999}, 100_000, False), ({}, 200, False),
])  # fmt: skip
def test_an_average_too_slow_for_the_run_is_warned_of(ema: dict[str, Any], total: int, warned: bool) -> None:
    mo = ModelOptimizer(_net(), {**SGD, "training": ema, "scheduler": {"name": "cosine", "total_steps": total}})
    assert bool(mo.warnings) is warned
    if warned:
        assert "98%" in mo.warnings[0] and "ema_decay" not in mo.warnings[0]


def test_a_second_schedule_is_warned_of() -> None:
    net = _net()
    mo = ModelOptimizer(net, {**SGD, "scheduler": {"name": "cosine", "total_steps": 50}})
    theirs = torch.optim.lr_scheduler.StepLR(mo.optimizer, step_size=1)
    for _ in range(4):
        mo.step(_loss(net))
        theirs.step()
    (text,) = mo.warnings
    assert "scheduler" in text and "constant" in text


def test_sections_and_fields_by_keyword() -> None:
    net = _net()
    mo = ModelOptimizer(
        model=net, optimizer={"name": "sgd", "lr": 0.5}, precision={"amp": "bf16"}, log_interval=7, min_loss_scale=2,
    )  # fmt: skip
    assert mo.config.optimizer.name == "sgd" and mo.config.optimizer.lr == 0.5
    assert mo.config.precision.amp == "bf16" and mo.config.precision.min_loss_scale == 2
    assert mo.config.monitor.log_interval == 7
    merged = ModelOptimizer(_net(), {"optimizer": {"lr": 0.5}}, optimizer={"name": "sgd"}, ema_decay=0.9)
    assert merged.config.optimizer.lr == 0.5 and merged.config.ema.decay == 0.9
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    assert ModelOptimizer(net, optimizer=own).optimizer is own
    assert ModelOptimizer(net, {"mode": "nlp-finetune"}, total_steps=100).config.scheduler.name == "polynomial"


@pytest.mark.parametrize(("arguments", "word"), [
    ({"log_intervall": 7}, "log_interval"), ({"steps": 3, "nonsense": 1}, "nonsense"),
    ({"config": {"optimizer": {"lr": 1}}, "lr": 2}, "optimizer.lr"),
    ({"custom_optimizer": object()}, "did you mean 'optimizer'?"),
])  # fmt: skip
def test_keywords_that_mean_nothing_are_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(_net(), **arguments)
    assert word in str(caught.value)


def test_state_dict_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, ModelOptimizer]:
        net = _net()
        return net, ModelOptimizer(net, {"training": {"ema_decay": 0.9}})

    straight, mo = make()
    for _ in range(3):
        mo.step(_loss(straight))
    torch.save(mo.state_dict(), tmp_path / "state.pt")
    net, other = make()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    for _ in range(3):
        mo.step(_loss(straight))
        other.step(_loss(net))
    assert torch.equal(net.weight, straight.weight)
    assert torch.equal(other.export()["weight"], mo.export()["weight"])
    assert [g["lr"] for g in other.param_groups] == [1e-3, 1e-3]


def test_a_step_is_a_float_for_arrays_json_and_statistics() -> None:
    net = _net()
    result = ModelOptimizer(net, SGD).step(_loss(net))
    value = result.loss
    assert isinstance(result, float) and type(value) is float
    assert np.array([result, result]).tolist() == [value, value] and not np.isnan(result)
    assert torch.tensor([result]).item() == pytest.approx(value)
    assert statistics.mean([result, result]) == value and round(result, 3) == round(value, 3)
    assert json.dumps({"loss": result}) == json.dumps({"loss": value})
    assert (result == True) and (result != False) and result != value + 1  # noqa: E712  # compared as step()'s bool was
    assert pickle.loads(pickle.dumps(result)) == value and copy.deepcopy(result).moved
    waiting = ModelOptimizer(net, {**SGD, "training": {"accumulate_steps": 2}}).step(_loss(net))
    assert not waiting and waiting == False and waiting > 0  # noqa: E712


@pytest.mark.parametrize(("change", "weight"), [(1024, 1024), (2048, None), (65536.0, None)])
def test_a_number_that_multiplies_the_loss_is_no_grad_scaler(change: float, weight: int | None) -> None:
    assert _trained({}, lambda x: x * change, steps=1, weight=weight) == []


@pytest.mark.parametrize("change", [lambda x: 0.5 * x, lambda x: (x + 0.1) / 2])
def test_a_half_of_the_loss_itself_is_not_the_division_of_two_micro_batches(change: Any) -> None:
    assert _trained({"training": {"accumulate_steps": 2}}, change) == []
    assert len(_trained({"training": {"accumulate_steps": 2}}, lambda x: x / 2)) == 1


def test_a_half_model_and_a_look_without_gradients_need_no_autocast() -> None:
    half = _net().bfloat16()
    mo = ModelOptimizer(half, {**SGD, "precision": {"amp": "bf16"}})
    mo.step(F.cross_entropy(half(torch.eye(3).bfloat16()).float(), torch.tensor([0, 1, 1])))
    assert mo.warnings == []
    net = _net()
    mo = ModelOptimizer(net, {**SGD, "precision": {"amp": "bf16"}})
    with torch.no_grad():
        net(torch.eye(3))
    with mo.autocast():
        loss = _loss(net)
    mo.step(loss)
    assert mo.warnings == []


def test_a_copy_goes_on_with_the_schedule_of_the_base_rates() -> None:
    def make() -> tuple[nn.Linear, ModelOptimizer]:
        net = _net()
        groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": torch.tensor(0.01)}]
        own = torch.optim.Adam(groups, foreach=False)
        return net, ModelOptimizer(net, optimizer=own, scheduler={"name": "cosine", "total_steps": 10})

    net, mo = make()
    for _ in range(5):
        mo.step(_loss(net))
    twin = copy.deepcopy(mo)
    assert [float(g["lr"]) for g in twin.param_groups] == [float(g["lr"]) for g in mo.param_groups]
    assert mo.current_lr == pytest.approx(0.05)
    for _ in range(3):
        mo.step(_loss(net))
        twin.step(_loss(twin.model))
    assert torch.equal(net.weight, twin.model.get_parameter("weight"))
    assert twin.current_lr == mo.current_lr


def _gan(kind: str, steps: int = 3) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = {"g": torch.optim.SGD(g.parameters(), 0.1), "d": torch.optim.SGD(d.parameters(), 0.1)}
    each = {"g": ModelOptimizer(g, optimizer=plain["g"]), "d": ModelOptimizer(d, optimizer=plain["d"])}
    for step in range(steps):
        real, noise = torch.randn(2, 8, 2, generator=torch.Generator().manual_seed(step))
        fake = g(noise)
        for name in ("d", "g"):
            loss = d(fake.detach()).mean() - d(real).mean() if name == "d" else -d(fake).mean()
            if kind == "by hand":
                plain[name].zero_grad()
                loss.backward()
                plain[name].step()
            else:
                each[name].step(loss)
    return [*g.parameters(), *d.parameters()], each["d"].warnings


def test_two_optimizers_of_a_gan_train_as_the_loop_by_hand() -> None:
    expected, _ = _gan("by hand")
    trained, warnings = _gan("two")
    assert all(torch.equal(a, b) for a, b in zip(expected, trained, strict=True))
    assert len(warnings) == 1 and "another ModelOptimizer's backward pass" in warnings[0]


@pytest.mark.parametrize("closes", [True, False])
def test_another_optimizers_pass_in_an_open_window_is_refused(closes: bool) -> None:
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    mine = ModelOptimizer(d, {"training": {"accumulate_steps": 2}})
    other = ModelOptimizer(g, {})
    x = torch.ones(3, 2)
    mine.step(d(x).mean())
    other.step(d(g(x)).mean())
    with pytest.raises(StageError, match="another ModelOptimizer added to the gradients"):
        mine.flush() if closes else mine.step(d(x).mean())
    assert mine.lanes[""].window.untouched and d.weight.grad is None


@pytest.mark.parametrize("state", [None, {}, nn.Linear(2, 1).state_dict(), {"tensors": {}, "meta": None}])
def test_what_is_no_state_dict_of_it_is_refused(state: Any) -> None:
    mo = ModelOptimizer(nn.Linear(2, 1), {})
    with pytest.raises(ConfigError, match=r"not what mo\.state_dict"):
        mo.load_state_dict(state)


@pytest.mark.parametrize("entry", ["lanes", "config", "extras", "rng"])
def test_an_entry_that_a_state_dict_lacks_is_named(entry: str) -> None:
    mo = ModelOptimizer(nn.Linear(2, 1), {})
    state = mo.state_dict()
    del state["meta"][entry]
    with pytest.raises(StageError, match=f"the checkpoint has no {entry}"):
        mo.load_state_dict(state)


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy])
def test_pickling_is_refused_with_what_to_do(make: Any) -> None:
    with pytest.raises(ConfigError, match="neither pickled nor copied"):
        make(ModelOptimizer(nn.Linear(2, 1), {}))


def test_a_registered_scheduler_moves_the_rates_of_the_copy() -> None:
    mo = ModelOptimizer(nn.Linear(2, 1), {"optimizer": {"name": "sgd", "lr": 0.1}})
    scheduler = torch.optim.lr_scheduler.StepLR(mo.optimizer, 1, 0.5)
    mo.register("scheduler", scheduler)
    mo.step(mo.model(torch.ones(1, 2)).mean())
    scheduler.step()
    twin = copy.deepcopy(mo)
    twin.extras["scheduler"].step()
    assert (twin.current_lr, mo.current_lr) == (0.025, 0.05)
