"""Two ranks are one big batch, however gradients travel; what differs or is missing is told by name, in good time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.untrusted import launched
from layerline.training.config.sections import Config
from layerline.training.distributed import rendezvous
from layerline.training.loop.masks import Gradual
from layerline.training.model.split_tensors import whole
from layerline.training.setup import capabilities
from layerline.training.state import safetensors_io
from layerline.training.state.checkpoint import load_weights
from tests.training.group import Died, good, split
from tests.training.group import ranks as run
from tests.training.zeros import share_of_zeros

GLOO: dict[str, Any] = {"backend": "gloo", "timeout_s": 30}


def _model(seed: int = 0, *, norm: str = "layer") -> nn.Sequential:
    torch.manual_seed(seed)
    middle = {"layer": nn.LayerNorm(7), "batch": nn.BatchNorm1d(7)}[norm]
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Tanh(), nn.Linear(7, 3))


def _data(samples: int = 24) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(samples, 5, generator=draws), torch.randn(samples, 3, generator=draws)


def _train(rank: int, size: int, config: dict[str, Any], *, wrapped: bool = True, seed: int = 0, half: bool = False,
           batch: int = 4, shard: bool = False) -> tuple[ModelOptimizer, nn.Module]:  # fmt: skip
    """One pass over the data in batches, of which each rank has every size-th sample."""
    model: nn.Module = _model(seed)
    if half:
        model.half()
    if shard:
        model = split(model)
    mo = ModelOptimizer(model, config)
    called = mo.model if wrapped else model
    for x, y in zip(*(d.split(batch) for d in _data()), strict=True):
        x, y = x[rank::size], y[rank::size]
        with mo.autocast():
            out = called(x.half() if half else x)
        mo.step((out.float() - y).square().sum(), weight=len(x))
    mo.flush()
    return mo, model


def _weights(mo: ModelOptimizer) -> dict[str, Any]:
    return {n: t.numpy() for n, t in mo.export().items()}


def _one_of_two(rank: int, config: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    # Ranks begin with different weights: those of rank 0 count.
    mo, _ = _train(rank, 2, config, seed=rank, **options)
    return _weights(mo), mo.grad_norm, mo.lanes[""].loss


_WAYS: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("ddp", {}, {}, 2e-6),
    ("ddp, accumulated, short last window", {"training": {"accumulate_steps": 4}}, {}, 2e-6),
    ("plain model", {}, {"wrapped": False}, 2e-6),
    ("small buckets", {"distributed": {"bucket_mb": 1}, "training": {"accumulate_steps": 2}}, {"wrapped": False}, 2e-6),
    ("ragged", {}, {"batch": 5}, 2e-6),
    ("fp16 hook", {"distributed": {"compress": "fp16"}}, {}, 1e-3),
    ("bf16 hook", {"distributed": {"compress": "bf16"}}, {}, 1e-2),
    ("bf16 by hand", {"distributed": {"compress": "bf16"}}, {"wrapped": False}, 1e-2),
    ("masters, accumulated", {"training": {"accumulate_steps": 2}}, {"half": True}, 2e-3),
    ("fp16 scale with weights", {"precision": {"amp": "fp16"}}, {"batch": 5}, 2e-3),
    ("lamb and clipping", {"optimizer": {"name": "lamb"}, "training": {"grad_clip_norm": 0.5}}, {}, 2e-6),
]


def _together(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "distributed": {**GLOO, **config.get("distributed", {})}}


def _every_way(rank: int) -> list[tuple[dict[str, Any], float, float]]:
    return [_one_of_two(rank, _together(config), options) for _, config, options, _ in _WAYS]


@pytest.fixture(scope="module")
def both() -> list[list[tuple[dict[str, Any], float, float]]]:
    return good(run(_every_way))


@pytest.mark.parametrize("way", range(len(_WAYS)), ids=[w[0] for w in _WAYS])
def test_two_ranks_equal_one_process_with_the_whole_batch(way: int, both: Any) -> None:
    _, config, options, bound = _WAYS[way]
    alone = {k: v for k, v in config.items() if k != "distributed"}
    mo, _ = _train(0, 1, alone, **{k: v for k, v in options.items() if k != "wrapped"})
    (first, norm, loss), (second, *_) = both[0][way], both[1][way]
    for tensor, value in _weights(mo).items():
        assert (first[tensor] == second[tensor]).all(), tensor
        assert abs(first[tensor] - value).max() <= bound, tensor
    assert norm == pytest.approx(mo.grad_norm, rel=max(bound, 1e-5) * 5)
    assert loss == pytest.approx(mo.lanes[""].loss, rel=max(bound, 1e-5) * 5)


def _sharded(rank: int, config: dict[str, Any], path: str) -> dict[str, Any]:
    mo, model = _train(rank, 2, config, shard=True)
    parts = [p.to_local().numel() for p in model.parameters()]  # type: ignore[operator]
    gap = mo.validate(lambda m: float(m(_data()[0]).sum()))
    mo.save_ckpt(Path(path) / "ckpt.safetensors")
    before = _weights(mo)
    mo.step((model(_data()[0]) - 1).square().sum(), weight=24)
    load_weights(model, Path(path) / "ckpt.safetensors")
    loaded = {n: whole(p.detach()).numpy() for n, p in model.named_parameters()}
    assert all((before[n] == t).all() for n, t in loaded.items())
    mo.load_ckpt(Path(path) / "ckpt.safetensors")
    again = _weights(mo)
    assert all((before[n] == again[n]).all() for n in before)
    mo.apply_mask({"0.weight": torch.eye(7, 5)})
    mo.step((model(_data()[0][rank::2]) - 1).square().sum(), weight=12)
    masked = _weights(mo)["0.weight"]
    return {"weights": before, "norm": mo.grad_norm, "parts": parts, "gap": gap, "masked": masked}


def test_sharded_ranks_equal_one_process_and_split_the_weights(tmp_path: Path) -> None:
    config = {"training": {"accumulate_steps": 2, "ema_decay": 0.5, "grad_clip_norm": 1.0}}
    mo, model = _train(0, 1, config)
    gap = mo.validate(lambda m: float(m(_data()[0]).sum()))
    results = good(run(_sharded, {**config, "distributed": GLOO}, str(tmp_path)))
    sizes = [p.numel() for p in model.parameters()]
    assert [sum(parts) for parts in zip(*(rank["parts"] for rank in results), strict=True)] == sizes
    for rank in results:
        assert all(abs(rank["weights"][n] - t).max() <= 2e-6 for n, t in _weights(mo).items())
        assert rank["gap"] == pytest.approx(gap, rel=1e-4) and gap["gap"] != 0
        assert not rank["masked"][torch.eye(7, 5) == 0].any() and rank["masked"].any()


def test_a_checkpoint_is_the_same_whoever_wrote_it(tmp_path: Path) -> None:
    """One process, two ranks, two sharded ranks: the same names, shapes and types, values alike; each reads each."""
    config = {"training": {"ema_decay": 0.9, "accumulate_steps": 2}, "optimizer": {"name": "adamw"}}
    mo, _ = _train(0, 1, config)
    files = {"one": tmp_path / "one.safetensors"}
    from layerline.training.state import checkpoint

    checkpoint.save(mo, files["one"], timings=False)
    good(run(_write, config, str(tmp_path)))
    files |= {n: tmp_path / f"{n}.safetensors" for n in ("ddp", "split")}
    one, meta = safetensors_io.load(files["one"])
    for name, path in files.items():
        tensors, other = safetensors_io.load(path)
        assert [(n, t.shape, t.dtype) for n, t in tensors.items()] == [(n, t.shape, t.dtype) for n, t in one.items()]
        # Loss and gradient norm are sums over ranks: equal up to rounding, as the weights are.
        assert other["lanes"][""]["counters"] == pytest.approx(meta["lanes"][""]["counters"], rel=1e-6)
        assert list(other) == list(meta)
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                assert torch.allclose(tensor, one[key], atol=3e-6), (name, key)
    mo.load_ckpt(files["split"])
    mo.load_ckpt(files["ddp"])


def _write(rank: int, config: dict[str, Any], path: str) -> None:
    from layerline.training.state import checkpoint

    for name in ("ddp", "split"):
        mo, _ = _train(rank, 2, {**config, "distributed": GLOO}, shard=name == "split")
        checkpoint.save(mo, Path(path) / f"{name}.safetensors", timings=False)
        mo.load_ckpt(Path(path) / "one.safetensors")


def _resume(rank: int, path: str, size: int, shard: bool) -> dict[str, Any]:
    """Six steps with dropout, saved after three; and three more from the file."""
    out = {}
    for name, steps, load in (("straight", 6, False), ("half", 3, False), ("resumed", 3, True)):
        torch.manual_seed(100)
        model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.BatchNorm1d(7), nn.Linear(7, 3))
        if shard:
            model = split(model)
        torch.manual_seed(100 + rank)
        mo = ModelOptimizer(model, {"distributed": GLOO, "training": {"ema_decay": 0.9}})
        if load:
            torch.manual_seed(7)
            mo.load_ckpt(Path(path))
        x, y = _data(24 * size)
        for i in range(mo.global_step, mo.global_step + steps):
            part = slice(4 * (size * i + rank), 4 * (size * i + rank) + 4)
            mo.step((mo.model(x[part]) - y[part]).square().mean())
        if name == "half":
            mo.save_ckpt(Path(path))
        out[name] = {**_weights(mo), "draw": float(torch.rand(()))}
    return out


@pytest.mark.parametrize(
    ("size", "shard"),
    [
        (2, False),
        (2, True),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_resuming_with_as_many_ranks_is_bit_exact_with_each_ranks_own_draws(
    size: int, shard: bool, tmp_path: Path
) -> None:
    every = good(run(_resume, str(tmp_path), size, shard, size=size))
    assert len({rank["straight"]["draw"] for rank in every}) == size
    for rank in every:
        for name, value in rank["straight"].items():
            assert (value == rank["resumed"][name]).all() if hasattr(value, "all") else value == rank["resumed"][name]


def test_an_open_window_is_saved_as_the_mean_of_the_ranks(tmp_path: Path) -> None:
    good(run(_open_window, str(tmp_path / "open.safetensors")))
    x, y = _data()
    alone = ModelOptimizer(
        model := _model(), {"training": {"accumulate_steps": 2}, "optimizer": {"name": "sgd", "lr": 0.1}}
    )
    alone.load_ckpt(tmp_path / "open.safetensors")
    assert alone.lanes[""].window.micro == 1 and alone.lanes[""].window.weight == 6.0
    alone.step((model(x[12:18]) - y[12:18]).square().sum(), weight=6)
    whole = ModelOptimizer(model := _model(), {"optimizer": {"name": "sgd", "lr": 0.1}})
    # The mean of two ranks' six samples counts as six, beside the six that came after.
    loss = (model(x[:12]) - y[:12]).square().sum() / 2 + (model(x[12:18]) - y[12:18]).square().sum()
    whole.step(loss, weight=12)
    assert all(torch.allclose(t, whole.export()[n], atol=1e-6) for n, t in alone.export().items())


def _open_window(rank: int, path: str) -> None:
    model, (x, y) = _model(), _data()
    config = {"training": {"accumulate_steps": 2}, "optimizer": {"name": "sgd", "lr": 0.1}, "distributed": GLOO}
    mo = ModelOptimizer(model, config)
    mo.step((mo.model(x[rank:12:2]) - y[rank:12:2]).square().sum(), weight=6)
    mo.save_ckpt(path)


# Buffers, logs, several optimizers.


def _statistics(rank: int) -> tuple[list[float], dict[str, float], list[str], list[str]]:
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1))
    mo = ModelOptimizer(model, {"distributed": GLOO, "training": {"log_interval": 1}})
    for step in range(10):  # in its second step DDP settles its buckets: that wait is in its time
        if rank == 1:
            time.sleep(0.3 if step == 9 else 0.1)
        mo.step(mo.model(torch.tensor([[1.0], [3.0]]) + 10 * rank).sum())
    lane = mo.lanes[""]
    last = dict(zip(lane.monitor.columns, lane.monitor.rows[-1], strict=True))
    return [float(model[0].running_mean), float(model[0].running_var)], last, list(lane.monitor.columns), mo.warnings


def test_statistics_are_the_mean_over_ranks_and_the_slow_rank_is_in_the_log() -> None:
    first, second = good(run(_statistics))
    # Means 2 and 12, variance 2 each: ten updates with momentum 0.1.
    assert first[0] == second[0] == pytest.approx([7 * (1 - 0.9**10), 0.9**10 + 2 * (1 - 0.9**10)])
    assert first[2][-4:] == ["comm_rate", "imbalance", "step_s/0", "step_s/1"]
    seconds = [first[1][f"step_s/{r}"] for r in (0, 1)]
    assert seconds[1] > 0.3 and seconds[1] > seconds[0] > 0
    assert first[1]["imbalance"] == pytest.approx(2 * seconds[1] / sum(seconds))
    # Rank 0 waits for most of each step; what rank 1 spends after its backward pass is communication.
    assert 0 < first[1]["comm_rate"] == second[1]["comm_rate"] < 0.8
    assert [w for w in first[3] if w.startswith("rank 1 takes ")] and first[3] == second[3]


def _partly_used(rank: int) -> dict[str, Any]:
    """One parameter is never used, one on rank 1 only."""
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(2, 1, bias=False) for n in ("always", "never", "here")})
    mo = ModelOptimizer(_Partly(model), {"distributed": GLOO, "optimizer": {"name": "sgd", "lr": 1.0}})
    for _ in range(3):
        mo.step(mo.model(torch.ones(1, 2), rank == 1).sum())
    return _weights(mo)


class _Partly(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, here: bool) -> Tensor:
        out: Tensor = self.parts["always"](x)
        return out + self.parts["here"](x) if here else out


def test_parameters_without_a_gradient_somewhere_or_everywhere() -> None:
    first, second = good(run(_partly_used))
    torch.manual_seed(0)
    start = {
        f"parts.{n}.weight": nn.Linear(2, 1, bias=False).weight.detach().numpy() for n in ("always", "never", "here")
    }
    moved = {n: float((w - first[n]).max()) for n, w in start.items()}
    assert moved == pytest.approx({"parts.always.weight": 3.0, "parts.never.weight": 0.0, "parts.here.weight": 1.5})
    assert all((first[n] == second[n]).all() for n in start)


class _Drops(nn.Module):
    """A layer is left out where its bit is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, left_out: int = 0) -> Tensor:
        h = self.first(x).tanh()
        for i, layer in enumerate(self.layers):
            h = h if left_out >> i & 1 else h + layer(h)
        out: Tensor = self.last(h)
        return out


