"""The best checkpoints by metric, early stopping, a line each interval, and rows for trackers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.train import Train
from layerline.training.config.sections import Config, MonitorConfig
from layerline.training.loop.best_checkpoints import Best


def _run(config: dict[str, Any], metrics: list[float], folder: Path) -> tuple[nn.Linear, ModelOptimizer]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    mo = ModelOptimizer(net, {"optimizer": {"name": "sgd", "lr": 0.1},
                              "monitor": {"save_dir": str(folder), **config}})  # fmt: skip
    for metric in metrics:
        mo.step(net(torch.ones(2, 3)).square().mean())
        mo.validate(lambda _, metric=metric: metric)  # type: ignore[misc]
    return net, mo


def test_the_best_checkpoints_are_kept_and_others_removed(tmp_path: Path) -> None:
    _, mo = _run({"keep_best": 2}, [0.1, 0.5, 0.3, math.nan, 0.4, 0.2], tmp_path)
    assert mo.best is not None
    assert [(e.metric, e.step) for e in mo.best.entries] == [(0.5, 2), (0.4, 5)]
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == [
        "step-00000002.safetensors", "step-00000005.safetensors"
    ]  # fmt: skip


def test_a_lower_metric_may_be_the_better_one(tmp_path: Path) -> None:
    _, mo = _run({"keep_best": 1, "better": "lower"}, [0.3, 0.1, 0.2], tmp_path)
    assert mo.best is not None
    assert mo.best.entries[0].step == 2


def test_it_stops_after_validations_without_improvement(tmp_path: Path) -> None:
    best = Best(Config(monitor=MonitorConfig(early_stop=2)), tmp_path)
    stops = []
    for step, metric in enumerate([0.1, 0.3, 0.2, 0.4, 0.4, math.nan]):
        best.observe(metric, step, lambda path: pytest.fail("nothing is kept"))
        stops.append(best.should_stop)
    assert stops == [False, False, False, False, False, True]
    assert [(e.metric, e.file) for e in best.entries] == [(0.4, "")]


def test_what_was_best_is_resumed(tmp_path: Path) -> None:
    _, mo = _run({"keep_best": 1, "early_stop": 3}, [0.5, 0.4], tmp_path)
    mo.save_ckpt(tmp_path / "last.safetensors")
    _, other = _run({"keep_best": 1, "early_stop": 3}, [], tmp_path)
    other.load_ckpt(tmp_path / "last.safetensors")
    assert other.best is not None and mo.best is not None
    assert other.best.entries == mo.best.entries
    assert other.best.waited == 1


def test_a_line_is_printed_and_trackers_are_called_each_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    mo = ModelOptimizer(net, {"monitor": {"log_interval": 2, "print": True}})
    rows: list[dict[str, float]] = []
    mo.on_log(rows.append)
    for _ in range(4):
        mo.step(net(torch.ones(2, 3)).square().mean())
    mo.validate(lambda _: 0.25)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2", "step 4", "step 4"]
    assert f"loss {rows[0]['loss']:.4g}" in lines[0] and "lr 0.001" in lines[0]
    assert [row["step"] for row in rows] == [2, 4, 4]
    assert rows[2]["metric_deploy"] == 0.25 and "wait_rate" not in rows[0]


TASK = """
import numpy as np, torch
from torch import nn
calls = 0
def model():
    return nn.Linear(4, 3)
def train_data():
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    return x, x[:, :3].argmax(1)
def eval_data():
    return train_data()
def metric(outputs, targets):
    global calls
    calls += 1
    return [0.1, 0.1, 0.9, 0.9, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4][min(calls - 1, 9)]
