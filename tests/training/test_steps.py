"""The order of a step: T34 and T35, accumulation by any split, loss scale, clipping, and steps that must not happen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.loop.masks import Masks
from layerline.training.loop.step_result import PendingResult


def _scalar(start: float = 0.0, lr: float = 1.0, **sections: Any) -> tuple[nn.Linear, ModelOptimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": lr}, **sections})


@pytest.mark.parametrize(
    ("values", "accumulate", "expected"),
    [
        ([1, 2, 3, 4, 5], 4, -7.5),
        ([1, 2, 3, 4, 5], 2, -1.5 - 3.5 - 5),
        ([1, 2, 3], 4, -2.0),
        ([1, 2, 3, 4], 4, -2.5),
        ([1, 2, 3, 4, 5, 6, 7], 3, -2 - 5 - 7),
    ],
)
def test_a_short_last_window_counts_what_it_holds(values: list[int], accumulate: int, expected: float) -> None:
    """T34: loss = w x, batch 1, SGD at 1."""
    model, mo = _scalar(training={"accumulate_steps": accumulate})
    for x in values:
        mo.step(model.weight.sum() * x)
    mo.flush()
    assert model.weight.item() == pytest.approx(expected)
    assert mo.global_step == math.ceil(len(values) / accumulate)
    assert not mo.flush() and model.weight.item() == pytest.approx(expected), "nothing is left to flush"


def test_unequal_batches_weigh_by_their_samples() -> None:
    """Batches [1, 2, 3] and [4, 5]: the mean over samples is 3; the mean of means would be 3.25."""
    for split in ([[1, 2, 3], [4, 5]], [[1], [2, 3, 4], [5]], [[1, 2, 3, 4, 5]]):
        model, mo = _scalar(gpu={"gradient_accumulation_steps": len(split)})
        for batch in split:
            mo.step(sum(model.weight.sum() * x for x in batch), weight=len(batch))  # type: ignore[arg-type]
        assert model.weight.item() == pytest.approx(-3.0)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    amp=st.sampled_from(["fp32", "fp16"]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_split_equals_the_big_batch(sizes: list[int], amp: str, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(sum(sizes), 3), torch.randn(sum(sizes), 1)
    weights = []
    for parts in (sizes, [sum(sizes)]):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "accumulate": {"steps": len(parts)},
                                    "precision": {"amp": amp}})  # fmt: skip
        for a, b in zip(x.split(parts), y.split(parts), strict=True):
            mo.step((model(a) - b).square().sum(), weight=len(a))
        assert mo.global_step == 1
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_several_losses_of_one_micro_batch_add_up() -> None:
    model, mo = _scalar(accumulate={"steps": 2})
    for _ in range(2):
        mo.backward(model.weight.sum() * 1)
        mo.backward(model.weight.sum() * 2)
        mo.step()
    assert model.weight.item() == pytest.approx(-3.0)


def test_weights_are_all_or_none() -> None:
    model, mo = _scalar(accumulate={"steps": 2})
    mo.step(model.weight.sum(), weight=3)
    with pytest.raises(ConfigError, match="some losses"):
        mo.step(model.weight.sum())
    with pytest.raises(ConfigError, match="counts samples"):
        _scalar()[1].backward(model.weight.sum(), weight=-1)


def test_a_micro_batch_without_tokens_weighs_nothing() -> None:
    model, mo = _scalar(accumulate={"steps": 2})
    mo.step(model.weight.sum() * 0, weight=0)
    mo.step(model.weight.sum() * 6, weight=2)
    assert model.weight.item() == pytest.approx(-3.0)
    mo.step(model.weight.sum() * 0, weight=0)
    assert not mo.step(model.weight.sum() * 0, weight=0) and mo.global_step == 1


def test_a_loss_that_was_taken_backward_by_hand_still_steps() -> None:
    model, mo = _scalar()
    (model.weight.sum() * 2).backward()
    mo.step()
    assert model.weight.item() == -2.0
    with pytest.raises(StageError, match="no parameter has a gradient"):
        mo.step()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_moves_on_a_rejected_window(bad: float, tmp_path: Path) -> None:
    """T35: accumulation 4, 8 micro-batches, the first window overflows: one optimizer step, one schedule step."""
    config = {"training": {"accumulate_steps": 4, "ema_decay": 0.5}, "scheduler": {"warmup_steps": 10}}
    model, mo = _scalar(1.0, **config)
    applied: list[int] = []

    class Counting(Masks):
        def after_accepted(self, step: int) -> None:
            applied.append(mo.global_step)

    mo.lanes[""].masks = Counting(mo.lanes[""], {})
    for i in range(8):
        mo.step(model.weight.sum() * (bad if i == 1 else 1.0))
        if i == 3:
            assert (mo.global_step, mo.lanes[""].skipped, model.weight.item()) == (0, 1, 1.0)
            assert mo.current_lr == pytest.approx(0.1) and mo.export()["weight"].item() == 1.0
            assert applied == [] and model.weight.grad is None
    assert (mo.global_step, mo.lanes[""].skipped, len(applied)) == (1, 1, 1)
    assert model.weight.item() == pytest.approx(0.9) and mo.current_lr == pytest.approx(0.2)
    assert mo.export()["weight"].item() == pytest.approx(0.95)
    again_model, again = _scalar(0.0, **config)
    again.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert again.current_lr == mo.current_lr and again.global_step == 1
    for m, o in ((model, mo), (again_model, again)):
        for _ in range(4):
            o.step(m.weight.sum())
    assert again.current_lr == mo.current_lr == pytest.approx(0.3)
    assert again_model.weight.item() == model.weight.item()


def test_the_scale_falls_to_its_floor_and_grows_again() -> None:
    model, mo = _scalar(precision={"amp": "fp16", "dynamic_loss_scale_window": 3, "min_loss_scale": 16384})
    assert mo.loss_scale == 65536
    for expected in (32768, 16384, 16384):
        mo.step(model.weight.sum() * math.inf)
        assert mo.loss_scale == expected
    for expected in (16384, 16384, 32768, 32768, 32768, 65536):
        mo.step(model.weight.sum())
        assert mo.loss_scale == expected
    assert mo.lanes[""].skipped == 3 and mo.global_step == 6


def test_a_rejection_starts_the_window_of_the_scale_anew() -> None:
    model, mo = _scalar(precision={"amp": True, "dynamic_loss_scale_window": 2})
    for factor in (1.0, math.inf, 1.0):
        mo.step(model.weight.sum() * factor)
    assert mo.loss_scale == 32768
    mo.step(model.weight.sum())
    assert mo.loss_scale == 65536


@pytest.mark.parametrize(
    ("precision", "first", "after"),
    [
        ({"loss_scale": 128}, 128, 128),
        ({"loss_scale": 128, "dynamic_loss_scale_window": 1}, 128, 256),
        ({"loss_scale": "dynamic", "dynamic_loss_scale_window": 1}, 65536, 131072),
        ({"loss_scale": 0}, 65536, 65536),
    ],
)
def test_fixed_and_dynamic_scales(precision: dict[str, Any], first: float, after: float) -> None:
    model, mo = _scalar(precision={"amp": "fp16", **precision})
    assert mo.loss_scale == first
    mo.step(model.weight.sum() * 3)
    assert mo.loss_scale == after
    assert model.weight.item() == -3.0 and mo.grad_norm == 3.0, "the gradient is unscaled before it is used"


def test_overflow_of_half_gradients_is_found_and_answered() -> None:
    """A gradient of 2 at scale 65536 overflows fp16; at 16384 it does not."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "precision": {"amp": True}})
    taken = [mo.step(model.weight.sum() * 2) for _ in range(3)]
    assert taken == [False, False, True] and mo.loss_scale == 16384
    assert model.weight.item() == -2.0


