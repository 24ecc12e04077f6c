"""The module, the operator and the samples where a NaN or Inf begins; and what each policy then does."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training.config.sections import Config
from layerline.training.diagnostics.triage import Recorder, StepDiagnosis
from layerline.training.loop.step_engine import Lane


class Op(nn.Module):
    """One function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.function(*args)
        return out


class Block(nn.Module):
    """x + inner(x): the fault is in a named child, or in this forward itself."""

    def __init__(self, function: Any, own: Any = lambda x: x) -> None:
        super().__init__()
        self.linear, self.inner, self.own = nn.Linear(4, 4), Op(function), own

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.own(self.inner(self.linear(x)))
        return out


def _net(function: Any = lambda x: x, own: Any = lambda x: x) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(function, own), nn.Linear(4, 2))


def _look(
    model: nn.Module, *batches: Any, loss: Any = lambda out: out.square().mean(), **sections: Any
) -> StepDiagnosis:
    """What is found in one step over some micro-batches."""
    lane = Lane(model, Config.model_validate({"accumulate": {"steps": len(batches)}, **sections}))
    recorder = Recorder(lane)
    for batch in batches:
        lane.backward(loss(model(*batch) if isinstance(batch, tuple) else model(batch)))
        lane.window.close()
    total = lane.window.total_loss()
    norm = math.hypot(*(float(p.grad.norm()) for p in lane.params if p.grad is not None))
    assert not (math.isfinite(total) and math.isfinite(norm))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    grads, state = [p.grad for p in lane.params], torch.get_rng_state()
    found = recorder.find(total, norm)
    assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in model.state_dict().items())
    assert all(a is b for a, b in zip(grads, (p.grad for p in lane.params), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    return found


def _bad_row(row: int, value: float) -> Any:
    """A function that is finite but where a sample carries the mark 77."""

    def function(x: Tensor) -> Tensor:
        scale = torch.ones(len(x), 1)
        scale[row] = value
        return x * scale

    return function


def _log_of_nothing(x: Tensor) -> Tensor:
    return (x * torch.tensor([[1.0], [1.0], [0.0], [1.0]])).abs().log()


def _root_of_negative(x: Tensor) -> Tensor:
    return (x.abs() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])).sqrt()


def _zero_by_zero(x: Tensor) -> Tensor:
    keep = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    return (x * keep) / (x.abs() * keep)


def _overflow(x: Tensor) -> Tensor:
    return (x * torch.tensor([[1000.0], [0.0], [0.0], [0.0]])).exp() * 0.5


@pytest.mark.parametrize(
    ("function", "operator", "rows", "kind"),
    [
        (_log_of_nothing, "log", (2,), "4 Inf"),
        (_root_of_negative, "sqrt", (1, 3), "8 NaN"),
        (_zero_by_zero, "div", (3,), "4 NaN"),
        (_overflow, "exp", (0,), "Inf"),
    ],
)
def test_the_operator_the_module_and_the_samples_in_the_forward_pass(
    function: Any, operator: str, rows: tuple[int, ...], kind: str
) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    origin = _look(_net(function), x).origin
    assert origin is not None
    assert (origin.phase, origin.module, origin.tensor, origin.samples) == ("forward", "1.inner", operator, rows)
    assert kind in str(origin) and f"in the forward pass of 1.inner: {operator} (float32 4×4)" in str(origin)
    own = _look(_net(own=function), x).origin
    assert own is not None and (own.module, own.tensor, own.samples) == ("1", operator, rows)


def test_a_root_of_zero_is_found_in_the_backward_pass() -> None:
    keep = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    found = _look(_net(lambda x: (x * keep).abs().sqrt()), torch.randn(4, 4))
    assert found.origin is not None and found.replayed and math.isfinite(found.loss)
    assert (found.origin.phase, found.origin.module, found.origin.samples) == ("backward", "1.inner", (1,))
    assert str(found).startswith("step 1: the gradient norm is nan; it began in the backward pass of 1.inner: div")


def test_the_unused_branch_of_a_where_is_blamed() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)

    found = _look(_net(function), torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    assert math.isfinite(found.loss) and found.origin is not None
    assert (found.origin.module, found.origin.tensor) == ("1.inner", "sqrt")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.project(x) @ x.transpose(1, 2)
        return torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ x


def test_a_mask_of_minus_infinity_is_no_fault_but_a_row_of_nothing_else_is() -> None:
    x, mask = torch.randn(3, 5, 4), torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[:, :, 3:] = True
    mask[1, 2] = True
    found = _look(Attention(), (x, mask))
    assert found.origin is not None
    assert (found.origin.tensor, found.origin.samples) == ("_softmax", (1,))
    mask[1, 2] = False
    late = nn.ModuleList([Attention(), Op(lambda x: (x * (torch.arange(3) != 2).view(3, 1, 1)).abs().log())])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = late

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x, mask))

    origin = _look(Both(), (x, mask), loss=lambda out: out.sum()).origin
    assert origin is not None and (origin.module, origin.tensor, origin.samples) == ("parts.1", "log", (2,))


