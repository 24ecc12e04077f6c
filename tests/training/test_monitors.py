"""Rows and warnings: measured numbers only, each warning once until its cause is gone."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerline import ModelOptimizer


def _scalar(**sections: Any) -> tuple[nn.Linear, ModelOptimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, **sections})


def _rows(mo: ModelOptimizer, path: Path) -> list[dict[str, str]]:
    mo.export_metrics(path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_by_hand(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 2, "grad_clip_norm": 2.0}, scheduler={"warmup_steps": 4})
    mo.step(model.weight.sum() * 4, weight=2)  # gradient 2 after the division: not clipped
    w = model.weight.item()
    mo.step(model.weight.sum() * 12, weight=4)  # gradient 3: clipped to 2
    (row,) = _rows(mo, tmp_path / "m.csv")
    assert row["step"] == "2" and float(row["loss"]) == pytest.approx(3 * w)
    assert float(row["loss_smooth"]) == pytest.approx(0.98 * 2 + 0.02 * 3 * w)
    assert float(row["grad_norm"]) == 3.0 and float(row["clip_rate"]) == 0.5
    assert float(row["lr"]) == pytest.approx(0.05)
    assert float(row["update_ratio"]) == pytest.approx(0.05 * 2 / w, rel=1e-4)
    assert float(row["samples_s"]) > 0 and float(row["peak_mb"]) > 10
    assert row["loss_scale"] == "1" and row["skipped"] == "0"
    assert row["wait_rate"] == row["deploy_gap"] == "", "what was not measured is not shown"


def test_per_layer_norms_on_request(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    mo = ModelOptimizer(model, {"monitor": {"log_interval": 1, "per_layer": True}, "precision": {"amp": "fp16"}})
    mo.step((model.weight * torch.tensor([[6.0, 8.0]])).sum() + 2 * model.bias.sum(), weight=2)
    (row,) = _rows(mo, tmp_path / "m.csv")
    assert float(row["grad_norm/weight"]) == pytest.approx(5) and float(row["grad_norm/bias"]) == pytest.approx(1)


def test_a_parameter_without_a_gradient_has_an_empty_cell_of_its_own(tmp_path: Path) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.used, self.last = nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 1)

    model = Part()
    mo = ModelOptimizer(model, {"monitor": {"log_interval": 1, "per_layer": True}})
    mo.step(model.used.weight.sum() * 3 + model.last.bias.sum() * 4)
    (row,) = _rows(mo, tmp_path / "m.csv")
    cells = {n.removeprefix("grad_norm/"): v for n, v in row.items() if "/" in n}
    assert cells == {"first.weight": "", "first.bias": "", "used.weight": "3", "last.weight": "", "last.bias": "4"}


def test_the_update_ratio_of_channels_last_weights(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    nn.init.constant_(model.weight, 2.0)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.5}, "training": {"log_interval": 1}})
    mo.step(model.weight.sum())
    assert float(_rows(mo, tmp_path / "m.csv")[0]["update_ratio"]) == pytest.approx(0.25)


def test_a_resumed_run_measures_updates_at_the_same_steps(tmp_path: Path) -> None:
    def trained(mo: ModelOptimizer, model: nn.Linear, until: int) -> list[int]:
        while mo.global_step < until:
            mo.step(model.weight.sum())
        return [int(row["step"]) for row in _rows(mo, tmp_path / "m.csv") if row["update_ratio"]]

    model, mo = _scalar(training={"log_interval": 1})
    assert trained(mo, model, 104) == list(range(1, 101))
    mo.save_ckpt(tmp_path / "c")
    resumed_model, resumed = _scalar(training={"log_interval": 1})
    resumed.load_ckpt(tmp_path / "c")
    assert trained(mo, model, 125)[100:] == trained(resumed, resumed_model, 125)[100:] == [110, 120]


def test_several_models_have_a_file_each(tmp_path: Path) -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    mo = ModelOptimizer({"a": a, "b": b}, {"training": {"log_interval": 1}})
    mo.step(a(torch.ones(1, 1)).sum(), only="a")
    mo.export_metrics(tmp_path / "m.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m-a.csv", "m-b.csv"]


def test_no_rows_when_never(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 0})
    mo.step(model.weight.sum())
    assert _rows(mo, tmp_path / "m.csv") == []


def test_a_gradient_far_above_its_median_is_told_once() -> None:
    model, mo = _scalar(training={"log_interval": 10})
    for i in range(40):
        mo.step(model.weight.sum() * (1000.0 if i in (25, 26) else 1.0))
    assert [w for w in mo.warnings if "above 100 times its median" in w] == mo.warnings and len(mo.warnings) == 1
    mo.step(model.weight.sum() * 1000.0)
    (told,) = mo.warnings
    assert told.endswith("(2 times)"), "its cause was gone in between"


def test_each_kind_is_said_once_a_run_and_counted() -> None:
    _, mo = _scalar()
    monitor, said = mo.lanes[""].monitor, []
    monitor.speak = said.append
    for _ in range(47):
        for clipped in (True, False):
            for _ in range(10):
                monitor.accepted(1.0, 1.0, 1.0, clipped=clipped)
    monitor.warn("other", "something else")
    text = "100% of the steps were clipped: lower the rate or raise the bound"
    assert said == [text, "something else"]
    assert mo.warnings == [f"{text} (47 times)", "something else"]


def test_a_gradient_that_stays_tiny_is_told() -> None:
    model, mo = _scalar(training={"log_interval": 5}, optimizer={"name": "sgd", "lr": 1e-6})
    for i in range(95):
        mo.step(model.weight.sum() * (1.0 if i < 45 else 0.01))
    assert any("below a tenth of its median" in w for w in mo.warnings)


def test_much_clipping_is_told() -> None:
    model, mo = _scalar(training={"log_interval": 10, "grad_clip_norm": 0.1})
    for _ in range(10):
        mo.step(model.weight.sum())
    assert mo.warnings == ["100% of the steps were clipped: lower the rate or raise the bound"]


@pytest.mark.parametrize("interval", [0, 1, 3, 7, 1000])
def test_warnings_do_not_depend_on_how_often_rows_are_written(interval: int) -> None:
    model, mo = _scalar(training={"log_interval": interval, "grad_clip_norm": 0.1})
    for _ in range(10):
        mo.step(model.weight.sum())
    assert mo.warnings == ["100% of the steps were clipped: lower the rate or raise the bound"]
    model, mo = _scalar(training={"log_interval": interval}, optimizer={"name": "sgd", "lr": 1e-9})
    for i in range(70):
        mo.step(model.weight.sum() * (1e5 if i == 60 else 1.0))
    assert mo.warnings == ["gradient norm 1e+05 is above 100 times its median 1"]
    model, mo = _scalar(training={"log_interval": interval})
    for x in mo.watch(_slowly(20)):
        mo.step(model.weight.sum() * x)
    assert any("waiting for data" in w for w in mo.warnings)


def _slowly(count: int) -> Any:
    for _ in range(count):
        time.sleep(0.003)
        yield 1.0


def test_a_scale_that_keeps_falling_is_told() -> None:
    model, mo = _scalar(precision={"amp": True, "min_loss_scale": 1024})
    for _ in range(5):
        mo.backward(model.weight.sum())
        model.weight.grad = torch.full_like(model.weight, math.inf)
        mo.step()
    assert "keeps falling" in mo.warnings[0]


def test_waiting_for_data_is_told(tmp_path: Path) -> None:
    def slow() -> Any:
        for _ in range(10):
            time.sleep(0.003)
            yield 1.0

    model, mo = _scalar(training={"log_interval": 10})
    for x in mo.watch(slow()):
        mo.step(model.weight.sum() * x)
    assert float(_rows(mo, tmp_path / "m.csv")[0]["wait_rate"]) > 0.3
    assert any("waiting for data" in w for w in mo.warnings)


def test_data_in_memory_is_never_told_to_load_faster(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 1})
    monitor = mo.lanes[""].monitor
    monitor.loads, monitor.waited = False, 1e6
    mo.step(model.weight.sum())
    assert float(_rows(mo, tmp_path / "m.csv")[0]["wait_rate"]) > 0.3 and mo.warnings == []


def test_validation_shows_the_deploy_gap(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 2, "ema_decay": 0.5})
    model.train()
    for _ in range(3):
        mo.step(-model.weight.sum())
    seen: list[bool] = []

    def metric(m: nn.Module) -> float:
        seen.append(m.training)
        return float(m.weight.item())  # type: ignore[arg-type,union-attr]

    result = mo.validate(metric)
    assert result["online"] == pytest.approx(1.3) and result["deploy"] == pytest.approx(1.2125)
    assert result["gap"] == pytest.approx(1.3 - 1.2125)
    assert seen == [False, False] and model.training and model.weight.item() == pytest.approx(1.3)
    rows = _rows(mo, tmp_path / "m.csv")
    assert [r["step"] for r in rows] == ["2", "3"] and float(rows[1]["deploy_gap"]) == pytest.approx(0.0875)


def test_validation_at_every_interval(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 1, "valid_interval": 2, "accumulate_steps": 2})
    mo.validate_with(lambda _: 0.5)
    for _ in range(10):
        mo.step(model.weight.sum())
    assert [r["metric_deploy"] for r in _rows(mo, tmp_path / "m.csv")] == ["", "0.5", "", "0.5", ""]


def test_validation_turns_fake_quantisation_off_for_the_online_metric() -> None:
    class Fake(nn.Module):
        """Halves its input while it is enabled, as torch.ao keeps the switch."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w / (2 if self.fake_quant_enabled.item() else 1)

    model = Fake()
    result = ModelOptimizer(model, {}).validate(lambda m: m(torch.ones(1)).item())
    assert result == {"online": 1.0, "deploy": 0.5, "gap": 0.5} and model.fake_quant_enabled.item() == 1