def test_sums_over_many_tokens_do_not_overflow_fp16() -> None:
    """A summed loss over 4096 tokens would overflow at the first scale; brought to a mean's size it steps at once."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "precision": {"amp": True}})
    x, y = torch.randn(4096, 8), torch.randint(0, 4, (4096,))
    with mo.autocast():
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    assert mo.step(loss, weight=4096) and mo.loss_scale == 65536


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_autocast_computes_in_half_and_keeps_float32_weights(amp: str) -> None:
    model, mo = nn.Linear(4, 4), None
    mo = ModelOptimizer(model, {"training": {"mixed_precision": amp}})
    with mo.autocast():
        out = model(torch.randn(2, 4))
    assert out.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    assert mo.step(out.float().square().mean()) and model.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_what_half_weights_cannot(dtype: torch.dtype) -> None:
    """Sixteen steps of 2^-12 from 1: half weights would stay at 1 for ever."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 2**-12}})
    for _ in range(16):
        mo.step(-model.weight.sum())
    assert mo.export()["weight"].item() == 1 + 2**-8
    assert model.weight.item() == torch.tensor(1 + 2**-8).to(dtype).item()
    plain = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(plain.weight)
    off = ModelOptimizer(plain, {"optimizer": {"name": "sgd", "lr": 2**-12}, "precision": {"master_weights": False}})
    for _ in range(16):
        off.step(-plain.weight.sum())
    assert plain.weight.item() == 1.0


