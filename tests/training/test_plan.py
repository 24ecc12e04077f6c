"""The plan before the run, against what the first step shows; accumulation checked on demand; resume proved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.loop.batch_norm import to_group_norm
from layerline.training.optimizers.registry import TABLE
from layerline.training.proof.prove_resume import prove
from layerline.training.setup.plan import LISTED

MSE = nn.functional.mse_loss
# muon takes matrices alone: see test_several.py.
OF_ANY_SHAPE = [name for name in TABLE if name != "muon"]


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return MSE(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", OF_ANY_SHAPE)
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9}])
def test_planned_bytes_are_the_measured_ones(name: str, extra: dict[str, Any]) -> None:
    if extra and name not in ("sgd", "rmsprop"):
        extra = {}
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    mo = ModelOptimizer(model, {"optimizer": {"name": name, **extra}, "training": {"ema_decay": 0.9}})
    assert all(measured is None for k, (_, measured) in mo.plan().bytes.items() if k in ("gradients", "states"))
    mo.step(model(torch.randn(4, 8)).square().mean())
    sizes = mo.plan().bytes
    assert all(planned == measured for planned, measured in sizes.values()), sizes
    elements = sum(p.numel() for p in model.parameters())
    assert sizes["parameters"][0] == sizes["gradients"][0] == 4 * elements
    assert sizes["EMA"][0] == 4 * (elements + 32)


def test_masters_and_half_parameters_are_counted() -> None:
    model = nn.Linear(4, 4).bfloat16()
    mo = ModelOptimizer(model, {"ema": {"decay": 0.9}})
    mo.step(model(torch.randn(2, 4).bfloat16()).square().mean())
    assert mo.plan().bytes == {"parameters": (40, 40), "gradients": (80, 80), "states": (160, 160),
                               "masters": (80, 80), "EMA": (80, 80)}  # fmt: skip


def test_the_text_says_groups_curve_and_bytes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mo = ModelOptimizer(model, {"scheduler": {"name": "cosine", "total_steps": 101, "warmup_steps": 1},
                                "accumulate": {"steps": 2}, "precision": {"dynamic_loss_scale_window": 9}})  # fmt: skip
    plan = mo.plan()
    assert plan.groups["0.weight"] == ("decay", "weight", 4) and plan.groups["1.weight"] == ("no decay", "norm", 2)
    assert plan.curve[0] == (0, pytest.approx(1e-3)) and plan.curve[-1][0] == 100
    text = str(plan)
    for part in ("AdamW(lr=0.001", "0.weight", "no decay", "step         0", "not measured yet"):
        assert part in text
    assert any("BatchNorm" in n for n in plan.notes)
    assert any("loss scale serves fp16" in n for n in plan.notes)


def test_the_text_lists_the_first_parameters_and_counts_the_others() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LISTED)))
    text = str(ModelOptimizer(model, {}).plan())
    lines = text[text.index("groups") : text.index("bytes")].splitlines()
    assert lines[1] == "  0.weight   decay     weight               16"
    assert len([line for line in lines if "decay" in line]) == LISTED
    assert f"  and {LISTED} more: mo.plan().groups has all" in lines
    assert "  step         0 to 999  1.000e-03" in lines


def test_the_curve_has_a_line_for_each_rate() -> None:
    scheduler = {"name": "cosine", "total_steps": 101, "warmup_steps": 1}
    text = str(ModelOptimizer(nn.Linear(2, 2), {"scheduler": scheduler}).plan())
    assert len(re.findall(r"^  step +\d+  \d", text, re.MULTILINE)) == 11


def test_accumulation_is_verified_on_the_users_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    mo = ModelOptimizer(model, {"accumulate": {"steps": 4}})
    before = {n: t.clone() for n, t in model.state_dict().items()}
    batch = torch.randn(13, 1, 8), torch.randn(13, 1)
    draws = torch.get_rng_state()
    check = mo.verify_accumulation(batch, _loss)
    assert check.passed and check.batch_norm is None and "differ by" in str(check)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and model[1].training
    assert torch.equal(torch.get_rng_state(), draws)
    assert mo.global_step == 0 and model[0].weight.grad is None


@pytest.mark.parametrize("amp", ["fp32", "fp16", "bf16"])
def test_the_check_covers_every_number_format(amp: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    mo = ModelOptimizer(model, {"precision": {"amp": amp}})
    batch = (torch.randn(12, 8), torch.randn(12, 1))
    assert mo.verify_accumulation(batch, lambda m, b: MSE(m(b[0]).float(), b[1])).passed


def test_the_check_fails_where_the_loss_is_no_mean() -> None:
    model = nn.Linear(2, 1)
    check = ModelOptimizer(model, {}).verify_accumulation(
        (torch.randn(9, 2), torch.randn(9, 1)), lambda m, b: MSE(m(b[0]), b[1], reduction="sum")
    )
    assert not check.passed and check.deviation > 0.1 and check.worst in ("weight", "bias")


def test_batch_norm_is_named_measured_and_can_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    batch = (torch.randn(13, 1, 8) + 3, torch.randn(13, 1))
    mo = ModelOptimizer(model, {"accumulate": {"steps": 4}})
    (told,) = mo.warnings
    assert "BatchNorm" in told and told in mo.plan().notes and told in caplog.text
    check = mo.verify_accumulation(batch, _loss)
    assert not check.passed and check.batch_norm is not None and check.batch_norm <= check.bound
    assert "batch normalisation is the cause" in str(check)
    to_group_norm(model)
    again = ModelOptimizer(model, {"accumulate": {"steps": 4}})
    assert again.verify_accumulation(batch, _loss).passed and again.warnings == []


def test_what_cannot_be_checked_is_refused() -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {"accumulate": {"steps": 3}})
    with pytest.raises(ConfigError, match="cannot be split"):
        mo.verify_accumulation((torch.randn(2, 2), torch.randn(2, 1)), _loss)
    mo.step(model(torch.randn(1, 2)).sum())
    with pytest.raises(ConfigError, match="window has begun"):
        mo.verify_accumulation((torch.randn(9, 2), torch.randn(9, 1)), _loss)


MAKE = """
import torch
from torch import nn
from layerline import ModelOptimizer

def make(leak=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9, "accumulate_steps": 2}})
    calls = [0]
    def step():
        calls[0] += 1
        hidden = calls[0] if leak else 0  # state that no checkpoint knows of
        mo.step(model(torch.randn(4, 3) + hidden).square().mean())
    return mo, step

def broken():
    raise ValueError("no data here")
"""


def test_the_proof_names_the_first_tensor_that_differs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MAKE)
    proof = prove(f"{tmp_path}/own.py:make", 3, arguments={"leak": True})
    assert (
        proof.difference is not None
        and not proof.passed
        and "/" in proof.difference.name
        and "differs first" in str(proof)
    )


@pytest.mark.slow  # starts python three times
def test_resume_is_proved_in_fresh_processes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MAKE)
    proof = ModelOptimizer(nn.Linear(1, 1), {}).prove_resume(30, f"{tmp_path}/own.py:make")
    assert proof.passed and proof.compared > 10 and "all" in str(proof)
    with pytest.raises(StageError, match="no data here"):
        prove(f"{tmp_path}/own.py:broken", 1)