# What rank leaves out at step.
_LEFT_OUT: dict[str, Callable[[int, int], int]] = {
    "on all ranks, later": lambda rank, step: int(step == 3),
    "on all ranks, at first": lambda rank, step: int(step < 2),
    "on one rank, from the first step": lambda rank, step: rank,
    "on one rank, once": lambda rank, step: int(step == 3 and rank == 1),
    "here one, there the other": lambda rank, step: 1 + rank,
    "now these, now those": lambda rank, step: [0, 1, 2, 3, 3, 2, 1, 0][(5 * step + 3 * rank) % 8],
}
_MEANWHILE: dict[str, dict[str, Any] | None] = {
    "plain": None, "own wrapper": {}, "bucket views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
}  # fmt: skip
_MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}


def _uneven(step: int, rank: int) -> Tensor:
    return torch.randn(3 + rank + step, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def _drop_alone(left_out: Callable[[int, int], int], every: int, frozen: int) -> list[Tensor]:
    """All samples of each window in one loss, by hand."""
    model = _Drops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 8, every):
        if start >= frozen:
            model.layers[1].requires_grad_(False)
        pairs = [(step, rank) for step in range(start, min(start + every, 8)) for rank in (0, 1)]
        losses = [model(_uneven(*pair), left_out(pair[1], pair[0])).square().sum() for pair in pairs]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(len(_uneven(*pair)) for pair in pairs)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _drop_apart(rank: int, left_out: str, wrapped: dict[str, Any] | None, every: int, frozen: int) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    plain = _Drops()
    model = plain if wrapped is None else DistributedDataParallel(plain, **wrapped)
    mo = ModelOptimizer(
        model, {"optimizer": _MOMENTUM, "accumulate": {"steps": every}, "distributed": {**GLOO, "timeout_s": 20}}
    )
    for step in range(8):
        if step >= frozen:
            plain.layers[1].requires_grad_(False)
        x = _uneven(step, rank)
        mo.step(mo.model(x, _LEFT_OUT[left_out](rank, step)).square().sum(), weight=len(x))
    mo.flush()
    return [p.detach().numpy() for p in plain.parameters()]