def test_half_gradients_add_up_in_float32() -> None:
    """Gradients of 1 and sixteen of 2^-10: in bfloat16 each of the small ones would be lost against 1."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "accumulate": {"steps": 17}})
    for i in range(17):
        mo.step(model.weight.sum() * (1.0 if i == 0 else 2**-10))
    assert mo.export()["weight"].item() == pytest.approx(-(1 + 2**-6) / 17, rel=1e-6)


@pytest.mark.parametrize(("norm", "moved"), [(2.0, 2.0), (0.5, 0.5), (None, 10.0), (100.0, 10.0)])
@pytest.mark.parametrize("amp", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_bounds_the_unscaled_mean_gradient(
    norm: float | None, moved: float, amp: str, accumulate: int
) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "clip": {"max_norm": norm},
                                "precision": {"amp": amp}, "accumulate": {"steps": accumulate}})  # fmt: skip
    for _ in range(accumulate):
        mo.step((model.weight * torch.tensor([[6.0, 8.0]])).sum())
    assert mo.grad_norm == pytest.approx(10.0)
    torch.testing.assert_close(model.weight.detach(), -torch.tensor([[0.6, 0.8]]) * moved)


def test_finite_gradients_whose_norm_overflows_are_clipped_not_rejected() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}, "clip": {"max_norm": 1.0}})
    assert mo.step((model.weight * torch.tensor([[3e30, 4e30]])).sum())
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]))
    off = ModelOptimizer(model, {})
    assert not off.step((model.weight * 1e25).sum()), "its square would stay in Adam's state as Inf"


@pytest.mark.parametrize("where", ["input", "loss"])
def test_no_nan_reaches_weights_statistics_or_average(where: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 1))
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9}})
    for i in range(6):
        x = torch.randn(4, 1, 4)
        if i == 3 and where == "input":
            x[0, 0, 0] = math.nan
        loss = model(x).square().mean()
        moved = mo.step(loss * math.nan if i == 3 and where == "loss" else loss)
        assert moved == (i != 3)
        assert all(t.isfinite().all() for t in model.state_dict().values())
        assert all(t.isfinite().all() for t in mo.export().values())
    assert mo.lanes[""].skipped == 1 and mo.global_step == 5


@pytest.mark.parametrize(("policy", "limit", "steps"), [("stop", 10, 1), ("skip", 3, 3)])
def test_a_run_that_stays_non_finite_stops_and_names_the_parameter(policy: str, limit: int, steps: int) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    mo = ModelOptimizer(model, {"nonfinite": {"policy": policy, "limit": limit}})

    def loss() -> Tensor:
        return model[0].weight.sum() + (model[1].weight - model[1].weight.detach()).sqrt().sum()

    for _ in range(steps - 1):
        assert not mo.step(loss())
    with pytest.raises(StageError) as caught:
        mo.step(loss())
    assert caught.value.where == "1.weight" and "at step 1" in str(caught.value)


def test_overflows_that_a_smaller_scale_answers_do_not_count() -> None:
    model, mo = _scalar(precision={"amp": True}, nonfinite={"limit": 2})
    nn.init.ones_(model.weight)
    for _ in range(8):
        half = model.weight * torch.tensor(1.0)
        mo.lanes[""].backward(half.sum())
        model.weight.grad = torch.full_like(model.weight, math.inf)
        mo.step()
    assert mo.loss_scale == 65536 / 2**8 and mo.global_step == 0


def test_a_gan_steps_one_model_and_leaves_the_other_alone() -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    mo = ModelOptimizer({"generator": generator, "discriminator": discriminator},
                        {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"ema_decay": 0.5}})  # fmt: skip
    before = {n: p.detach().clone() for n, p in discriminator.named_parameters()}
    noise = torch.randn(4, 2)
    assert mo.step(-discriminator(generator(noise)).mean(), only="generator")
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in discriminator.named_parameters())
    moved = generator.weight.detach().clone()
    assert mo.step(discriminator(generator(noise)).mean(), only="discriminator")
    assert torch.equal(generator.weight, moved) and generator.weight.grad is None
    assert not torch.equal(discriminator.weight, before["weight"])
    assert (mo["generator"].steps, mo["discriminator"].steps, mo.global_step) == (1, 1, 1)
    assert sorted(mo.export()) == ["discriminator.bias", "discriminator.weight", "generator.bias", "generator.weight"]
    with pytest.raises(ConfigError, match="which of"):
        mo.step(discriminator(noise).mean())
    with pytest.raises(ConfigError, match="no model is called"):
        mo.step(discriminator(noise).mean(), only="critic")


def test_a_gan_resumes(tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, nn.Linear, ModelOptimizer]:
        torch.manual_seed(0)
        g, d = nn.Linear(2, 2), nn.Linear(2, 1)
        return g, d, ModelOptimizer({"g": g, "d": d}, {"training": {"accumulate_steps": 2}})

    def run(g: nn.Linear, d: nn.Linear, mo: ModelOptimizer, steps: int) -> None:
        for _ in range(steps):
            noise = torch.randn(4, 2)
            mo.step(-d(g(noise)).mean(), only="g")
            mo.step(d(g(noise)).mean(), only="d")

    one = make()
    run(*one, 3)
    path = one[2].save_ckpt(tmp_path / "a.safetensors")
    run(*one, 4)
    two = make()
    two[2].load_ckpt(path)
    run(*two, 4)
    assert all(torch.equal(t, two[2].export()[n]) for n, t in one[2].export().items())


def test_a_window_without_a_sample_leaves_the_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mo = ModelOptimizer(model, {"optimizer": {"lr": 1e-2}})
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert not mo.step(model(torch.randn(4, 2)).sum() * 0, weight=0)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_result_that_waits_to_be_read_is_used_as_the_number() -> None:
    """Inside a window on a GPU a loss is read when its result is used, and once."""
    reads = []

    class Watched(Tensor):
        def item(self) -> float:
            reads.append(1)
            return super().item()

    result: Any = PendingResult(torch.tensor(6.0).as_subclass(Watched), 4)
    assert not reads
    assert (float(result), f"{result:.2f}", "%.1f" % result, str(result)) == (1.5, "1.50", "1.5", "1.5")  # noqa: UP031
    assert sum([result, result]) == 3.0 and 2 * result - 1 == 2.0 and result / 3 == 0.5 and result < 2
    assert result == 1.5 and result.loss == result.item() == 1.5 and np.mean([result, result]) == 1.5
    assert not result and result.moved is False and result == False  # noqa: E712  as StepResult
    assert len(reads) == 1
    assert math.isnan(PendingResult(torch.tensor(6.0), 0).loss)
