"""One body over every optimizer of the table; our three rules by worked numbers and against pytorch-optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.optimizers.foreach import Lamb, Lion
from layerline.training.optimizers.registry import TABLE, TAKES_COMPLEX

# muon takes matrices alone: see test_several.py.
OF_ANY_SHAPE = [name for name in TABLE if name != "muon"]

RATES = {"sgd": 0.05, "rmsprop": 0.005, "adam": 0.02, "adamw": 0.02, "adafactor": 0.1, "lamb": 0.02, "lion": 0.005}


def _problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(64, 4)
    return model, x, x.sum(1, keepdim=True).sin()


@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_each_learns(name: str) -> None:
    model, x, y = _problem()
    mo = ModelOptimizer(model, {"optimizer": {"name": name, "lr": RATES[name]}})
    first = nn.functional.mse_loss(model(x), y).item()
    for _ in range(80):
        mo.step(nn.functional.mse_loss(model(x), y))
    assert nn.functional.mse_loss(model(x), y).item() < first / 2


@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_each_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = {"optimizer": {"name": name, "lr": RATES[name], "weight_decay": 0.01},
              "scheduler": {"name": "cosine", "total_steps": 12, "warmup_steps": 2}}  # fmt: skip

    def run(mo: ModelOptimizer, model: nn.Module, steps: int) -> None:
        _, x, y = _problem()
        for _ in range(steps):
            mo.step(nn.functional.mse_loss(model(x), y))

    model, _, _ = _problem()
    mo = ModelOptimizer(model, config)
    torch.manual_seed(1)
    run(mo, model, 5)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    run(mo, model, 5)
    other, _, _ = _problem()
    again = ModelOptimizer(other, config)
    again.load_ckpt(path)
    run(again, other, 5)
    assert again.current_lr == mo.current_lr
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        # w = 1, g = 2, lr = 0.1, one step.
        ("sgd", {}, 0.8),
        ("sgd", {"weight_decay": 0.5}, 0.75),
        ("sgd", {"momentum": 0.9, "nesterov": True}, 1 - 0.1 * (2 + 0.9 * 2)),
        ("adam", {}, 0.9),
        ("adamw", {"weight_decay": 0.5}, 1 * (1 - 0.05) - 0.1),
        ("rmsprop", {"alpha": 0.75}, 1 - 0.1 * 2 / (0.25 * 4) ** 0.5),
        ("lion", {"weight_decay": 0.5}, 1 * (1 - 0.05) - 0.1),
        ("lamb", {}, 1 - 0.1 * 1.0),
        ("lamb", {"weight_decay": 0.5}, 1 - 0.1 * 1.0),
    ],
)
def test_one_step_by_hand(name: str, fields: dict[str, Any], expected: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": name, "lr": 0.1, **fields}})
    mo.step(2 * model.weight.sum())
    assert model.weight.item() == pytest.approx(expected, rel=1e-5)


def test_sgd_momentum_over_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.5}})
    seen = []
    for _ in range(3):
        mo.step(model.weight.sum())
        seen.append(model.weight.item())
    assert seen == pytest.approx([-1.0, -2.5, -4.25])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("adamw", "momentum"),
        ("sgd", "betas"),
        ("lion", "eps"),
        ("adafactor", "betas"),
        ("adam", "alpha"),
        ("lamb", "alpha"),
    ],
)
def test_a_field_of_another_rule_is_refused(name: str, field: str) -> None:
    value: Any = [0.9, 0.99] if field == "betas" else 0.5
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Linear(1, 1), {"optimizer": {"name": name, field: value}})
    assert caught.value.where == f"optimizer.{field}" and name in str(caught.value)


def test_lamb_scales_by_the_norms() -> None:
    """‖w‖ = 5, u = (1, 1) after bias correction: the step has length lr * ‖w‖."""
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    w.grad = torch.tensor([0.5, 7.0])
    Lamb([{"params": [w]}], lr=0.1, eps=0.0).step()
    step = torch.tensor([3.0, 4.0]) - w.detach()
    torch.testing.assert_close(step, torch.full((2,), 0.1 * 5 / 2**0.5))


def _lamb_by_the_paper(w: Tensor, grads: list[Tensor], lr: float, betas: tuple[float, float], decay: float) -> Tensor:
    """Algorithm 2 of You et al. 2020, line by line."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-6)
        u = r + decay * w
        w = w - lr * w.norm() / u.norm() * u
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_the_papers(decay: float) -> None:
    start, grads = torch.randn(5, 3), [torch.randn(5, 3) for _ in range(6)]
    w = nn.Parameter(start.clone())
    optimizer = Lamb([{"params": [w]}], lr=0.02, betas=(0.9, 0.99), weight_decay=decay)
    for grad in grads:
        w.grad = grad
        optimizer.step()
    torch.testing.assert_close(w.detach(), _lamb_by_the_paper(start, grads, 0.02, (0.9, 0.99), decay))


def test_lion_is_that_of_the_maintained_package() -> None:
    peer = pytest.importorskip("pytorch_optimizer", reason="the dev comparison needs pytorch-optimizer")
    a, b = (nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2))
    one = Lion([{"params": [a]}], lr=0.01, weight_decay=0.1)
    two = peer.Lion([b], lr=0.01, weight_decay=0.1)
    for i in range(12):
        grad = torch.randn(3, 4)
        a.grad, b.grad = grad.clone(), grad.clone()
        one.step()
        two.step()
        torch.testing.assert_close(a, b, msg=f"step {i}")