def test_rows_survive_a_checkpoint(tmp_path: Path) -> None:
    model, mo = _scalar(training={"log_interval": 1})
    for _ in range(3):
        mo.step(model.weight.sum())
    _, again = _scalar(training={"log_interval": 1})
    again.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert _rows(again, tmp_path / "b.csv") == _rows(mo, tmp_path / "a.csv")


def test_a_layer_that_joins_gets_a_column_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    mo = ModelOptimizer(model, {"optimizer": {"lr": 1e-3}, "monitor": {"per_layer": True, "log_interval": 1}})
    mo.step(3 * model[0].weight.sum())
    model.append(nn.Linear(1, 1, bias=False))
    assert mo.join() == ["1.weight"]
    mo.step(3 * model[0].weight.sum() + 4 * model[1].weight.sum())
    mo.export_metrics(tmp_path / "m.csv")
    rows = list(csv.DictReader((tmp_path / "m.csv").open()))
    assert [r["grad_norm/0.weight"] for r in rows] == ["3", "3"]
    assert [r["grad_norm/1.weight"] for r in rows] == ["", "4"]


def test_the_speed_is_that_of_the_last_row_that_measured_one() -> None:
    model, mo = _scalar(training={"log_interval": 2})
    (lane,) = mo.lanes.values()
    assert lane.monitor.speed() == {}
    for _ in range(2):
        mo.step(model.weight.sum())
    measured = lane.monitor.speed()
    assert measured["samples_s"] > 0
    mo.step(model.weight.sum())
    lane.monitor.validated(3, 0.5, 0.4)  # a row of its own: step 3 ends no interval
    assert lane.monitor.rows[-1][0] == 3 and lane.monitor.speed() == measured


def test_each_warning_is_given_once_over_a_resumed_run(tmp_path: Path) -> None:
    said: list[str] = []

    def run(start: str) -> ModelOptimizer:
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        mo = ModelOptimizer(model, {"training": {"accumulate_steps": 2}})
        mo.lanes[""].monitor.speak = said.append
        if start:
            mo.load_ckpt(start)
        mo.lanes[""].monitor.warn("mine", "a warning")
        return mo

    first = run("")
    first.lanes[""].monitor._active.clear()
    first.lanes[""].monitor.warn("mine", "a warning")
    first.save_ckpt(tmp_path / "a.safetensors")
    second = run(str(tmp_path / "a.safetensors"))
    assert said == ["a warning"] and second.warnings == first.warnings
    assert second.warnings[-1] == "a warning (2 times)"
