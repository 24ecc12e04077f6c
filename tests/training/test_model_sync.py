"""What a model's owner does to it after ModelOptimizer was made is followed, or refused by the tensor's name."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.loop import batch_norm


class Counts(nn.Module):
    """Its forward pass puts new tensors in the place of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.sum(0)
        out: Tensor = self.layer(x)
        return out


class OwnNorm(nn.BatchNorm1d):
    """A batch normalisation as many write it themselves."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        self.running_mean = 0.5 * self.running_mean + 0.5 * x.mean(0).detach()
        return x - self.running_mean


def _sgd(model: nn.Module, **training: Any) -> ModelOptimizer:
    return ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.5}, "training": training})


def test_buffers_that_are_replaced_are_saved_and_exported_as_they_are(tmp_path: Path) -> None:
    model = Counts()
    mo = _sgd(model, ema_decay=0.5)
    for _ in range(3):
        mo.step(model(torch.ones(4, 2)).mean())
    assert mo.export()["seen"].tolist() == [12.0, 12.0]
    again = Counts()
    other = _sgd(again, ema_decay=0.5)
    other.step(again(torch.ones(1, 2)).mean())
    other.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert again.seen.tolist() == [12.0, 12.0]


def test_statistics_that_are_replaced_are_averaged_and_guarded() -> None:
    model = nn.Sequential(OwnNorm(1), nn.Linear(1, 1))
    mo = _sgd(model, ema_decay=0.5)
    mo.step(model(torch.full((2, 1), 4.0)).sum())  # 2, average 1
    mo.step(model(torch.full((2, 1), 4.0)).sum())  # 3, average 2
    assert not mo.step(model(torch.full((2, 1), 9.0)).sum() * torch.nan)
    assert model[0].running_mean.item() == 3.0 and mo.export()["0.running_mean"].item() == 2.0
    with mo.ema():
        assert model[0].running_mean.item() == 2.0
    assert model[0].running_mean.item() == 3.0


@pytest.mark.parametrize("move", ["channels_last", "data", "moved twice"])
def test_an_average_follows_memory_that_moves(move: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    mo = _sgd(model, ema_decay=0.5, log_interval=1)
    weight = model[0].weight
    if move == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif move == "data":
        weight.data = weight.data.clamp(-0.1, 0.1)
    else:
        model.double().float()
    expected = weight.detach().clone()
    for _ in range(3):
        mo.step(model(torch.randn(2, 3, 8, 8)).square().mean() + weight.sum())
        expected = 0.5 * expected + 0.5 * weight.detach()
    torch.testing.assert_close(mo.export()["0.weight"], expected)
    online = weight.detach().clone()
    with mo.ema():
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight, online)
    rows = mo.lanes[""].monitor.rows
    assert all(row[mo.lanes[""].monitor.columns.index("update_ratio")] > 0 for row in rows)


def test_masks_follow_memory_that_moves() -> None:
    model = nn.Linear(2, 1, bias=False)
    mo = _sgd(model, ema_decay=0.5)
    mo.apply_mask({"weight": torch.tensor([[0, 1]])})
    model.weight.data = model.weight.data.clone()
    mo.step(model(torch.ones(1, 2)).sum())
    assert model.weight[0, 0] == 0 and mo.export()["weight"][0, 0] == 0


@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.half, nn.Module.bfloat16])
def test_another_type_is_refused_by_name(change: Callable[[nn.Module], nn.Module], ema: float | None) -> None:
    model = nn.Linear(2, 1)
    mo = _sgd(model, ema_decay=ema)
    change(model)
    with pytest.raises(ConfigError, match=r"was torch.float32 on cpu when .* and is torch") as caught:
        mo.step(model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().float())
    assert caught.value.where == "weight"


def _assign(model: nn.Sequential) -> None:
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def _replace(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def _tie(model: nn.Sequential) -> None:
    model[1].weight = model[0].weight


@pytest.mark.parametrize(
    ("change", "name"),
    [(_assign, "0.weight"), (_replace, "1.weight"), (_tie, "1.weight"), (lambda m: m.__delitem__(1), "1.weight")],
)
@pytest.mark.parametrize("entry", ["step", "save", "export", "join", "ema"])
def test_a_parameter_that_is_another_or_gone_is_refused_by_name(change: Any, name: str, entry: str,
                                                                tmp_path: Path) -> None:  # fmt: skip
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mo = _sgd(model, ema_decay=0.5)
    for _ in range(4):
        mo.step(model(torch.ones(1, 2)).sum())
    change(model)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: mo.step(model(torch.ones(1, 2)).sum()),
        "save": lambda: mo.save_ckpt(tmp_path / "a.safetensors"),
        "export": mo.export, "join": mo.join, "ema": mo.switch_to_ema,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="since ModelOptimizer was made") as caught:
        calls[entry]()
    assert caught.value.where == name


def test_layers_that_only_lose_their_statistics_are_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    mo = _sgd(model, ema_decay=0.5)
    mo.step(model(torch.randn(4, 2)).sum())
    batch_norm.to_group_norm(model, 2)
    mo.step(model(torch.randn(4, 2)).sum())
    assert [n for n in mo.export() if n.startswith("1.")] == ["1.weight", "1.bias"]
    again = nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 1))
    other = _sgd(again, ema_decay=0.5)
    other.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert all(torch.equal(t, other.export()[n]) for n, t in mo.export().items())


def test_parameters_that_are_called_otherwise_keep_average_and_masks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    mo = _sgd(model, ema_decay=0.5)
    mo.apply_mask({"0.weight": torch.ones(1, 1)})
    mo.step(model(torch.ones(1, 1)).sum())
    model[0] = nn.Sequential(model[0])
    mo.step(model(torch.ones(1, 1)).sum())
    assert {n: t.item() for n, t in mo.export().items()} == {"0.0.weight": 0.375}
    assert mo.lanes[""].masks is not None and list(mo.lanes[""].masks.masks) == ["0.0.weight"]


@pytest.mark.parametrize("write", ["fill", "load", "data"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_written_from_outside_reach_their_masters(write: str, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1, bias=False).to(dtype)
    mo = _sgd(model)
    with torch.no_grad():
        if write == "fill":
            model.weight.fill_(5.0)
        elif write == "load":
            model.load_state_dict({"weight": torch.full((1, 2), 5.0)})
        else:
            model.weight.data.fill_(5.0)
    mo.step(model(torch.ones(1, 2, dtype=dtype)).sum().float())
    assert model.weight.tolist() == [[4.5, 4.5]] and mo.export()["weight"].tolist() == [[4.5, 4.5]]


def test_what_is_not_written_keeps_its_masters_precision() -> None:
    """Of a half tensor that is written in part, the rest goes on from its float32 value."""
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}})
    mo.step(model.weight.float().sum() * 2**-10)  # too little for bfloat16
    assert model.weight.tolist() == [[1.0, 1.0]] and mo.export()["weight"][0, 1] == 1 - 2**-10
    with torch.no_grad():
        model.weight[0, 0] = 3.0
    assert mo.export()["weight"].tolist() == [[3.0, 1 - 2**-10]]


def test_a_copy_has_everything_and_shares_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(torch.bfloat16)
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.5, "accumulate_steps": 2}})
    x = [torch.randn(4, 2).bfloat16() for _ in range(9)]
    for i in range(3):
        mo.step(model(x[i]).float().square().mean())
    twin = copy.deepcopy(mo)
    before = mo.export()
    for i in range(3, 9):
        twin.step(twin.model(x[i]).float().square().mean())
    assert all(torch.equal(t, before[n]) for n, t in mo.export().items()), "the first is where it was"
    for i in range(3, 9):
        mo.step(model(x[i]).float().square().mean())
    assert all(torch.equal(t, twin.export()[n]) for n, t in mo.export().items()), "and goes the same way"


def test_a_copy_takes_a_custom_optimizer_along() -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    mo.step(model(torch.ones(1, 2)).sum())
    twin = copy.deepcopy(mo)
    for each in (mo, twin):
        each.step(each.model(torch.ones(1, 2)).sum())
    assert all(torch.equal(t, twin.export()[n]) for n, t in mo.export().items())
    assert twin.lanes[""].optimizer is not mo.lanes[""].optimizer


@pytest.mark.parametrize("how", ["unfreeze", "new"])
def test_a_parameter_that_nobody_trains_is_told(how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    if how == "unfreeze":
        model[0].requires_grad_(False)
    mo = _sgd(model)
    for _ in range(7 if how == "unfreeze" else 3):
        mo.step(model(torch.ones(1, 2)).sum())
    assert not mo.warnings
    if how == "unfreeze":
        model[0].requires_grad_(True)
    else:
        model.append(nn.Linear(1, 1))
    for _ in range(2):
        mo.step(model(torch.ones(1, 2)).sum())
    name = "0.weight" if how == "unfreeze" else "2.weight"
    names = f"{name}, {name.replace('weight', 'bias')}"
    assert mo.warnings == [f"these require a gradient and are not trained: {names}; call join()"]
    late = dict(model.named_parameters())[name]
    before = late.detach().clone()
    assert mo.join() == [name, name.replace("weight", "bias")] and late.grad is None, "what had piled up is gone"
    out = model(torch.ones(1, 2)).sum()
    (slope,) = torch.autograd.grad(out, late, retain_graph=True)
    mo.step(out)
    torch.testing.assert_close(late.detach(), before - 0.5 * slope)


def test_a_forward_pass_in_training_mode_does_not_write_into_the_average() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    mo = _sgd(model, ema_decay=0.9)
    mo.step(model(torch.randn(8, 2)).mean())
    average, online = mo.export(), {n: b.clone() for n, b in model.named_buffers()}
    with mo.ema():
        model(torch.randn(8, 2) + 100)
    assert all(torch.equal(t, average[n]) for n, t in mo.export().items())
    assert all(torch.equal(b, online[n]) for n, b in model.named_buffers())


class Shares(nn.Module):
    """A model around a parameter that another one may have too."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.w, self.own = shared, nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize("how", ["same", "memory", "joins"])
