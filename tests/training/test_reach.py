"""No Inf or NaN reaches weights or average through an update, whatever the optimizer, and nearly nothing is paid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training import reach
from layerline.training.foreach import Lamb, Lion, Sophia


def _finite(model: nn.Module, mo: ModelOptimizer) -> bool:
    return all(t.isfinite().all() for t in (*model.state_dict().values(), *mo.export().values()))


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adam", "adamw", "adafactor", "lamb", "lion", "sophia"])
def test_a_rate_beyond_all_measure_leaves_everything_finite(name: str) -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 2.0)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    mo = ModelOptimizer(model, {"optimizer": {"name": name, "lr": 3.4e38}, "training": {"ema_decay": 0.5}})
    for _ in range(3):
        moved = mo.step(model(torch.ones(1, 3)).square().sum())
        assert _finite(model, mo)
    if name in ("sgd", "rmsprop", "lamb"):  # the others' first update is 1 at most, times the rate
        assert not moved and mo.lanes[""].skipped == 3
        assert "makes weight Inf or NaN" in mo.warnings[0]
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    state = mo.lanes[""].optimizer.state_dict()["state"]
    assert not any(torch.is_tensor(v) and not v.isfinite().all() for s in state.values() for v in s.values())


@pytest.mark.parametrize("masters", [None, False])
def test_halves_never_overflow(masters: bool | None) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "training": {"ema_decay": 0.5},
                                "precision": {"master_weights": masters}})  # fmt: skip
    moved = [mo.step(model.weight.float().sum() * 40000.0) for _ in range(4)]
    assert moved == [True, False, False, False]
    assert model.weight.item() == -40000.0 and mo.export()["weight"].item() == -20000.0
    assert mo.step(model.weight.float().sum() * -30000.0) and model.weight.item() == -10000.0, "and it goes on"


def test_an_epsilon_of_half_precision_divides_by_zero_and_is_taken_back() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "rmsprop"}, "precision": {"master_weights": False},
                                "training": {"ema_decay": 0.5}})  # fmt: skip
    assert not mo.step((model.weight * torch.tensor([[1.0, 0.0]]).half()).sum())
    assert model.weight.tolist() == [[1.0, 1.0]] and _finite(model, mo)


def test_a_run_that_never_moves_again_is_ended() -> None:
    model = nn.Linear(1, 1)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 3e38}, "nonfinite": {"limit": 2}})
    assert not mo.step(model(torch.ones(1, 1)).sum() * 4)
    with pytest.raises(StageError, match="makes weight Inf or NaN, 2 steps in a row"):
        mo.step(model(torch.ones(1, 1)).sum() * 4)


def test_an_optimizer_that_is_not_known_ends_the_run_before_anyone_sees_it() -> None:
    class Explodes(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.div_(p.grad)

    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.5}}, optimizer=Explodes(model.parameters()))
    assert mo.step((model.weight * torch.tensor([[2.0, 4.0]])).sum())
    with pytest.raises(StageError, match="makes weight Inf or NaN") as caught:
        mo.step((model.weight * torch.tensor([[2.0, 0.0]])).sum())
    assert caught.value.where == "weight"
    assert model.weight.tolist() == [[0.5, 0.25]] and mo.export()["weight"].tolist() == [[0.75, 0.625]]


def test_a_weight_that_is_infinite_on_purpose_stays() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[-math.inf, 1.0]])
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.5}})
    assert mo.step(model.weight[0, 1] * 1.0)
    assert model.weight.tolist() == [[-math.inf, 0.5]]


def test_weights_are_measured_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(reach, "_greatest", lambda t, real=reach._greatest: measured.append(1) or real(t))
    model = nn.Linear(3, 2)
    mo = ModelOptimizer(model, {})
    for _ in range(50):
        mo.step(model(torch.ones(1, 3)).square().sum())
    assert len(measured) == 2, "weights and momentum, before the first step"


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from([
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {"momentum": 0.5}), (torch.optim.RMSprop, {"alpha": 0.5, "weight_decay": 1.0}),
        (torch.optim.Adam, {"weight_decay": 1.0}), (torch.optim.AdamW, {"betas": (0.5, 0.9), "weight_decay": 2.0}),
        (torch.optim.Adam, {"amsgrad": True}), (torch.optim.Adafactor, {}), (Lamb, {"weight_decay": 0.5}),
        (Lion, {"weight_decay": 1.5}), (Sophia, {}),
    ]),
    sizes=st.lists(st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e4, 1e9]), min_size=1, max_size=8),
    rate=st.sampled_from([1e-4, 0.1, 3.0]), seed=st.integers(0, 999),
)  # fmt: skip
def test_the_bound_holds(rule: Any, sizes: list[float], rate: float, seed: int) -> None:
    """After any gradients, no weight is greater than the rule's bound says."""
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    make, options = rule
    optimizer = make([{"params": params}], lr=rate, **options)
    bound = reach.Reach(optimizer, params, params)
    for size in sizes:
        for p in params:
            p.grad = torch.randn_like(p) * size * (torch.rand_like(p) > 0.3)
        norm = math.hypot(*(float(p.grad.norm()) for p in params if p.grad is not None))
        assert bound.safe(norm)
        optimizer.step()
        assert max(float(p.detach().abs().max()) for p in params) <= bound.weights * 1.001


def _normed(**config: Any) -> tuple[nn.Module, ModelOptimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 3e38}, **config})


def test_the_update_that_ends_a_run_leaves_the_running_statistics() -> None:
    model, mo = _normed(nonfinite={"limit": 1})
    before = {n: b.clone() for n, b in model.named_buffers()}
    with pytest.raises(StageError, match="Inf or NaN"):
        mo.step(model(torch.randn(4, 2)).pow(3).sum())
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_rollback_answers_updates_as_it_answers_gradients(tmp_path: Path) -> None:
    model, mo = _normed(nonfinite={"limit": 1, "policy": "rollback"})

    def spoil() -> bool:
        return mo.step(model(torch.randn(4, 2)).pow(3).sum())

    with pytest.raises(StageError, match="Inf or NaN; there is no checkpoint to roll back to"):
        spoil()
    mo.save_ckpt(tmp_path / "a.safetensors")
    saved = {n: t.clone() for n, t in model.state_dict().items()}
    for _ in range(3):
        assert not spoil()
    assert all(torch.equal(t, saved[n]) for n, t in model.state_dict().items())
    assert mo.lanes[""].skipped_in_a_row == 0
    with pytest.raises(StageError, match=r"rolling back to a\.safetensors 3 times did not help"):
        spoil()
