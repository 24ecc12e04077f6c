"""The plan before the run; resume proved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training.loop.batch_norm import to_group_norm
from layerline.training.setup.plan import LISTED
from layerline.training.state.prove_resume import prove


def test_the_text_says_groups_and_curve() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mo = ModelOptimizer(model, {"scheduler": {"name": "cosine", "total_steps": 101, "warmup_steps": 1},
                                "accumulate": {"steps": 2}, "precision": {"dynamic_loss_scale_window": 9}})  # fmt: skip
    plan = mo.plan()
    assert plan.groups["0.weight"] == ("decay", "weight", 4) and plan.groups["1.weight"] == ("no decay", "norm", 2)
    assert plan.curve[0] == (0, pytest.approx(1e-3)) and plan.curve[-1][0] == 100
    text = str(plan)
    for part in ("AdamW(lr=0.001", "0.weight", "no decay", "step         0"):
        assert part in text
    assert any("BatchNorm" in n for n in plan.notes)
    assert any("loss scale serves fp16" in n for n in plan.notes)


def test_a_field_without_effect_is_named() -> None:
    mo = ModelOptimizer(nn.Linear(2, 1), {"distributed": {"overlap_communication": True}})
    assert "distributed.overlap changes nothing: gradients are reduced after the backward pass" in mo.warnings


def test_the_text_lists_the_first_parameters_and_counts_the_others() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LISTED)))
    text = str(ModelOptimizer(model, {}).plan())
    lines = text[text.index("groups") :].splitlines()
    assert lines[1] == "  0.weight   decay     weight               16"
    assert len([line for line in lines if "decay" in line]) == LISTED
    assert f"  and {LISTED} more: mo.plan().groups has all" in lines
    assert "  step         0 to 999  1.000e-03" in lines


def test_the_curve_has_a_line_for_each_rate() -> None:
    scheduler = {"name": "cosine", "total_steps": 101, "warmup_steps": 1}
    text = str(ModelOptimizer(nn.Linear(2, 2), {"scheduler": scheduler}).plan())
    assert len(re.findall(r"^  step +\d+  \d", text, re.MULTILINE)) == 11


def test_batch_norm_is_named_and_can_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    mo = ModelOptimizer(model, {"accumulate": {"steps": 4}})
    (warning,) = mo.warnings
    assert "BatchNorm" in warning and warning in mo.plan().notes and warning in caplog.text
    to_group_norm(model)
    assert ModelOptimizer(model, {"accumulate": {"steps": 4}}).warnings == []


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