def _every_drop(rank: int) -> dict[Any, list[Any]]:
    ModelOptimizer(_Drops(), {"distributed": GLOO})  # so that there is a group to wrap a model in
    return {
        (left_out, how, every, frozen): _drop_apart(rank, left_out, _MEANWHILE[how], every, frozen)
        for left_out in _LEFT_OUT for how in _MEANWHILE for every in (1, 3) for frozen in (3, 8)
    }  # fmt: skip


def test_any_rank_may_leave_out_any_layer_in_any_window() -> None:
    """Also one that is frozen on the way; the wrapper waits for it all the same."""
    first, second = good(run(_every_drop))
    for case, weights in first.items():
        left_out, _, every, frozen = case
        for a, b, alone in zip(weights, second[case], _drop_alone(_LEFT_OUT[left_out], every, frozen), strict=True):
            assert (a == b).all(), case
            assert abs(a - alone.numpy()).max() < 3e-6, case


def _passes(rank: int) -> dict[str, list[Any]]:
    """Two losses of one forward pass; no backward pass on one rank; a second pass through the plain model; half."""

    def two(mo: ModelOptimizer, x: Tensor, step: int) -> None:
        out = mo.model(x)
        lane = mo.lanes[""]
        with lane.peers.backward():  # type: ignore[union-attr]
            out.square().mean().backward(retain_graph=True)
        mo.step(out.mean())

    def none(mo: ModelOptimizer, x: Tensor, step: int) -> None:
        loss = mo.model(x).square().mean()
        mo.step(None if rank == 1 and step in (0, 2) else loss)

    def plain(mo: ModelOptimizer, x: Tensor, step: int) -> None:
        mo.backward(mo.model(x, 1).square().mean())
        mo.step(mo.lanes[""].model(x, 2).square().mean())

    def half(mo: ModelOptimizer, x: Tensor, step: int) -> None:
        mo.step(mo.model(x.half(), (rank + step) % 3).float().square().mean())

    out = {}
    for case in (two, none, plain, half):
        model = _Drops().half() if case is half else _Drops()
        mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "distributed": {**GLOO, "timeout_s": 20}})
        for step in range(5):
            case(mo, _uneven(step, rank), step)
        out[case.__name__] = [p.detach().float().numpy() for p in model.parameters()]
    return out


