"""On GPUs that are only pretended (pretend.cpp): what depends on where a tensor lies, and on the group it is sent over.

Nothing here shows speed, streams or kernels of a real device.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import PipeError, Unavailable
from layerline.training.data.batches import Batches
from layerline.training.distributed import rendezvous
from layerline.training.distributed.sharding import Shards
from layerline.training.setup import capabilities
from tests.training import pretend
from tests.training.group import good, split

RECIPE: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 0.01},
    "training": {"accumulate_steps": 2, "ema_decay": 0.5, "grad_clip_norm": 1.0, "log_interval": 1},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None or sys.platform != "linux" or torch.version.cuda:
        pytest.skip("needs Linux, a C++ compiler and a torch without CUDA")
    return pretend.build(tmp_path_factory.mktemp("pretend"), compiler)


def _model(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(7) if norm else nn.LayerNorm(7)
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Tanh(), nn.Linear(7, 3))


def _data(device: str = "cpu") -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(24, 5, generator=draws), torch.randn(24, 3, generator=draws)
    return x.to(device), y.to(device)


def _epoch(mo: ModelOptimizer, device: str = "cpu", rank: int = 0, size: int = 1) -> None:
    for x, y in zip(*(d.split(4) for d in _data(device)), strict=True):
        mo.step((mo.model(x[rank::size]) - y[rank::size]).square().sum(), weight=len(x[rank::size]))


def _mine(mo: ModelOptimizer) -> dict[str, Any]:
    return {n: t.cpu().numpy() for n, t in mo.export().items()}


def _told(action: Callable[[], object]) -> str:
    """What it refuses, in words; any other error is one."""
    try:
        action()
    except PipeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _ddp_config(**options: Any) -> dict[str, Any]:
    return {**RECIPE, "distributed": {"backend": "nccl", "timeout_s": 30, **options}}


# Whole and sharded models on GPUs, in groups of the loop's own making.


def _whole(rank: int, path: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group()  # NCCL, without being told; nothing sets the current device
    out, device, file = dict[str, Any](), f"cuda:{rank}", Path(path) / "c.safetensors"
    out["cpu"] = _told(lambda: ModelOptimizer(_model(), _ddp_config()))
    for name in ("ddp", "split"):
        model: nn.Module = _model(norm=True)
        model.register_buffer("phase", torch.full((3,), 1j * (rank + 1)))
        model.to(device)
        if name == "split":
            model = split(model)
        mo = ModelOptimizer(model, _ddp_config())
        _epoch(mo, device, rank, 2)
        mo.save_ckpt(file)
        first = _mine(mo)
        _epoch(mo, device, rank, 2)
        mo.load_ckpt(file)
        out[name] = (
            all((first[n] == t).all() for n, t in _mine(mo).items()),
            {t.device.type for t in mo.export().values()},
            mo.export()["phase"][0].item() == 1j,  # the buffer that rank 0 has
        )
    deep = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(device)
    wide = ModelOptimizer(split(deep), _ddp_config())
    for _ in range(2):
        wide.step(wide.model(torch.ones(2, 256, device=device)).sum(), weight=2)
    torch.cuda.reset_peak_memory_stats()
    wide.save_ckpt(file)
    out["saving"] = torch.cuda.max_memory_allocated()
    return out


@pytest.mark.slow
def test_models_on_gpus_train_and_go_on_in_a_group_of_the_users(library: Path, tmp_path: Path) -> None:
    for found in good(pretend.ranks(library, _whole, str(tmp_path))):
        assert found["ddp"] == (True, {"cuda"}, True)
        assert found["split"] == (True, {"cpu"}, True)
        assert "the model is in CPU memory" in found["cpu"]
        # Eight layers of 256 KiB in four copies (weights, average, two states) are 8 MiB; parts and one whole are less.
        assert found["saving"] < 6 * 2**20


# One process.


def _single(_: int) -> dict[str, Any]:
    from layerline.training.run import train_loop as fit

    pretended: Any = sys.modules["pretend"]
    out = dict[str, Any]()
    deep = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).to("cuda")
    for name, sections in (("plain", {}), ("per layer", {"monitor": {"per_layer": True, "log_interval": 1}})):
        mo = ModelOptimizer(deep, sections)
        x = torch.ones(2, 6, device="cuda")
        for _step in range(3):
            loss = deep(x).square().sum()
            before = pretended.reads()
            mo.step(loss)
            out[name] = pretended.reads() - before
    own = torch.optim.SGD(deep.parameters(), lr=0.1)
    mo = ModelOptimizer(deep, {}, optimizer=own)  # whose steps are watched: copies and norms before and after each
    loss, before = deep(x).square().sum(), pretended.reads()
    mo.step(loss)
    out["custom"] = pretended.reads() - before
    mo = ModelOptimizer(deep, {"optimizer": {"name": "sgd"}}, accumulate={"steps": 3})
    before = pretended.reads()
    results = [mo.step(deep(x).square().sum()) for _ in range(3)]
    out["window"] = pretended.reads() - before
    out["results"] = [(bool(r), float(r) == float(results[2]), pretended.reads() - before) for r in results]
    x, y = _data("cuda")
    out["batch"] = next(Batches((x, y), batch_size=4).forever())[0].device.type
    out["copies"] = {t.device.type for t in fit._copies(dict(deep.named_parameters())).values()}
    return out


@pytest.mark.slow
def test_a_step_reads_the_device_once_for_its_norms(library: Path) -> None:
    (found,) = good(pretend.ranks(library, _single, size=1))
    # One for the loss; norms are read together, however many there are.
    assert found["plain"] == 1
    assert found["per layer"] <= 3 and found["custom"] <= 2
    # The losses of a window are copied together at its end; before that a loss is read when its result is used.
    assert found["window"] == 0
    assert found["results"] == [(False, True, 1), (False, True, 2), (True, True, 2)]
    assert found["batch"] == "cuda" and found["copies"] == {"cpu"}


@pytest.mark.parametrize(
    ("group", "serves_cpu", "model", "message"),
    [
        ("cuda", False, "cpu", "NCCL sends what is on a GPU"),
        ("cpu", True, "meta", ""),
        ("cuda", True, "cpu", ""),
    ],
)
def test_what_cannot_travel_in_a_group(group: str, serves_cpu: bool, model: str, message: str) -> None:
    param = nn.Parameter(torch.empty(1, device=model))
    ranks: Any = SimpleNamespace(device=torch.device(group), serves_cpu=serves_cpu)
    told = _told(lambda: capabilities._check_group(ranks, param, split=False))
    assert message in told and bool(message) is bool(told)


def test_weights_that_fully_shard_offloads_need_a_group_for_cpu_memory() -> None:
    param = nn.Parameter(torch.empty(1))
    param.device_mesh = SimpleNamespace(device_type="cuda")
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), serves_cpu=False)
    assert "fully_shard keeps the parameters in CPU" in _told(
        lambda: capabilities._check_group(ranks, param, split=True)
    )
    ranks.serves_cpu = True
    capabilities._check_group(ranks, param, split=True)


@pytest.mark.parametrize(("device", "waits"), [("cuda", 1), ("cpu", 0)])
def test_offloaded_weights_are_waited_for(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    model = nn.Linear(2, 2)
    shards = Shards.__new__(Shards)
    lane: Any = SimpleNamespace(device=torch.device(device), params=list(model.parameters()), model=model)
    shards.lane = lane
    shards.release()
    assert len(waited) == waits


def test_more_ranks_than_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Unavailable, match="has 2 GPUs, and the launcher started a rank for GPU 2"):
        rendezvous.device("cuda", "train.device")
    assert rendezvous.device("cpu", "train.device") == torch.device("cpu")