"""


class Quiet:
    def say(self, text: str) -> None: ...

    def progress(self, done: int, total: int, **fields: Any) -> None: ...

    def row(self, figures: Any) -> None: ...


def test_the_stage_stops_early_and_leaves_the_best(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    work = Work(
        inputs={}, task=Task(tmp_path / "task.py"), out=tmp_path / "out", scratch=tmp_path / "scratch", log=Quiet()
    )
    training = {"valid_interval": 2, "keep_best": 1, "early_stop": 2, "ema_decay": 0.5}
    report = Train(steps=40, batch_size=8, training=training).run(work)
    assert report.metrics["steps"] == 4
    (note,) = [n for n in report.notes if "best" in n]
    assert "step 4" in note and "0.9" in note and "last step was 8" in note
    kept = load_file(tmp_path / "scratch" / "best" / "step-00000004.safetensors")
    shipped = load_file(tmp_path / "out" / "checkpoint.safetensors")
    assert torch.equal(kept["online/weight"], shipped["online/weight"])
    assert torch.equal(kept["ema/weight"], shipped["ema/weight"])
    steps = [line.split(",")[0] for line in (tmp_path / "out" / "metrics.csv").read_text().splitlines()[1:]]
    assert steps[-1] == "8"


def test_two_validations_of_one_step_share_its_checkpoint(tmp_path: Path) -> None:
    net, mo = _run({"keep_best": 1, "early_stop": 2}, [0.5], tmp_path)
    mo.validate(lambda _: 0.6)
    mo.validate(lambda _: 0.4)
    assert mo.best is not None and [tuple(e) for e in mo.best.entries] == [(0.6, 1, "step-00000001.safetensors")]
    assert not mo.should_stop
    assert torch.equal(load_file(tmp_path / "best" / "step-00000001.safetensors")["online/weight"], net.weight)


@pytest.mark.parametrize("section", [
    {"pruning": {"method": "magnitude", "share": 0.5, "end_step": 4, "every": 1}},
    {"swa": {"share": 0.4}, "scheduler": {"name": "constant", "total_steps": 5}},
], ids=["pruning", "swa"])  # fmt: skip
def test_the_best_is_looked_for_once_pruning_or_averaging_is_complete(section: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    mo = ModelOptimizer(net, {"monitor": {"keep_best": 1, "early_stop": 2, "save_dir": str(tmp_path)}, **section})
    for metric in (0.9, 0.8, 0.7, 0.2, 0.3):
        mo.step(net(torch.ones(2, 3)).square().mean())
        mo.validate(lambda _, metric=metric: metric)  # type: ignore[misc]
    assert mo.best is not None
    assert [(e.metric, e.step) for e in mo.best.entries] == [(0.3, 5)]
    assert not mo.should_stop


def test_a_copy_follows_its_own_best(tmp_path: Path) -> None:
    _, mo = _run({"keep_best": 1, "early_stop": 3}, [0.5, 0.4], tmp_path)
    twin = copy.deepcopy(mo)
    assert twin.best is not None and mo.best is not None
    assert twin.best is twin.extras["best"] and twin.best is not mo.best
    assert twin.best.entries == mo.best.entries and twin.best.waited == 1


@pytest.mark.parametrize("name", ["../victim.safetensors", "/etc/hosts", "a/b.safetensors", ".."])
def test_a_checkpoint_names_no_file_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    best = Best(Config(monitor=MonitorConfig(keep_best=1)), tmp_path)
    with pytest.raises(StageError):
        best.load_state_dict({"entries": [[0.5, 1, name]], "waited": 0})
    assert best.entries == []


@pytest.mark.parametrize(
    "fields", [{"scheduler": {"name": "plateau", "mode": "min"}}, {"monitor": {"better": "lower"}}]
)
def test_one_field_says_which_metric_is_better_for_schedule_and_checkpoints(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = {"optimizer": {"name": "sgd", "lr": 1.0}, "scheduler": {"name": "plateau", "patience": 0, "factor": 0.5}}
    for section in ("scheduler", "monitor"):
        config[section] = {**config.get(section, {}), **fields.get(section, {})}
    config["monitor"] |= {"early_stop": 2, "save_dir": str(tmp_path)}
    mo = ModelOptimizer(nn.Linear(1, 1), config)
    for metric in (0.3, 0.2):
        mo.validate(lambda _, metric=metric: metric)  # type: ignore[misc]
    assert mo.best is not None and mo.best.entries[0].metric == 0.2 and mo.current_lr == 1.0


def test_fields_that_disagree_on_the_better_metric_are_refused() -> None:
    config = {"scheduler": {"name": "plateau", "mode": "max"}, "monitor": {"better": "lower"}}
    with pytest.raises(ConfigError, match=r"scheduler\.mode is max and monitor\.better is lower"):
        ModelOptimizer(nn.Linear(1, 1), config)