def test_backward_passes_that_the_wrapper_does_not_expect() -> None:
    first, second = good(run(_passes))

    def loss(case: str, model: nn.Module, step: int, rank: int) -> Tensor:
        x = _uneven(step, rank)
        terms = {
            "two": lambda: model(x).square().mean() + model(x).mean(),
            "none": lambda: model(x).square().mean() * (0 if rank == 1 and step in (0, 2) else 1),
            "plain": lambda: model(x, 1).square().mean() + model(x, 2).square().mean(),
            "half": lambda: model(x, (rank + step) % 3).square().mean(),
        }
        out: Tensor = terms[case]()
        return out

    for case, weights in first.items():
        model = _Drops()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            ((loss(case, model, step, 0) + loss(case, model, step, 1)) / 2).backward()
            optimizer.step()
        for a, b, alone in zip(weights, second[case], model.parameters(), strict=True):
            assert (a == b).all(), case
            assert abs(a - alone.detach().numpy()).max() < (1e-3 if case == "half" else 1e-6), case


class _Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 2)
        self.late: nn.Module | None = None

    def grow(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.late = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out if self.late is None else out + self.late(x)


def _grown(rank: int, size: int, how: str, config: dict[str, Any]) -> list[Any]:
    model = _Grows()
    if how == "unfrozen":
        model.grow(5)
        model.late.requires_grad_(False)  # type: ignore[union-attr]
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"ema_decay": 0.5}, **config})
    for step in range(6):
        if step == 3:
            if how == "joined":
                model.grow(5 + rank)  # the values of rank 0 count
            else:
                model.late.requires_grad_(True)  # type: ignore[union-attr]
            assert mo.join() == ["late.weight", "late.bias"]
        parts = [_uneven(2, r)[:5] for r in ((rank,) if size == 2 else (0, 1))]
        mo.step(mo.model(torch.cat(parts) + step / 10).square().mean())
    return [*(p.detach().numpy() for p in model.parameters()), *_weights(mo).values()]


