"""A micro-batch that does not fit into memory: its parts give the gradient of the whole, and it stays halved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, Unavailable, machine_lacks


class Small(nn.Module):
    """Runs out of memory in the forward or in the backward pass of more than `room` samples."""

    def __init__(self, room: int, *, backward: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3))
        self.room, self.fails_backward = room, backward
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        hidden = self.body[1](self.body[0](x))
        if len(x) > self.room:
            if not self.fails_backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            hidden.register_hook(_no_memory)
        return self.body[2](hidden)


def _no_memory(_: Tensor) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory")


def _made(room: int, config: dict[str, Any] | None = None, **kind: bool) -> tuple[Small, ModelOptimizer]:
    torch.manual_seed(0)
    net = Small(room, **kind)
    settings: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.5}, "accumulate": {"on_oom": "halve"}}
    return net, ModelOptimizer(net, settings | (config or {}))


def _batch(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def _mean(net: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(net(batch[0]), batch[1])


def _sum(net: nn.Module) -> Any:
    """A sum over the labels that count, as the default loss of the `train` stage."""

    def forward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        labels = batch[1].masked_fill(batch[0][:, 0] > 0.8, -100)
        loss = F.cross_entropy(net(batch[0]), labels, ignore_index=-100, reduction="sum")
        return loss, float((labels != -100).sum())

    return forward


def _weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [_mean, _sum])
@pytest.mark.parametrize("amp", ["fp32", "fp16"])
def test_a_halved_batch_has_the_gradient_of_the_whole(forward: Any, backward: bool, amp: str) -> None:
    plain = {"precision": {"amp": amp, "loss_scale": 64}}
    net, mo = _made(5, plain, backward=backward)
    whole, other = _made(1000, plain)
    for step, samples in enumerate((16, 16, 7)):
        batch = _batch(samples, step)
        result = mo.train_step(batch, forward(net))
        expected = other.train_step(batch, forward(whole))
        assert result.moved and expected.moved
        assert result.loss == pytest.approx(expected.loss, rel=1e-3 if amp == "fp16" else 1e-5)
    assert whole.sizes == [16, 16, 7]
    # 16, 8 (one of two) do not fit; then parts of at most 4, of sizes that differ by one at most.
    assert net.sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 3, 4]
    tolerance = 1e-3 if amp == "fp16" else 1e-5
    torch.testing.assert_close(_weights(net), _weights(whole), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backward", [False, True])
def test_earlier_micro_batches_of_the_window_keep_their_gradients(backward: bool) -> None:
    """The second micro-batch of three is too large, and its second half again: the window is that of three wholes."""
    plain = {
        "accumulate": {"steps": 3, "on_oom": "halve"},
        "optimizer": {"name": "adamw"},
        "training": {"ema_decay": 0.9},
    }
    net, mo = _made(6, plain, backward=backward)
    whole, other = _made(1000, plain)
    for step, samples in enumerate((6, 14, 5, 6, 6, 6)):
        moved = mo.train_step(_batch(samples, step), _sum(net), samples=samples).moved
        assert moved is other.train_step(_batch(samples, step), _sum(whole)).moved is (step in (2, 5))
    assert net.sizes == [6, 14, 7, 3, 4, 3, 4, 2, 3, 3, 3, 3, 3, 3, 3]
    torch.testing.assert_close(_weights(net), _weights(whole), rtol=1e-5, atol=1e-6)
    texts = [w for w in mo.warnings if "do not fit" in w]
    assert len(texts) == 2, "each halving is told once"
    assert texts[0].startswith("14 samples do not fit into memory at step 1: from here on a pass holds at most 7,")
    assert texts[1].startswith("7 samples do not fit into memory at step 1: from here on a pass holds at most 4,")


def test_what_fits_is_the_same_bit_for_bit_as_without_halving() -> None:
    runs = []
    for on_oom in ("raise", "halve"):
        net, mo = _made(1000, {"accumulate": {"steps": 2, "on_oom": on_oom}}, norm=True)
        for step in range(6):
            mo.train_step(_batch(8, step), _mean(net))
        assert not mo.warnings or "BatchNorm" in mo.warnings[0]
        runs.append(_weights(net))
    other, mo = _made(1000, {"accumulate": {"steps": 2}}, norm=True)
    for step in range(6):
        mo.step(_mean(other)(_batch(8, step)))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], _weights(other))


def test_a_failed_pass_leaves_statistics_and_random_numbers_as_they_were() -> None:
    net, mo = _made(8, norm=True)
    net.body.insert(2, nn.Dropout(0.5))
    random_state = torch.get_rng_state()

    def forward(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = net.body[:3](batch[0])
        if len(batch[0]) > 8:
            raise MemoryError
        return F.cross_entropy(net.body[3](hidden), batch[1])

    mo.train_step(_batch(16), forward)
    assert net.body[1].num_batches_tracked.item() == 2, "the two halves, not the pass that failed"
    after = torch.get_rng_state()
    torch.set_rng_state(random_state)
    for _ in range(2):
        F.dropout(torch.ones(8, 8), 0.5)
    assert torch.equal(after, torch.get_rng_state())
    assert any("1" in w and "sees each micro-batch alone" in w for w in mo.warnings)


def test_a_resumed_run_keeps_the_parts(tmp_path: Path) -> None:
    net, mo = _made(5, {"optimizer": {"name": "adamw"}})
    for step in range(3):
        mo.train_step(_batch(16, step), _mean(net))
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    other, resumed = _made(1000, {"optimizer": {"name": "adamw"}})
    resumed.load_ckpt(path)
    for step in range(3, 5):
        mo.train_step(_batch(16, step), _mean(net))
        resumed.train_step(_batch(16, step), _mean(other))
    assert other.sizes == [4] * 8
    assert torch.equal(_weights(net), _weights(other))


def test_masters_of_half_weights() -> None:
    torch.manual_seed(0)
    net, whole = Small(4, backward=True).bfloat16(), Small(1000).bfloat16()
    whole.load_state_dict(net.state_dict())
    settings = {"optimizer": {"name": "sgd", "lr": 0.5}, "accumulate": {"on_oom": "halve", "steps": 2}}
    mo, other = ModelOptimizer(net, settings), ModelOptimizer(whole, settings)

    def forward(model: nn.Module) -> Any:
        return lambda batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    for step in range(4):
        mo.train_step(_batch(8, step), forward(net))
        other.train_step(_batch(8, step), forward(whole))
    torch.testing.assert_close(mo.export(), other.export(), rtol=2e-2, atol=2e-3)


def test_one_sample_that_does_not_fit_is_the_error_itself_and_the_window_stays() -> None:
    net, mo = _made(4, {"accumulate": {"steps": 2, "on_oom": "halve"}})
    mo.train_step(_batch(4), _mean(net))
    net.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        mo.train_step(_batch(4), _mean(net))
    net.room = 4
    assert mo.train_step(_batch(4), _mean(net)).moved


def test_memory_that_an_error_of_ours_tells_of_is_halved_too() -> None:
    net, mo = _made(1000)

    def forward(batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > 4:
            try:
                raise torch.OutOfMemoryError("no memory")
            except RuntimeError as error:
                raise machine_lacks(MemoryError()) from error
        return _mean(net)(batch)

    assert mo.train_step(_batch(16), forward).moved and net.sizes == [4] * 4
    plain, other = _made(1000, {"accumulate": {"on_oom": "raise"}})
    with pytest.raises(Unavailable):
        other.train_step(_batch(16), forward)
    assert plain.sizes == []


def test_another_error_takes_the_micro_batch_back() -> None:
    net, mo = _made(4, {"accumulate": {"steps": 2, "on_oom": "halve"}})
    mo.train_step(_batch(8), _mean(net))
    calls = []

    def forward(batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("a mistake in the loop")
        return _mean(net)(batch)

    with pytest.raises(ValueError, match="a mistake"):
        mo.train_step(_batch(8, 1), forward)
    mo.train_step(_batch(8, 1), _mean(net))
    whole, other = _made(1000, {"accumulate": {"steps": 2, "on_oom": "halve"}})
    for step in range(2):
        other.train_step(_batch(8, step), _mean(whole))
    torch.testing.assert_close(_weights(net), _weights(whole), rtol=1e-5, atol=1e-6)


def test_triage_does_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="triage") as caught:
        _made(4, {"nonfinite": {"triage": True}})
    assert caught.value.where == "accumulate.on_oom"


def test_step_says_that_it_cannot_halve() -> None:
    net, mo = _made(1000)
    mo.step(_mean(net)(_batch(4)))
    assert "needs mo.train_step(batch, forward)" in mo.warnings[0]


def test_statistics_of_another_model_in_the_pass_are_put_back_too() -> None:
    torch.manual_seed(0)
    g, d = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), Small(4)
    mo = ModelOptimizer({"g": g, "d": d}, {"accumulate": {"on_oom": "halve"}})
    assert mo.train_step(_batch(8), lambda batch: F.cross_entropy(d(g(batch[0])), batch[1]), only="d").moved
    assert d.sizes == [8, 4, 4] and g[1].num_batches_tracked.item() == 2
    assert mo.lanes["g"].largest_part is None and g[0].weight.grad is None


@pytest.mark.parametrize("backward", [False, True])
def test_without_halving_a_warning_names_the_field(backward: bool) -> None:
    net, mo = _made(3, {"accumulate": {}}, backward=backward)
    with pytest.raises(RuntimeError, match="memory"):
        mo.train_step(_batch(4), _mean(net))
    assert len(mo.warnings) == 1 and "on_oom: halve" in mo.warnings[0]