def test_a_float_mask_given_as_an_input_is_no_fault() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.log = nn.Linear(4, 4), Op(_log_of_nothing)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.log(torch.softmax(self.linear(x) + mask, -1))

    mask = torch.zeros(4, 4)
    mask[:, 0] = -math.inf
    found = _look(Masked(), (torch.randn(4, 4), mask), loss=lambda out: out[:, 1:].sum())
    assert found.origin is not None and (found.origin.module, found.origin.tensor) == ("log", "log")


def test_bad_samples_and_bad_weights_are_told_before_any_operator() -> None:
    x = torch.randn(4, 4)
    x[1, 2] = x[3, 0] = torch.nan
    found = _look(_net(), x)
    assert found.origin is not None
    assert (found.origin.phase, found.origin.tensor, found.origin.samples) == ("input", "input 0", (1, 3))
    assert "it began in the batch: input 0 (float32 4×4) has 2 NaN, samples 1, 3" in str(found)
    model = _net()
    with torch.no_grad():
        model[1].linear.weight[0, 0] = torch.nan
    found = _look(model, torch.randn(4, 4))
    assert found.origin is not None and (found.origin.phase, found.origin.tensor) == ("parameter", "1.linear.weight")


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (lambda out: (out * torch.tensor([[1.0], [0.0], [1.0], [1.0]])).abs().log().mean(), (1,)),
        (lambda out: out.sum() * 0 + torch.tensor(math.inf), ()),
    ],
)
def test_the_loss_function_is_named_where_the_model_is_finite(loss: Any, rows: tuple[int, ...]) -> None:
    found = _look(_net(), torch.randn(4, 4), loss=loss)
    assert found.origin is not None and (found.origin.phase, found.origin.samples) == ("loss", rows)
    assert "it began in the loss function" in str(found)


def test_the_micro_batch_is_named() -> None:
    good, bad = torch.randn(4, 4), torch.randn(4, 4)
    bad[2] = torch.nan
    found = _look(_net(), good, good, bad)
    assert found.micro_batch == 2 and str(found).endswith("sample 2 of micro-batch 2; run again, it repeats")


def test_random_layers_are_run_again_with_the_same_draws() -> None:
    drawn: list[Tensor] = []

    def rare(x: Tensor) -> Tensor:
        draw = torch.rand(len(x), 1)
        drawn.append(draw)
        return x / (draw > 0.5)

    found = _look(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Op(rare), nn.BatchNorm1d(4)), torch.randn(6, 4))
    assert len(drawn) == 2 and torch.equal(*drawn)
    assert found.origin is not None and found.origin.samples == tuple((drawn[0][:, 0] <= 0.5).nonzero()[:, 0].tolist())


def test_what_does_not_repeat_is_said_to() -> None:
    once = iter([math.nan])
    found = _look(nn.Sequential(nn.Linear(4, 4), Op(lambda x: x * next(once, 1.0))), torch.randn(2, 4))
    assert found.origin is None and found.replayed
    assert str(found) == "step 1: the loss is nan; run again, the step is finite: it does not repeat"


def test_half_precision_overflow_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 3e4)
    lane = Lane(model, Config())
    recorder = Recorder(lane)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(2, 4)).float().square().mean()
    lane.backward(loss)
    origin = recorder.find(math.nan, math.nan).origin
    assert origin is not None and (origin.module, origin.dtype) == ("0", "float16")


def test_wrapped_and_checkpointed_models_keep_their_names() -> None:
    from layerline.training.model.recompute import Checkpointed

    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)], Op(_log_of_nothing))
    Checkpointed(model, 2)
    found = _look(torch.compile(model, backend="eager"), torch.randn(4, 4))
    assert found.origin is not None and (found.origin.module, found.origin.tensor) == ("4", "log")


def test_a_copy_of_the_model_does_not_report_to_the_recorder() -> None:
    model = _net()
    lane = Lane(model, Config())
    recorder = Recorder(lane)
    copy.deepcopy(model)(torch.randn(4, 4))
    assert not recorder.passes
    with torch.no_grad():
        model(torch.randn(4, 4))
    assert not recorder.passes


# Policies.


def _mo(tmp_path: Path, **nonfinite: Any) -> tuple[nn.Module, ModelOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    config = {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"ema_decay": 0.9}, "nonfinite": nonfinite}
    return model, ModelOptimizer(model, config)