def _both_ways(rank: int) -> list[list[Any]]:
    config: dict[str, Any] = {"distributed": {**GLOO, "timeout_s": 20}}
    return [
        _grown(rank, 2, how, {**config, "accumulate": {"steps": every}})
        for how in ("joined", "unfrozen") for every in (1, 2)
    ]  # fmt: skip


def test_parameters_that_join_later_are_reduced_as_well() -> None:
    first, second = good(run(_both_ways))
    alone = [_grown(0, 1, how, {"accumulate": {"steps": every}}) for how in ("joined", "unfrozen") for every in (1, 2)]
    for ours, theirs, expected in zip(first, second, alone, strict=True):
        for a, b, c in zip(ours, theirs, expected, strict=True):
            assert (a == b).all() and abs(a - c).max() < 1e-6


def _unequal(rank: int) -> list[str]:
    """What is refused: static_graph, other parameters that join, a parameter that joins shards, other masks."""
    from torch.nn.parallel import DistributedDataParallel

    said = []
    mo = ModelOptimizer(_Drops(), {"distributed": GLOO})
    model = _Grows()
    other = ModelOptimizer(model, {"distributed": GLOO})
    model.late = nn.Linear(4, 2) if rank else nn.Linear(4, 2, bias=False)
    sharded = _Grows()
    parts = ModelOptimizer(split(sharded), {"distributed": GLOO})
    sharded.grow(1)
    attempts: list[Callable[[], Any]] = [
        lambda: ModelOptimizer(DistributedDataParallel(_Drops(), static_graph=True), {"accumulate": {"steps": 2}}),
        lambda: mo.apply_mask({"first.weight": torch.eye(4) if rank else 1 - torch.eye(4)}),
        parts.join,
        other.join,
    ]
    for attempt in attempts:
        with pytest.raises((ConfigError, StageError)) as error:
            attempt()
        said.append(str(error.value))
    assert not mo.lanes[""].masks
    return said


def test_what_ranks_refuse_of_one_another() -> None:
    for static, masks, shards, joins in good(run(_unequal)):
        assert static.startswith("model: the model's DistributedDataParallel has static_graph")
        assert "rank 1 has other masks than rank 0" in masks
        assert "late.weight: a parameter cannot join a model that is split already" in shards
        assert "rank 0 has nothing more, rank 1 has parameter late.bias: float32 (2,)" in joins


def _saved_whole(rank: int) -> bool:
    import copy
    import io

    model = _model()
    ModelOptimizer(model, {"distributed": GLOO, "nonfinite": {"triage": True}})
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, _ = _data()
    return all(torch.equal(m(x), model(x)) for m in (loaded, copy.deepcopy(model)))


def test_a_model_that_is_watched_can_be_saved_and_copied() -> None:
    assert good(run(_saved_whole)) == [True, True]


def _gan(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    nets = {"generator": nn.Linear(2, 4), "discriminator": nn.Linear(4, 1)}
    mo = ModelOptimizer(nets, {"distributed": GLOO, "optimizer": {"name": "sgd", "lr": 0.1}})
    for i in range(3):
        noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(i))[rank::2]
        fake = nets["generator"](noise)
        mo.step((nets["discriminator"](fake.detach()) - 1).square().mean(), only="discriminator")
        mo.step(nets["discriminator"](nets["generator"](noise)).square().mean(), only="generator")
    return _weights(mo)


def test_two_optimizers_on_two_ranks() -> None:
    first, second = good(run(_gan))
    os.environ.pop("RANK", None)
    torch.manual_seed(0)
    nets = {"generator": nn.Linear(2, 4), "discriminator": nn.Linear(4, 1)}
    mo = ModelOptimizer(nets, {"optimizer": {"name": "sgd", "lr": 0.1}})
    for i in range(3):
        noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(i))
        mo.step((nets["discriminator"](nets["generator"](noise).detach()) - 1).square().mean(), only="discriminator")
        mo.step(nets["discriminator"](nets["generator"](noise)).square().mean(), only="generator")
    for name, value in _weights(mo).items():
        assert (first[name] == second[name]).all() and abs(first[name] - value).max() < 1e-6


def _judged(rank: int) -> tuple[bool, list[str], dict[str, Any]]:
    model = _model()
    mo = ModelOptimizer(model, {"distributed": GLOO, "nonfinite": {"triage": True}})
    x, y = _data()
    x = x[rank::2].clone()
    x[3, 1] = torch.nan if rank == 1 else 0.0
    before = _weights(mo)
    moved = mo.step((mo.model(x) - y[rank::2]).square().mean())
    assert all((before[n] == t).all() for n, t in _weights(mo).items())
    return moved, mo.warnings, before


