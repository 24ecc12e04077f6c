"""Schedules by worked numbers: functions of the step, continuous at the end of warm-up, never above the base rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.config import schedules
from layerline.training.config.sections import SchedulerConfig

WORKED: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({"name": "constant"}, {0: 1.0, 10**6: 1.0}),
    ({"name": "constant", "warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0}),
    ({"name": "cosine", "total_steps": 100}, {0: 1.0, 25: 0.5 + math.sqrt(2) / 4, 50: 0.5, 100: 0.0, 500: 0.0}),
    ({"name": "cosine", "total_steps": 110, "warmup_steps": 10, "min_lr_ratio": 0.1},
     {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}),
    ({"name": "cosine", "total_steps": 100, "warmup_ratio": 0.1, "min_lr": 0.25},
     {4: 0.5, 10: 1.0, 55: 0.75, 100: 0.5}),
    ({"name": "polynomial", "total_steps": 10}, {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0}),
    ({"name": "polynomial", "total_steps": 10, "power": 2, "min_lr_ratio": 0.2}, {5: 0.4, 10: 0.2}),
    ({"name": "inverse_sqrt", "warmup_steps": 100}, {0: 0.01, 99: 1.0, 100: 1.0, 400: 0.5, 10000: 0.1}),
    ({"name": "inverse_sqrt"}, {0: 1.0, 1: 1.0, 4: 0.5}),
    ({"name": "step", "step_size": 30}, {0: 1.0, 29: 1.0, 30: 0.1, 60: 0.01}),
    ({"name": "step", "step_size": 10, "gamma": 0.5, "min_lr_ratio": 0.3}, {9: 1.0, 10: 0.5, 20: 0.3}),
    ({"name": "exponential", "gamma": 0.5}, {0: 1.0, 1: 0.5, 3: 0.125}),
    ({"name": "exponential", "gamma": 0.5, "warmup_steps": 2}, {0: 0.5, 2: 1.0, 3: 0.5}),
    ({"name": "exponential", "gamma": 0.5, "warmup_steps": 2, "count_warmup": True}, {0: 0.5, 2: 0.25, 3: 0.125}),
    ({"name": "step", "step_size": 10, "warmup_steps": 5}, {9: 1.0, 10: 0.1}),
    ({"name": "step", "step_size": 10, "warmup_steps": 5, "count_warmup": False}, {14: 1.0, 15: 0.1}),
    ({"name": "multistep", "milestones": [60, 30]}, {29: 1.0, 30: 0.1, 59: 0.1, 60: 0.01, 999: 0.01}),
    ({"name": "multistep", "milestones": [4], "gamma": 0.5, "warmup_steps": 2, "count_warmup": False},
     {0: 0.5, 5: 1.0, 6: 0.5}),
    ({"name": "cosine_restarts", "period": 10}, {0: 1.0, 5: 0.5, 10: 1.0, 15: 0.5, 20: 1.0}),
    ({"name": "cosine_restarts", "period": 10, "period_mult": 2, "min_lr_ratio": 0.2},
     {5: 0.6, 10: 1.0, 20: 0.6, 30: 1.0, 50: 0.6}),
    ({"name": "wsd", "total_steps": 100, "warmup_steps": 10, "decay_ratio": 0.2},
     {4: 0.5, 10: 1.0, 80: 1.0, 90: 0.5, 100: 0.0, 200: 0.0}),
    ({"name": "constant", "warmup_steps": 4, "warmup_start": 0}, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0}),
    ({"name": "constant", "warmup_steps": 4, "warmup_start": 0.2}, {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "points"), WORKED, ids=lambda v: v.get("name", "") if isinstance(v, dict) else "")
def test_worked_numbers(fields: dict[str, Any], points: dict[int, float]) -> None:
    multiplier = schedules.build(SchedulerConfig(**fields), lr=0.5)
    assert {s: multiplier(s) for s in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize("warmup", [None, 0.1, 0.5])
def test_one_cycle_is_torchs(warmup: float | None) -> None:
    total = 40
    multiplier = schedules.build(SchedulerConfig(name="one_cycle", total_steps=total, warmup_ratio=warmup), lr=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total, pct_start=warmup or 0.3)
    for step in range(total):
        assert multiplier(step) * 0.1 == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < total - 1:
            theirs.step()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.1),
], ids=["sgd", "adamw"])  # fmt: skip
def test_one_cycle_cycles_momentum_as_torch_does(make: Any) -> None:
    total, model = 20, nn.Linear(2, 1)
    name = type(make(model.parameters())).__name__.lower()
    rule = {"name": name, "lr": 0.1, **({"momentum": 0.9} if name == "sgd" else {})}
    config = {"optimizer": rule, "scheduler": {"name": "one_cycle", "total_steps": total, "warmup_ratio": 0.3}}
    mo = ModelOptimizer(model, config)
    optimizer = make([nn.Parameter(torch.ones(1))])
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total, pct_start=0.3)
    (lane,) = mo.lanes.values()
    for step in range(total):
        ours, other = lane.optimizer.param_groups[0], optimizer.param_groups[0]
        field = "momentum" if name == "sgd" else "betas"
        assert ours[field] == pytest.approx(other[field], rel=1e-9)
        mo.step(model(torch.ones(1, 2)).mean())
        optimizer.step()
        if step < total - 1:
            theirs.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "one_cycle"])
def test_steps_past_the_end_of_the_schedule_are_warned_of_once(schedule: str) -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {"scheduler": {"name": schedule, "total_steps": 3}})
    for step in range(6):
        mo.step(model(torch.ones(1, 2)).mean())
        assert bool(mo.warnings) == (step >= 3)
    (text,) = mo.warnings
    assert "total_steps (3)" in text


@pytest.mark.parametrize(("fields", "where"), [
    ({"name": "multistep"}, "scheduler.milestones"), ({"name": "cosine_restarts"}, "scheduler.period"),
    ({"name": "wsd"}, "scheduler.total_steps"), ({"name": "cosine", "total_steps": 9, "period": 3}, "scheduler.period"),
    ({"name": "constant", "warmup_start": 0.1}, "scheduler.warmup_start"),
])  # fmt: skip
def test_a_field_that_is_missing_or_not_read_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Linear(2, 1), {"scheduler": fields})
    assert caught.value.where == where


@given(
    name=st.sampled_from(["cosine", "polynomial", "inverse_sqrt", "exponential"]),
    total=st.integers(2, 500), warm=st.floats(0, 0.9), floor=st.floats(0, 1), step=st.integers(0, 600),
)  # fmt: skip
def test_never_above_the_base_nor_below_the_floor(name: str, total: int, warm: float, floor: float, step: int) -> None:
    warmup = min(int(warm * total), total - 1)
    config = SchedulerConfig(name=name, total_steps=total, warmup_steps=warmup, min_lr_ratio=floor)  # type: ignore[arg-type]
    multiplier = schedules.build(config, 1.0)
    assert 0 < multiplier(0) <= 1 or (multiplier(0) == 0 and warmup == 0)
    assert multiplier(step) <= 1.0 + 1e-12
    if step >= warmup:
        assert multiplier(step) >= floor - 1e-12
        assert multiplier(step + 1) <= multiplier(step) + 1e-12
    assert multiplier(warmup) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"name": "cosine"}, "scheduler.total_steps"),
        ({"name": "polynomial"}, "scheduler.total_steps"),
        ({"name": "one_cycle"}, "scheduler.total_steps"),
        ({"name": "step"}, "scheduler.step_size"),
        ({"name": "constant", "warmup_ratio": 0.1}, "scheduler.total_steps"),
        ({"name": "cosine", "total_steps": 10, "warmup_steps": 10}, "scheduler.warmup_steps"),
        ({"name": "cosine", "total_steps": 10, "min_lr": 2.0}, "scheduler.min_lr"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Linear(2, 1), {"optimizer": {"lr": 1.0}, "scheduler": fields})
    assert caught.value.where == where


def test_plateau_waits_then_scales() -> None:
    plateau = schedules.Plateau(SchedulerConfig(name="plateau", patience=1, factor=0.5))
    for metric, scale in [(0.5, 1.0), (0.6, 1.0), (0.6, 1.0), (0.59, 0.5), (math.nan, 0.5), (0.6, 0.25), (0.7, 0.25)]:
        plateau.observe(metric)
        assert plateau.scale == scale
    low = schedules.Plateau(SchedulerConfig(name="plateau", patience=0), higher=False)
    for metric, scale in [(1.0, 1.0), (0.9, 1.0), (0.95, pytest.approx(0.1))]:
        low.observe(metric)
        assert low.scale == scale


def test_plateau_follows_validation_and_survives_a_checkpoint(tmp_path: Any) -> None:
    config = {"optimizer": {"name": "sgd", "lr": 1.0}, "scheduler": {"name": "plateau", "patience": 0, "factor": 0.5}}
    model = nn.Linear(1, 1)
    mo = ModelOptimizer(model, config)
    mo.validate(lambda _: 0.5)
    mo.validate(lambda _: 0.4)
    assert mo.current_lr == 0.5
    mo.step(model(torch.ones(1, 1)).sum())
    assert mo.current_lr == 0.5
    again = ModelOptimizer(nn.Linear(1, 1), config)
    again.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert again.current_lr == 0.5
    again.validate(lambda _: 0.45)
    assert again.current_lr == 0.25


def test_current_lr_is_that_of_the_coming_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "scheduler": {"warmup_steps": 4}})
    for expected in (0.25, 0.5, 0.75, 1.0, 1.0):
        assert mo.current_lr == expected
        before = model.weight.item()
        mo.step(model(torch.ones(1, 1)).sum())
        assert before - model.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"name": "cosine", "total_steps": 9, "gamma": 0.5}, "scheduler.gamma"),
        ({"name": "cosine", "total_steps": 9, "power": 2.0}, "scheduler.power"),
        ({"name": "step", "step_size": 2, "patience": 3}, "scheduler.patience"),
        ({"name": "exponential", "step_size": 2}, "scheduler.step_size"),
        ({"name": "constant", "min_lr": 0.1}, "scheduler.min_lr"),
        ({"name": "constant", "min_lr_ratio": 0.1}, "scheduler.min_lr_ratio"),
        ({"name": "constant", "mode": "min"}, "scheduler.mode"),
        ({"name": "one_cycle", "total_steps": 3, "warmup_steps": 10}, "scheduler.warmup_steps"),
        ({"name": "one_cycle", "total_steps": 3, "warmup_steps": 3}, "scheduler.warmup_steps"),
        ({"name": "one_cycle", "total_steps": 9, "warmup_ratio": 1.0}, "scheduler.warmup_steps"),
        ({"name": "plateau", "min_lr": 2.0}, "scheduler.min_lr"),
    ],
)
def test_what_a_schedule_does_not_read_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Linear(1, 1), {"optimizer": {"lr": 1.0}, "scheduler": fields})
    assert caught.value.where == where


def test_the_lowest_rate_holds_in_every_schedule_that_has_one() -> None:
    plateau = {"name": "plateau", "patience": 0, "factor": 0.1, "min_lr": 0.3}
    mo = ModelOptimizer(nn.Linear(1, 1), {"optimizer": {"lr": 2.0, "name": "sgd"}, "scheduler": plateau})
    rates = []
    for _ in range(4):
        mo.validate(lambda _: 0.5)
        rates.append(mo.current_lr)
    assert rates == pytest.approx([2.0, 0.3, 0.3, 0.3])
    for fields in ({"min_lr": 0.5}, {"min_lr_ratio": 0.25}):
        cycle = schedules.build(SchedulerConfig(name="one_cycle", total_steps=10, **fields), 2.0)
        assert [cycle(2), cycle(9), cycle(50)] == pytest.approx([1.0, 0.25, 0.25])
        assert min(map(cycle, range(2, 10))) == pytest.approx(0.25)


@pytest.mark.parametrize("custom", [True, False])
def test_a_scheduler_of_the_users_is_resumed(custom: bool, tmp_path: Any) -> None:
    """The optimizer's rates are not written where the configuration asks for none; another lr in it counts."""

    def make(lr: float = 1.0) -> tuple[ModelOptimizer, Any]:
        model = nn.Linear(1, 1)
        own = torch.optim.SGD(model.parameters(), lr=lr) if custom else None
        mo = ModelOptimizer(model, {} if custom else {"optimizer": {"name": "sgd", "lr": lr}}, optimizer=own)
        scheduler = torch.optim.lr_scheduler.StepLR(mo.lanes[""].optimizer, 1, 0.5)
        mo.register("s", scheduler)
        return mo, scheduler

    def run(mo: ModelOptimizer, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            mo.step(mo.model(torch.ones(1, 1)).sum())
            scheduler.step()
            seen.append(mo.current_lr)
        return seen

    first = make()
    assert run(*first, 2) == [0.5, 0.25]
    path = first[0].save_ckpt(tmp_path / "a.safetensors")
    mo, scheduler = make()
    mo.load_ckpt(path)
    assert mo.current_lr == 0.25 and run(mo, scheduler, 2) == [0.125, 0.0625] == run(*first, 2)
    if not custom:
        other, _ = make(lr=3.0)
        other.load_ckpt(path)
        assert other.current_lr == 3.0


def test_a_group_that_is_added_later_follows_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    own = torch.optim.SGD(model[0].parameters(), lr=1.0)
    mo = ModelOptimizer(model, {"scheduler": {"name": "step", "step_size": 1, "gamma": 0.5}}, optimizer=own)
    model[1].requires_grad_(True)
    own.add_param_group({"params": model[1].parameters(), "lr": 4.0})
    assert mo.join() == ["1.weight", "1.bias"]
    mo.step(model(torch.ones(1, 1)).sum())
    assert [g["lr"] for g in own.param_groups] == [0.5, 2.0]
