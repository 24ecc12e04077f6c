"""A window holds what was added and nothing else: calls that are refused, calls that fail, and what others clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError


class Scalar(nn.Module):
    """One weight, 0; w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Tensor:
        return self.w * x


class Fails(torch.autograd.Function):
    """A backward pass that runs out of memory."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")


def _sgd(**sections: Any) -> tuple[Scalar, ModelOptimizer]:
    model = Scalar()
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, **sections})


@pytest.mark.parametrize("entry", ["backward", "step", "finish", "flush", "join"])
def test_nothing_trains_the_average(entry: str) -> None:
    model, mo = _sgd(training={"ema_decay": 0.5, "accumulate_steps": 4})
    for _ in range(6):
        mo.step(model(1.0))
    calls: dict[str, Any] = {
        "backward": lambda: mo.backward(model(1.0)), "step": lambda: mo.step(model(1.0)), "finish": mo.step,
        "flush": mo.flush, "join": mo.join,
    }  # fmt: skip
    with mo.ema(), pytest.raises(ConfigError, match="holds its EMA weights"):
        calls[entry]()
    assert model.w.item() == -1.0 and mo.export()["w"].item() == -0.5
    assert mo.flush() and model.w.item() == -2.0, "the window is as it was"


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda m: m(torch.ones(3)), r"shape \(3,\)"),
        (lambda m: m(torch.ones(0)), r"shape \(0,\)"),
        (lambda m: m(1.0).detach(), "without a gradient"),
        (lambda m: torch.tensor(1.0), "without a gradient"),
        (lambda m: m(1.0).item(), "a float"),
        (lambda m: [m(1.0)], "a list"),
        (lambda m: m(1.0 + 1j), "complex64"),
    ],
)
def test_what_is_no_loss_is_refused_and_leaves_the_window(loss: Any, told: str) -> None:
    model, mo = _sgd(training={"accumulate_steps": 2})
    mo.step(model(2.0))
    for call in (mo.step, mo.backward):
        with pytest.raises(ConfigError, match=told):
            call(loss(model))
    assert mo.step(model(4.0)) and model.w.item() == -3.0


@pytest.mark.parametrize("weight", [4, 4.0, np.int64(4), np.float32(4), torch.tensor(4), torch.ones(2, 2).bool().sum()])
def test_whatever_counts_is_a_weight(weight: Any) -> None:
    model, mo = _sgd(clip={"max_norm": 10.0})
    assert mo.step(model(8.0), weight=weight)
    assert model.w.item() == -2.0 and type(mo.grad_norm) is float and mo.grad_norm == 2.0


@pytest.mark.parametrize("weight", [np.inf, -np.inf, np.nan, -1, "3", b"3", [1], torch.ones(2), 1j, torch.tensor(-1)])
def test_what_counts_nothing_is_refused_and_leaves_the_window(weight: Any) -> None:
    model, mo = _sgd(training={"accumulate_steps": 2})
    mo.step(model(2.0), weight=1)
    with pytest.raises(ConfigError, match="counts samples or tokens"):
        mo.step(model(2.0), weight=weight)
    assert mo.step(model(4.0), weight=1) and model.w.item() == -3.0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_backward_pass_that_fails_drops_its_window(accumulate: int) -> None:
    model, mo = _sgd(training={"accumulate_steps": accumulate})
    for _ in range(accumulate - 1):
        mo.step(model(80.0), weight=4)
    with pytest.raises(torch.OutOfMemoryError):
        mo.step(Fails.apply(model(8.0)), weight=4)
    for _ in range(accumulate):
        mo.step(model(8.0), weight=4)
    assert model.w.item() == -2.0 and mo.lanes[""].loss == 0.0


def test_an_optimizer_that_fails_drops_its_window() -> None:
    class Once(torch.optim.SGD):
        broken = True

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                self.broken = False
                raise RuntimeError("once")
            return super().step(closure)

    model = Scalar()
    mo = ModelOptimizer(model, {}, optimizer=Once(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match="once"):
        mo.step(model(9.0), weight=3)
    assert mo.step(model(8.0), weight=4) and model.w.item() == -2.0


def test_a_step_on_nothing_is_refused_and_counts_nothing() -> None:
    model, mo = _sgd()
    with pytest.raises(StageError, match="no parameter has a gradient"):
        mo.step()
    assert mo.step(model(2.0)) and model.w.item() == -2.0
    model, mo = _sgd(training={"accumulate_steps": 2})
    mo.backward(model(2.0))
    mo.step()
    with pytest.raises(StageError, match="nothing was added"):
        mo.step()
    assert mo.step(model(4.0)) and model.w.item() == -3.0


@pytest.mark.parametrize(("weights", "expected"), [((None, None), -2.0), ((1, 3), -1.0)])
def test_flush_counts_what_backward_has_begun(weights: Any, expected: float) -> None:
    model, mo = _sgd(training={"accumulate_steps": 4})
    mo.step(model(1.0), weight=weights[0])
    mo.backward(model(3.0), weight=weights[1])
    assert mo.flush() and model.w.item() == expected


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["between", "last"])
def test_gradients_that_a_loop_clears_are_missed(to_none: bool, when: str) -> None:
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mo = ModelOptimizer(model, {"training": {"accumulate_steps": 2}}, optimizer=optimizer)
    mo.step(model(1.0))
    if when == "last":
        mo.backward(model(1.0))
    optimizer.zero_grad(set_to_none=to_none)
    with pytest.raises(StageError, match="were cleared"):
        mo.step(model(1.0)) if when == "between" else mo.step()
    for x in (1.0, 3.0):
        mo.step(model(x))
    assert model.w.item() == -2.0, "the next window is whole"


def test_gradients_that_a_loop_changes_are_its_own_affair() -> None:
    model, mo = _sgd()
    mo.backward(model(8.0))
    assert model.w.grad is not None
    model.w.grad.clamp_(max=3.0)
    assert mo.step() and model.w.item() == -3.0


def test_a_checkpoint_between_backward_and_step_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The factor of an fp16 window is chosen at its first loss, and not again."""
    results = []
    for resume in (False, True):
        model, mo = _sgd(training={"mixed_precision": "fp16"})
        mo.backward(model(4.0), weight=4)
        if resume:
            path = mo.save_ckpt(tmp_path / "a.safetensors")
            model, mo = _sgd(training={"mixed_precision": "fp16"})
            mo.load_ckpt(path)
        mo.backward(model(640.0), weight=64)
        assert mo.step()
        results.append(model.w.item())
    assert results[0] == results[1] == pytest.approx(-644 / 68)