def _step(model: nn.Module, mo: ModelOptimizer, factor: float = 1.0) -> bool:
    return mo.step(model(torch.ones(3, 4)).square().mean() * factor)


def test_skip_goes_on_and_gives_up_after_the_limit(tmp_path: Path) -> None:
    model, mo = _mo(tmp_path, policy="skip", limit=3, triage=True)
    _step(model, mo)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert not _step(model, mo, math.nan) and not _step(model, mo, math.inf)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert _step(model, mo) and not _step(model, mo, math.nan) and not _step(model, mo, math.nan)
    with pytest.raises(StageError, match=r"it began in the loss function.*; 3 steps in a row"):
        _step(model, mo, math.nan)
    assert [w.split(":")[0] for w in mo.warnings] == ["step 2", "step 3"]


def test_stop_ends_at_the_first(tmp_path: Path) -> None:
    model, mo = _mo(tmp_path, policy="stop", triage=True)
    with pytest.raises(StageError, match=r"^loss: step 1: the loss is inf; it began in the loss"):
        _step(model, mo, math.inf)


def test_rollback_puts_the_last_checkpoint_back_and_goes_on(tmp_path: Path) -> None:
    model, mo = _mo(tmp_path, policy="rollback", limit=2)
    for _ in range(3):
        _step(model, mo)
    mo.save_ckpt(tmp_path / "ckpt")
    saved, average = {n: t.clone() for n, t in model.state_dict().items()}, mo.export()
    for _ in range(2):
        _step(model, mo)
    assert mo.global_step == 5
    draws = torch.get_rng_state()
    _step(model, mo, math.nan)
    assert mo.global_step == 5
    _step(model, mo, math.nan)
    assert mo.global_step == 3 and all(torch.equal(t, saved[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(t, average[n]) for n, t in mo.export().items())
    assert torch.equal(draws, torch.get_rng_state())  # other draws come next, or the same would happen again
    assert any("rolled back to step-00000003.safetensors after 2 rejected steps in a row" in w for w in mo.warnings)
    assert not any(w.startswith("step 4 was rejected") for w in mo.warnings), "it was step 6"
    assert _step(model, mo) and mo.global_step == 4


def test_rollback_gives_up_after_three_times_and_without_a_checkpoint(tmp_path: Path) -> None:
    model, mo = _mo(tmp_path, policy="rollback", limit=1)
    with pytest.raises(StageError, match="there is no checkpoint to roll back to"):
        _step(model, mo, math.nan)
    mo.save_ckpt(tmp_path / "a.safetensors")
    for _ in range(3):
        _step(model, mo, math.nan)
    with pytest.raises(StageError, match=r"rolling back to a\.safetensors 3 times did not help"):
        _step(model, mo, math.nan)


def test_the_search_for_a_loss_scale_is_no_incident(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    config = {"optimizer": {"name": "sgd", "lr": 1e-3}, "precision": {"amp": "fp16", "loss_scale": 2.0**24},
              "nonfinite": {"policy": "stop", "triage": True}}  # fmt: skip
    config["precision"] |= {"dynamic_loss_scale_window": 100}
    mo = ModelOptimizer(model, config)
    moved = []
    for _ in range(30):
        with mo.autocast():
            out = model(torch.full((3, 4), 30.0))
        moved.append(mo.step(out.float().square().mean()))
    assert not moved[0] and moved[-1] and not any(w.startswith("step") for w in mo.warnings)


# What was there before the first operator, and what nobody looked at.


def _with_inf(where: str, first: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made = {"linear": nn.Linear(4, 4), "layer norm": nn.LayerNorm(4), "batch norm": nn.BatchNorm1d(4)}
    model = nn.Sequential(made[first], nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with torch.no_grad():
        if where == "input":
            x[2, 1] = math.inf
        elif where == "minus":
            x[2, 1] = -math.inf
        else:
            dict(model.named_parameters())[where].view(-1)[0] = math.inf
    return model, x


@pytest.mark.parametrize("first", ["linear", "layer norm", "batch norm"])
@pytest.mark.parametrize("where", ["input", "minus", "0.weight", "0.bias", "1.weight", "2.weight"])
def test_an_inf_that_was_there_is_named_itself(where: str, first: str) -> None:
    model, x = _with_inf(where, first)
    origin = _look(model, x).origin
    assert origin is not None and origin.inf == 1 and not origin.nan
    if where in ("input", "minus"):
        assert (origin.phase, origin.tensor, origin.samples) == ("input", "input 0", (2,))
    else:
        assert (origin.phase, origin.tensor) == ("parameter", where)


class Additive(nn.Module):
    """The mask comes as an argument or a buffer, and is -inf where nothing shall be seen."""

    def __init__(self, fault: Any = lambda x: x) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(4, 4), fault
        self.register_buffer("causal", torch.full((5, 5), -math.inf).triu(1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.linear(x) @ x.transpose(1, 2) + self.causal + mask
        out: Tensor = self.fault(scores.softmax(-1) @ x)
        return out


@pytest.mark.parametrize("padded", [(), (1,), (1, 2)])
def test_a_mask_that_came_along_is_not_the_origin_of_another_fault(padded: tuple[int, ...]) -> None:
    mask = torch.zeros(3, 1, 5)
    for sample in padded:
        mask[sample, :, -1] = -math.inf
    fault = lambda out: out * torch.where(out > out.max() - 1e-6, math.nan, 1.0)  # noqa: E731
    origin = _look(Additive(fault), (torch.randn(3, 5, 4), mask)).origin
    assert origin is not None and origin.phase == "forward" and origin.tensor != "input 1"


def test_a_mask_that_hides_all_of_a_sample() -> None:
    mask = torch.zeros(3, 1, 5)
    mask[1] = -math.inf
    origin = _look(Additive(), (torch.randn(3, 5, 4), mask)).origin
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.samples) == ("input", "input 1", (1,))
    mask[2, :, -1] = -math.inf  # as it should be; then it is the operator that could not do it
    origin = _look(Additive(), (torch.randn(3, 5, 4), mask)).origin
    assert origin is not None and origin.tensor == "_softmax" and origin.samples == (1,)


def test_a_step_in_eval_mode_is_looked_at() -> None:
    model = _net().eval()
    x = torch.randn(3, 4)
    x[1, 0] = math.nan
    finding = _look(model, x)
    assert finding.replayed and finding.origin is not None and finding.origin.tensor == "input 0"
    # A pass that no gradient came back to is no part of the step.
    model = _net().train()
    lane = Lane(model, Config())
    recorder = Recorder(lane)
    model.eval()(x)
    lane.backward(model.train()(torch.randn(3, 4)).sum() * math.nan)
    lane.window.close()
    found = recorder.find(math.nan, math.nan)
    assert found.origin is not None and found.origin.phase == "loss" and found.micro_batch == 0


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    def loss(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("mixed", [False, True])
def test_what_was_not_seen_is_not_judged(mixed: bool) -> None:
    """A loss that doesn't come through the model's forward; also beside one that does."""
    model = OwnLoss()
    mo = ModelOptimizer(model, {"accumulate": {"steps": 2 if mixed else 1}, "nonfinite": {"triage": True}})
    if mixed:
        mo.step(model(torch.ones(3, 4)).square().mean())
    assert not mo.step(model.loss(torch.full((3, 4), math.nan)))
    (text,) = mo.warnings
    assert text.startswith("step 1: the loss is nan; where it began is not known: the loss does not come from calls")
    judge = mo.lanes[""].judge
    assert judge is not None and (judge.findings[0].origin is None or not judge.findings[0].replayed)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_weight_that_is_not_finite_is_named_where_the_loss_was_not_seen(mixed: bool) -> None:
    model = OwnLoss()
    mo = ModelOptimizer(model, {"accumulate": {"steps": 2 if mixed else 1}, "nonfinite": {"triage": True}})
    if mixed:
        mo.step(model(torch.ones(3, 4)).square().mean())
    with torch.no_grad():
        model.linear.weight[0, 0] = math.inf
    assert not mo.step(model.loss(torch.ones(3, 4)))
    assert any("it began in the weights: linear.weight (float32 2×4) has 1 Inf" in text for text in mo.warnings)


class Counts(nn.Module):
    """Divides by zero the second time it is run, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.linear(x) / (self.runs - 2)
        return out


def test_a_pass_is_run_again_with_the_buffers_it_began_with() -> None:
    model = Counts()
    model(torch.ones(1, 4))
    origin = _look(model, torch.ones(3, 4)).origin
    assert origin is not None and origin.tensor == "div" and float(model.runs) == 2


def test_a_model_that_is_looked_at_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    mo = ModelOptimizer(model, {"nonfinite": {"triage": True}, "memory": {"checkpointing": True}})
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))
    assert len(mo.lanes[""].judge.recorder.passes) == 2  # type: ignore[union-attr]


def test_roll_backs_are_counted_by_the_checkpoint_and_not_by_its_file(tmp_path: Path) -> None:
    model, mo = _mo(tmp_path, policy="rollback", limit=1)
    for _ in range(5):  # one file, written anew after each step
        mo.save_ckpt(tmp_path / "last.safetensors")
        _step(model, mo, math.nan)
        assert _step(model, mo)
    assert mo.global_step == 5
