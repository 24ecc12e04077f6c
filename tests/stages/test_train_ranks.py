"""train on several ranks: one artifact, by rank 0, the same for any number; cached, resumed and failing together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from layerline import ModelOptimizer
from layerline.pipeline.config import project as projects
from layerline.pipeline.run.runner import Runner
from layerline.training.state import safetensors_io
from layerline.views.terminal import Silent
from tests.training.group import good
from tests.training.group import ranks as run

TASK = """
import os
import torch
from torch import nn

FORM = "{form}"
SPLIT = False

def model():
    if os.environ.get("RANK") == os.environ.get("NO_MODEL", "none"):
        raise ValueError("no model on this machine")
    net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    if SPLIT and torch.distributed.is_initialized():
        torch.distributed.fsdp.fully_shard(net[0])
        torch.distributed.fsdp.fully_shard(net)
    return net

def train_data():
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(37, 6, generator=draws)
    y = x[:, :3].argmax(1)
    if FORM == "arrays":
        return x, y
    if FORM == "samples":
        return torch.utils.data.TensorDataset(x, y)
    return list(zip(x.split(9), y.split(9)))

def eval_data():
    return train_data()

calls = 0

def loss(net, batch):
    global calls
    calls += 1
    at = os.environ.get("STRIKE", "")
    if at and calls == int(at):
        raise RuntimeError("struck")
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)
"""
# 37 samples in batches of 9: the last one has a single sample, of which the second rank gets none.
YAML = """name: two
train: {epochs: 4, batch_size: 9, training: {accumulate_steps: 2, valid_interval: 4, save_interval: 2}}
"""


def _project(folder: Path, form: str = "arrays", yaml: str = YAML) -> Path:
    folder.mkdir()
    (folder / "task.py").write_text(TASK.replace("{form}", form))
    (folder / "pipe.yaml").write_text(yaml)
    return folder


def _run(_rank: int, folder: str, environment: dict[str, str] | None = None) -> tuple[list[tuple[str, str]], str]:
    """`pipe run train` in this process; stage states and the first error."""
    os.environ.update(environment or {})
    done = Runner(projects.load(Path(folder)), Silent()).run(["train"])
    error = next((str(r.error) for r in done.results if r.error), "")
    return [(r.name, r.state) for r in done.results], error


def _and_then_alone(rank: int, folder: str) -> bool:
    """What a later stage of rank 0 does after training: it trains a model of its own, and nobody else is there."""
    _run(rank, folder)
    if rank > 0:
        return True
    net = torch.nn.Linear(2, 1)
    mo = ModelOptimizer(net, {})
    return mo.ranks is None and mo.step(net(torch.ones(1, 2)).sum())


def test_after_training_rank_0_goes_on_alone(tmp_path: Path) -> None:
    assert good(run(_and_then_alone, str(_project(tmp_path / "p")))) == [True, True]


def _checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    record = Runner(projects.load(folder), Silent()).ledger.head("train")
    assert record is not None
    return safetensors_io.load(folder / ".layerline" / "store" / record.digest / "checkpoint.safetensors")


@pytest.mark.parametrize("form", ["arrays", "samples", "batches"])
def test_two_ranks_leave_the_artifact_that_one_leaves(form: str, tmp_path: Path) -> None:
    one, two = _project(tmp_path / "one", form), _project(tmp_path / "two", form)
    assert _run(0, str(one)) == ([("train", "ran")], "")
    assert good(run(_run, str(two))) == [([("train", "ran")], "")] * 2
    assert len(list((two / ".layerline" / "store").iterdir())) == 1
    (tensors, meta), (expected, other) = _checkpoint(two), _checkpoint(one)
    assert [(n, t.shape, t.dtype) for n, t in tensors.items()] == [(n, t.shape, t.dtype) for n, t in expected.items()]
    assert meta["config"] == other["config"]
    # Loss and gradient norm are sums over ranks: equal up to rounding, as the weights are.
    assert meta["lanes"][""]["counters"] == pytest.approx(other["lanes"][""]["counters"], rel=1e-5)
    for name, tensor in tensors.items():
        close = torch.allclose(tensor, expected[name], atol=1e-6) if tensor.is_floating_point() else True
        assert close, name
    if form != "arrays":
        return
    # Whichever of them asks next finds it there.
    assert good(run(_run, str(two))) == [([("train", "cached")], ""), ([], "")]
    assert _run(0, str(two)) == ([("train", "cached")], "")


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_struck_down_and_rerun_two_ranks_end_in_the_same_bytes(split: bool, tmp_path: Path) -> None:
    straight, struck = _project(tmp_path / "a"), _project(tmp_path / "b")
    for folder in (straight, struck):
        source = (folder / "task.py").read_text()
        (folder / "task.py").write_text(source.replace("SPLIT = False", f"SPLIT = {split}"))
    good(run(_run, str(straight)))
    states = good(run(_run, str(struck), {"STRIKE": "11"}))
    assert [s for s, _ in states] == [[("train", "failed")]] * 2 and all("struck" in e for _, e in states)
    assert list((struck / ".layerline" / "work").rglob("step-*.safetensors"))
    assert good(run(_run, str(struck))) == [([("train", "ran")], "")] * 2
    stores = [sorted(p.name for p in (f / ".layerline" / "store").iterdir()) for f in (straight, struck)]
    assert stores[0] == stores[1] and len(stores[0]) == 1


def test_what_fails_on_one_rank_is_told_by_the_other(tmp_path: Path) -> None:
    folder = _project(tmp_path / "p")
    first, second = good(run(_run, str(folder), {"NO_MODEL": "1"}))
    assert second[0] == [("train", "failed")] and "no model on this machine" in second[1]
    assert first[0] == [("train", "failed")]
    assert "rank 1 ended with TaskError: model() raised ValueError: no model on this machine" in first[1]
    assert not (folder / ".layerline" / "store").exists()


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    folder = _project(tmp_path / "p")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "layerline.cli", "run", "train"]  # fmt: skip
    said = []
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].count("✓ train     ran") == 1 and said[1].count("✓ train     cached") == 1
    single = _project(tmp_path / "one")
    assert _run(0, str(single)) == ([("train", "ran")], "")
    (tensors, _), (expected, _) = _checkpoint(folder), _checkpoint(single)
    assert tensors.keys() == expected.keys()
    assert all(torch.allclose(t, expected[n], atol=1e-6) for n, t in tensors.items() if t.is_floating_point())


def _run_in(rank: int, *folders: str) -> tuple[list[tuple[str, str]], str]:
    return _run(rank, folders[rank])


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("task.py", "manual_seed(1)", "manual_seed(2)", "train_data() and what it reaches: "),
        ("x.csv", "1", "2", "the file x.csv: "),
    ],
)
def test_ranks_with_other_code_or_data_are_refused(name: str, old: str, new: str, told: str, tmp_path: Path) -> None:
    folders = [_project(tmp_path / n, yaml="data: [x.csv]\n" + YAML) for n in ("a", "b")]
    for folder in folders:
        (folder / "x.csv").write_text("1")
    changed = folders[1] / name
    changed.write_text(changed.read_text().replace(old, new))
    for states, error in good(run(_run_in, *map(str, folders))):
        assert states == [("train", "failed")]
        assert f"rank 1 is not like rank 0: rank 0 has {told}" in error and "on each rank" in error