def test_two_models_do_not_train_one_parameter(how: str) -> None:
    shared = nn.Parameter(torch.zeros(2))
    other = nn.Parameter(shared.data) if how == "memory" else shared if how == "same" else nn.Parameter(torch.zeros(2))
    models = {"g": Shares(shared), "d": Shares(other)}
    told = pytest.raises(ConfigError, match=r"two models train this parameter: g\.w and d\.w")
    if how == "joins":
        mo = ModelOptimizer(models, {})
        models["d"].w = shared
        with told:
            mo.join()
        return
    with told:
        ModelOptimizer(models, {})
    shared.requires_grad_(False)
    other.requires_grad_(False)
    assert len(ModelOptimizer(models, {}).lanes) == 2, "frozen, it may be shared"


def test_a_custom_optimizer_steps_the_models_parameters_and_no_others() -> None:
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"parameter 2 of SGD, of shape \(3,\), is not the model's"):
        ModelOptimizer(model, {}, optimizer=torch.optim.SGD([*model.parameters(), extra], lr=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mo = ModelOptimizer(model, {}, optimizer=optimizer)
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ConfigError, match="parameter 2 of SGD"):
        mo.step(model(torch.ones(1, 2)).sum() + extra.sum())
    part = ModelOptimizer(model, {}, optimizer=torch.optim.SGD([model.weight], lr=1.0))
    assert part.warnings == ["bias is trained by nobody: the optimizer does not hold it"]


def test_a_scheduler_may_have_wrapped_the_optimizer_before() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    mo = ModelOptimizer(model, {}, optimizer=optimizer)
    mo.step(model(torch.ones(1, 2)).sum())
    scheduler.step()
    assert mo.current_lr == 0.5


def test_a_model_does_not_keep_an_optimizer_that_is_gone() -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9}})
    lane = weakref.ref(mo.lanes[""])
    mo.step(model(torch.ones(1, 2)).sum())
    del mo
    gc.collect()
    assert lane() is None
    model.load_state_dict(model.state_dict())