def test_a_bad_sample_on_one_rank_rejects_the_step_on_all_and_is_named() -> None:
    for moved, said, _ in good(run(_judged)):
        assert not moved
        where = "on rank 1 in the batch: input 0 (float32 12×5) has 1 NaN, sample 3"
        assert said == [f"step 1: the loss is nan; it began {where}; run again, it repeats"]


# What is told instead of a wait.


def _unlike(what: str) -> tuple[nn.Module, dict[str, Any]]:
    model: nn.Sequential = _model()
    config: dict[str, Any] = {"distributed": GLOO, "optimizer": {"lr": 1e-3}}
    if what == "shape":
        model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    elif what == "dtype":
        model[3].double()
    elif what == "name":
        model = nn.Sequential(*list(model.children())[:3], nn.Identity(), nn.Linear(7, 3))
    elif what == "frozen":
        model[0].bias.requires_grad_(False)
    elif what == "fewer":
        model = nn.Sequential(*list(model.children())[:3])
    elif what == "config":
        config["optimizer"] = {"lr": 2e-3}
    return model, config


_UNLIKE = {
    "shape": "rank 0 has parameter 0.weight: float32 (7, 5), rank 1 has parameter 0.weight: float32 (8, 5)",
    "dtype": "rank 0 has parameter 3.weight: float32 (3, 7), rank 1 has parameter 3.weight: float64 (3, 7)",
    "name": "rank 0 has parameter 3.weight: float32 (3, 7), rank 1 has parameter 4.weight: float32 (3, 7)",
    "frozen": "rank 0 has parameter 0.bias: float32 (7,), rank 1 has parameter 0.bias: float32 (7,), frozen",
    "fewer": "rank 0 has parameter 3.weight: float32 (3, 7), rank 1 has config optimizer.weight_decay: None",
    "config": "rank 0 has config optimizer.lr: 0.001, rank 1 has config optimizer.lr: 0.002",
}


def _told(rank: int, made: Callable[[str], tuple[nn.Module, dict[str, Any]]], what: list[str]) -> list[str]:
    """What each attempt to make an optimizer said; on rank 0 the first argument's plain model."""
    said = []
    for name in what:
        model, config = made(name if rank == 1 else "")
        with pytest.raises((StageError, ConfigError)) as error:
            ModelOptimizer(model, config)
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_the_first_difference_between_ranks_is_named_on_every_rank() -> None:
    for said in good(run(_told, _unlike, list(_UNLIKE))):
        for text, expected in zip(said, _UNLIKE.values(), strict=True):
            assert text.startswith(f"StageError: rank 1: rank 1 is not like rank 0: {expected}\n")


def _late(rank: int, behaviour: str) -> str:
    limit = {"absent": 1.5, "hangs": 2}.get(behaviour, 30)
    config = {"distributed": {"backend": "gloo", "timeout_s": limit}}
    if rank == 1 and behaviour == "absent":
        return "never came"
    model = _model()
    mo = ModelOptimizer(model, config)
    x, y = _data()
    for i in range(3):
        time.sleep(0.1)
        if rank == 1 and i == 2:
            if behaviour == "fewer":
                return "done"
            if behaviour == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "hangs":
                time.sleep(3.5)
                return "hung"
            if behaviour == "raises":
                mo.model(torch.randn(4, 9))
        mo.step((mo.model(x) - y).square().mean())
    if rank == 0 and behaviour == "saves alone":
        mo.save_ckpt("/proc/none/a.safetensors")
    return "finished"


_PLACE = "the user's code after the update of step 2"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("absent", ["rank 0: rank 1 of 2 did not come within 1.5 s"]),
        ("fewer", ["of step 3 failed", f"rank 1 ended without an error in {_PLACE}", "it had fewer batches"]),
        ("saves alone", ["save_ckpt, which every rank has to call, of step 3 failed", "rank 1 ended without an error"]),
        ("killed", ["of step 3 failed", f"rank 1 was last seen in {_PLACE}"]),
        ("hangs", ["of step 3 failed after 2 s", f"rank 1 was last seen in {_PLACE}"]),
        ("raises", ["of step 3 failed", "rank 1 ended with RuntimeError", _PLACE]),
    ],
)  # fmt: skip
def test_a_rank_that_does_not_come_ends_in_a_message_that_names_it(behaviour: str, expected: list[str]) -> None:
    start = time.monotonic()
    result = run(_late, behaviour)[0]
    assert time.monotonic() - start < 20
    assert isinstance(result, Died) and result.kind == "StageError", result
    for text in expected:
        assert text in result.text, result.text


def _writes_nowhere(rank: int) -> None:
    mo = ModelOptimizer(_model(), {"distributed": GLOO})
    mo.save_ckpt("/proc/none/a.safetensors")


def test_what_rank_0_could_not_write_is_an_error_on_every_rank() -> None:
    for result in run(_writes_nowhere):
        assert isinstance(result, Died) and result.kind == "Unavailable" and "/proc/none" in result.text


# Refused, or off.


def test_nothing_is_joined_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    mo = ModelOptimizer(_model(), {})
    assert mo.ranks is None and mo.model is mo.lanes[""].model
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ModelOptimizer(_model(), {"distributed": {"backend": "gloo"}}).ranks is None


