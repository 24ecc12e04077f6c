"""Weights that an update has spoilt: named, never saved over a sound checkpoint, and rolled back where asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError


def _normed(**config: Any) -> tuple[nn.Module, ModelOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1e38}, **config})


def _repeat(times: int, step: Callable[[], object]) -> None:
    for _ in range(times):
        step()


def _loss(model: nn.Module) -> Tensor:
    return 1e3 * model(torch.randn(4, 2)).square().sum()


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adam", "adamw", "lamb", "lion"])
def test_a_rate_beyond_all_measure_ends_the_run_by_the_name_of_a_weight(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    mo = ModelOptimizer(model, {"optimizer": {"name": name, "lr": 3e38}})
    with pytest.raises(StageError) as caught:
        _repeat(40, lambda: mo.step(1e3 * model(torch.ones(2, 3)).square().sum()))
    assert caught.value.where in ("weight", "bias", "loss")


def test_a_half_weight_that_overflows_is_named() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    nn.init.constant_(model.weight, 6e4)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1e4}, "precision": {"master_weights": False}})
    with pytest.raises(StageError, match="weight is Inf or NaN after step") as caught:
        _repeat(3, lambda: mo.step(-model.weight.float().sum()))
    assert caught.value.where == "weight"


def test_a_weight_that_is_infinite_on_purpose_stays() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[-math.inf, 1.0]])
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.5}})
    assert mo.step(model.weight[0, 1] * 1.0)
    assert mo.step(model.weight[0, 1] * 1.0)
    assert model.weight.tolist() == [[-math.inf, 0.0]]


def test_spoilt_weights_are_not_saved_over_a_sound_checkpoint(tmp_path: Path) -> None:
    model, mo = _normed()
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    before = path.read_bytes()
    mo.step(_loss(model))
    with pytest.raises(StageError, match="no checkpoint was written"):
        mo.save_ckpt(path)
    assert path.read_bytes() == before


def test_rollback_answers_spoilt_weights_as_it_answers_gradients(tmp_path: Path) -> None:
    model, mo = _normed(nonfinite={"limit": 1, "policy": "rollback"})
    mo.save_ckpt(tmp_path / "a.safetensors")
    saved = {n: t.clone() for n, t in model.state_dict().items()}
    for _ in range(3):
        mo.step(_loss(model))  # spoils them
        assert not mo.step(_loss(model))
        assert all(torch.equal(t, saved[n]) for n, t in model.state_dict().items())
        assert mo.global_step == 0
    mo.step(_loss(model))
    with pytest.raises(StageError, match=r"rolling back to a\.safetensors 3 times did not help"):
        mo.step(_loss(model))


def test_rollback_without_a_checkpoint_says_so() -> None:
    model, mo = _normed(nonfinite={"policy": "rollback"})
    mo.step(_loss(model))
    with pytest.raises(StageError, match="there is no checkpoint to roll back to"):
        mo.step(_loss(model))


def test_any_optimizer_steps_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are looked at before steps 2, 3, 5, … 65: eight times in a hundred steps, whatever the optimizer."""
    model = nn.Linear(3, 1)
    mo = ModelOptimizer(model, {}, optimizer=torch.optim.NAdam(model.parameters()))
    lane, looks = mo.lanes[""], []
    look = lane.finite.first_spoilt
    monkeypatch.setattr(lane.finite, "first_spoilt", lambda: looks.append(lane.steps) or look())
    for _ in range(100):
        mo.step(model(torch.ones(2, 3)).square().sum())
    assert looks == [1, 3, 7, 15, 31, 63]