def test_a_checkpoint_before_the_micro_batch_is_closed_is_flushed_right(tmp_path: Path) -> None:
    model, mo = _sgd(training={"accumulate_steps": 4})
    mo.step(model(1.0))
    mo.backward(model(3.0))
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    model, mo = _sgd(training={"accumulate_steps": 4})
    mo.load_ckpt(path)
    assert mo.flush() and model.w.item() == -2.0


def test_sparse_gradients_of_a_functional_are_refused_by_name() -> None:
    table = nn.Embedding(4, 2)
    mo = ModelOptimizer(table, {})
    with pytest.raises(ConfigError, match="sparse gradients") as caught:
        mo.step(nn.functional.embedding(torch.tensor([1, 2]), table.weight, sparse=True).sum())
    assert caught.value.where == "weight"
    assert mo.step(table(torch.tensor([1])).sum())


@pytest.mark.parametrize("source", ["loss", "input"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rejected_window_leaves_running_statistics_as_they_were(source: str, accumulate: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    mo = ModelOptimizer(model, {"training": {"accumulate_steps": accumulate}})
    x = torch.randn(8, 2) + 5
    for _ in range(accumulate):
        mo.step(model(x).mean())
    before = {n: b.clone() for n, b in model.named_buffers()}
    for i in range(accumulate):
        bad = i == accumulate - 1
        spoilt = x * torch.nan if bad and source == "input" else x + 3
        assert not mo.step(model(spoilt).mean() * (torch.nan if bad and source == "loss" else 1.0))
    assert before["0.num_batches_tracked"] == accumulate
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