@pytest.mark.parametrize(("rank", "size"), [("a", "2"), ("2", "2"), ("-1", "2"), ("0", "x"), ("²", "2")])
def test_an_environment_that_makes_no_sense(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"RANK is '{rank}' and WORLD_SIZE '{size}'"):
        launched()


def test_numbers_of_a_launcher_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "9" * 5000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="LOCAL_RANK is '999"):
        rendezvous.device("auto", "train.device")
    rendezvous.rendezvous.cache_clear()
    for port in ("²", "70000", "9" * 5000):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match="MASTER_PORT: expected an integer from 0 to 65535"):
            rendezvous.rendezvous(1.0)


@pytest.mark.parametrize(
    ("config", "models", "message"),
    [
        ({}, ["plain", "plain"], "several models"),
        ({}, ["half"], "float32 masters are not split"),
        ({"nonfinite": {"triage": True}}, ["plain"], "triage replays a step on one rank"),
        ({"optimizer": {"name": "adafactor"}}, ["plain"], "need whole matrices"),
        ({"optimizer": {"groups": [{"match": "*", "name": "muon"}]}}, ["plain"], "makes whole matrices orthogonal"),
    ],
)
def test_what_a_split_model_does_not_go_with(config: dict[str, Any], models: list[str], message: str) -> None:
    made: list[nn.Module] = [_model().half() if m == "half" else _model() for m in models]
    with pytest.raises(ConfigError, match=message):
        capabilities._check_split(made, Config.model_validate(config), custom=False)


def _partial_state(rank: int) -> tuple[str, str]:
    """What is said of torch's ZeroRedundancyOptimizer, and of split models whose configurations differ."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    model = _model()
    own = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(ConfigError) as partial:
        ModelOptimizer(model, {"distributed": GLOO}, optimizer=own)
    with pytest.raises(StageError) as differs:
        ModelOptimizer(split(_model()), {"distributed": GLOO, "optimizer": {"lr": 0.1 * (rank + 1)}})
    return str(partial.value), str(differs.value)


def test_state_in_parts_and_split_models_that_differ_are_refused() -> None:
    for partial, differs in good(run(_partial_state)):
        assert "ZeroRedundancyOptimizer holds a part of the state on each rank" in partial and "fully_shard" in partial
        assert "rank 0 has config optimizer.lr: 0.1, rank 1 has config optimizer.lr: 0.2" in differs


def _with_an_optimizer_of_its_own(rank: int) -> dict[str, Any]:
    model = split(_model())
    mo = ModelOptimizer(model, {"distributed": GLOO}, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    for x, y in zip(*(d.split(4) for d in _data()), strict=True):
        mo.step((model(x[rank::2]) - y[rank::2]).square().sum(), weight=2)
    return _weights(mo)


def test_a_split_model_with_an_optimizer_of_the_users() -> None:
    model = _model()
    mo = ModelOptimizer(model, {}, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    for x, y in zip(*(d.split(4) for d in _data()), strict=True):
        mo.step((model(x) - y).square().sum(), weight=4)
    for weights in good(run(_with_an_optimizer_of_its_own)):
        assert all(abs(weights[n] - t).max() <= 2e-6 for n, t in _weights(mo).items())


def _own_wrapper(rank: int) -> tuple[dict[str, Any], bool, str]:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    said = ModelOptimizer(_model(), {}).warnings
    model = DistributedDataParallel(_model())
    mo = ModelOptimizer(model, {"training": {"accumulate_steps": 2}})
    for x, y in zip(*(d.split(4) for d in _data()), strict=True):
        mo.step((model(x[rank::2]) - y[rank::2]).square().sum(), weight=2)
    hooked = DistributedDataParallel(_model())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    try:
        ModelOptimizer(hooked, {})
    except ConfigError as error:
        said.append(str(error))
    return _weights(mo), mo.model is model, json.dumps(said)


def test_a_wrapper_of_the_users_is_used_as_it_is() -> None:
    first, second = good(run(_own_wrapper))
    mo, _ = _train(0, 1, {"training": {"accumulate_steps": 2}})
    for name, value in _weights(mo).items():
        assert (first[0][name] == second[0][name]).all() and abs(first[0][name] - value).max() < 2e-6
    assert first[1] and "each trains alone" in first[2] and "has a communication hook of its own" in first[2]


def _spoilt_when_split(rank: int) -> str:
    torch.manual_seed(0)
    model = split(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1, bias=False)))  # a rank has no part of the second
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 3e38}, "distributed": GLOO})
    mo.step(mo.model(torch.full((4, 3), 10.0)).sum())
    try:
        mo.step(mo.model(torch.ones(4, 3)).sum())
    except StageError as error:
        return str(error)
    return "no rank noticed"


def test_split_weights_that_an_update_spoilt_end_every_rank() -> None:
    for text in good(run(_spoilt_when_split)):
        assert "is Inf or NaN after step 1" in text


def _huge_and_pruned(rank: int, *, alone: bool = False) -> tuple[bool, float, float, dict[str, Any]]:
    config = {"training": {"grad_clip_norm": 1.0}, "optimizer": {"name": "sgd", "lr": 0.1}}
    model: nn.Module = _model()
    if not alone:
        model = split(model)
        config = {**config, "distributed": GLOO}
    mo = ModelOptimizer(model, config)
    moved = mo.step(model(_data()[0]).square().sum() * 1e22)
    norm = mo.grad_norm
    mo.apply_mask(Gradual(final=0.5, begin=0, end=2, every=1))
    for _ in range(2):
        mo.step(model(_data()[0]).square().sum())
    masks = mo.lanes[""].masks
    assert masks is not None
    return moved, norm, share_of_zeros(masks.masks), _weights(mo)


def test_split_weights_are_measured_and_pruned_as_whole_ones() -> None:
    """A norm that float32 can't square, and masks chosen among seven rows on two ranks."""
    moved, norm, sparsity, weights = _huge_and_pruned(0, alone=True)
    assert moved and norm > 1e19 and sparsity == pytest.approx(0.5, abs=0.02)
    for found in good(run(_huge_and_pruned)):
        assert found[:3] == (True, pytest.approx(norm, rel=1e-5), sparsity)
        for name, value in weights.items():
            assert abs(found[3][name] - value).max() <= 2e-6 and ((found[3][name] == 0) == (value == 0)).all()