class Duck:
    """The least that is asked of a custom optimizer."""

    def __init__(self, params: Any) -> None:
        self.params, self.zeroed = list(params), 0

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                p -= 0.5 * p.grad

    def zero_grad(self) -> None:
        self.zeroed += 1


def test_any_object_with_step_and_zero_grad_will_do() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    duck = Duck(model.parameters())
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.5, "grad_clip_norm": 1.0}}, optimizer=duck)
    mo.step(4 * model.weight.sum())
    assert model.weight.item() == pytest.approx(0.5) and duck.zeroed == 1 and model.weight.grad is None
    assert mo.export()["weight"].item() == pytest.approx(0.75)


def test_a_custom_optimizer_keeps_its_own_rates(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    own = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}])
    mo = ModelOptimizer(model, {}, optimizer=own)
    own.param_groups[0]["lr"] = 0.05  # by a scheduler of the user's
    mo.step(model(torch.ones(1, 1)).sum())
    assert [g["lr"] for g in own.param_groups] == [0.05, 0.2]
    scheduled = ModelOptimizer(model, {"scheduler": {"warmup_steps": 2}}, optimizer=own)
    assert [g["lr"] for g in own.param_groups] == [0.025, 0.1]
    path = scheduled.save_ckpt(tmp_path / "a.safetensors")
    scheduled.load_ckpt(path)
    assert len(own.state) == 4


@pytest.mark.parametrize("missing", ["step", "zero_grad"])
def test_an_object_that_cannot_step_is_refused(missing: str) -> None:
    other = type("Half", (), {n: lambda self: None for n in {"step", "zero_grad"} - {missing}})()
    with pytest.raises(ConfigError, match=f"no {missing}"):
        ModelOptimizer(nn.Linear(1, 1), {}, optimizer=other)


def test_custom_needs_the_optimizer() -> None:
    with pytest.raises(ConfigError, match="custom needs"):
        ModelOptimizer(nn.Linear(1, 1), {"optimizer": {"name": "custom"}})


def test_the_fast_path_of_torch_is_taken() -> None:
    for name in ("sgd", "adam", "adamw"):
        mo = ModelOptimizer(nn.Linear(1, 1), {"optimizer": {"name": name}})
        assert mo.lanes[""].optimizer.param_groups[0]["fused"] is True


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat))


@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_complex_parameters_are_stepped_as_pairs_or_refused(name: str) -> None:
    model = Complex()
    config = {"optimizer": {"name": name, "lr": 0.1, "weight_decay": 0.0}, "training": {"ema_decay": 0.9}}
    if name not in TAKES_COMPLEX:
        with pytest.raises(ConfigError, match="does not support complex") as caught:
            ModelOptimizer(model, config)
        assert caught.value.where == "optimizer.name" and "adamw" in caught.value.hint
        return
    pairs = nn.Module()
    pairs.w = nn.Parameter(torch.view_as_real(model.w.detach()).clone())
    mo, other = ModelOptimizer(model, config), ModelOptimizer(pairs, config)
    for _ in range(3):
        mo.step((model.w - 1).abs().square().sum())
        other.step((pairs.w - torch.tensor([1.0, 0.0])).square().sum())
    assert torch.allclose(torch.view_as_real(model.w.detach()), pairs.w, atol=1e-6)


class NeedsMore:
    param_groups: list[Any] = []  # noqa: RUF012

    def step(self, closure: Any, *, scale: float) -> None: ...

    def zero_grad(self) -> None: ...


def test_an_optimizer_that_cannot_step_by_itself_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"NeedsMore\.step\(\) needs scale") as caught:
        ModelOptimizer(model, {}, optimizer=NeedsMore())
    assert caught.value.where == "optimizer"
    for optimizer in (torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)):
        ModelOptimizer(model, {}, optimizer=optimizer)


def test_nothing_to_train_is_said_with_ranks_as_well() -> None:
    for config in ({}, {"distributed": {"backend": "gloo"}}):
        for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
                ModelOptimizer(model, config)


@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_a_layer_that_is_used_later_and_one_that_joins(name: str) -> None:
    """Momentum and averages begin with a parameter's own first gradient."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer: dict[str, Any] = {"name": name, "lr": 1e-3}
    if name in ("sgd", "rmsprop"):
        optimizer["momentum"] = 0.9
    mo = ModelOptimizer(model, {"optimizer": optimizer})
    for step in range(6):
        if step == 4:
            model["c"] = nn.Linear(2, 2)
            assert mo.join() == ["c.weight", "c.bias"]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        used = [layer for key, layer in model.items() if key != "b" or step in (2, 3)]
        assert mo.step(sum(layer(torch.ones(1, 2)).square().sum() for layer in used))  # type: ignore[arg-type]
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert {n[0] for n in moved} == {key for key, layer in model.items() if layer in used}


def test_a_zero_grad_of_ones_own_is_called_and_torchs_is_not() -> None:
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("own")
            super().zero_grad(set_to_none)

    for kind, expected in ((Own, ["own"]), (torch.optim.SGD, [])):
        model, x, y = _problem()
        optimizer = kind(model.parameters(), lr=0.1)
        mo = ModelOptimizer(model, optimizer=optimizer)
        calls.clear()
        assert mo.step((model(x) - y).square().mean())
        assert calls == expected and all(p.grad is None for p in model.parameters())
    optimizer.zero_grad = lambda: calls.append("patched")  # type: ignore[method-assign]
    mo = ModelOptimizer(model, optimizer=optimizer)
    mo.step((model(x) - y).square().mean())
    assert calls == ["patched"]