@pytest.mark.parametrize("stepped", [True, False])
def test_an_open_window_of_ranks_that_left_out_layers(stepped: bool, tmp_path: Path) -> None:
    good(run(_left_out, str(tmp_path / "open.safetensors"), stepped))
    tensors, _ = safetensors_io.load(tmp_path / "open.safetensors")
    # Rank 0 used the first layer on the input (1, 1), rank 1 the second one on (2, 2); nobody the third.
    assert tensors["window/grads/0.weight"].tolist() == [[0.5, 0.5]]
    assert tensors["window/grads/1.weight"].tolist() == [[1.0, 1.0]]
    assert not any(name.startswith("window/grads/2.") for name in tensors)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
    alone = ModelOptimizer(model, {"training": {"accumulate_steps": 2}})
    alone.load_ckpt(tmp_path / "open.safetensors")
    assert alone.lanes[""].window.weight == (1.0 if stepped else 0.0) and not alone.lanes[""].window.untouched


def _left_out(rank: int, path: str, stepped: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
    mo = ModelOptimizer(model, {"training": {"accumulate_steps": 2}, "distributed": GLOO})
    mo.backward(model[rank](torch.full((1, 2), 1.0 + rank)).sum())
    if stepped:
        mo.step()
    mo.save_ckpt(path)


def _loaded_over(rank: int, path: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    config = {"optimizer": {"name": "sgd", "lr": 1.0}, "training": {"accumulate_steps": 2}, "distributed": GLOO}
    mo = ModelOptimizer(model, config)
    start: list[list[float]] = model.weight.tolist()
    mo.step(mo.model(torch.full((1, 2), 1.0 + rank)).sum())
    mo.save_ckpt(path)
    mo.backward(mo.model(torch.full((1, 2), 100.0)).sum())
    mo.load_ckpt(path)
    mo.step()
    return [start[0], *model.weight.tolist()]


def test_gradients_that_were_sent_before_another_window_was_loaded_are_not_its_own(tmp_path: Path) -> None:
    for start, end in good(run(_loaded_over, str(tmp_path / "open.safetensors"))):
        # The window holds the mean gradient (1 + 2) / 2 of one micro-batch of two.
        assert end == pytest.approx([w - 0.75 for w in start])


def _changed_between(rank: int) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "distributed": GLOO})
    start: list[list[float]] = model.weight.tolist()
    mo.backward(mo.model(torch.full((1, 2), 1.0 + rank)).sum())
    if rank == 1:
        assert model.weight.grad is not None
        model.weight.grad.mul_(3)
    mo.step()
    return [start[0], *model.weight.tolist()]


def test_gradients_that_the_loop_changes_before_the_step_count_as_changed() -> None:
    for start, end in good(run(_changed_between)):
        assert end == pytest.approx([w - (1.0 + 3 * 2.0) / 2 for w in start])


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("a bad sample")


def _fails_halfway(rank: int, failing: bool) -> list[float]:
    torch.manual_seed(0)
    # The last layer is a bucket of its own, which is on its way when the pass fails.
    model = nn.Sequential(nn.Linear(1, 2), nn.Identity(), nn.Linear(2, 150_000, bias=False))
    mo = ModelOptimizer(model, {"distributed": {**GLOO, "bucket_mb": 1}, "optimizer": {"name": "sgd", "lr": 0.1}})
    for step in range(3):
        x = torch.full((1, 1), 1.0 + rank + step)
        if failing and step == 1:
            with pytest.raises(ValueError, match="a bad sample"):
                mo.step(model[2](_Fails.apply(model[0](x))).square().mean())
        if step != 1:
            mo.step(model(x).square().mean())
    return [float(p.double().sum()) for p in model.parameters()]


def _fails_or_not(rank: int) -> list[list[float]]:
    return [_fails_halfway(rank, failing) for failing in (True, False)]


def test_a_loop_goes_on_after_a_backward_pass_that_failed_halfway() -> None:
    for failed, plain in good(run(_fails_or_not)):
        assert failed == plain
