"""The soft loss by hand, its gradient's size at any temperature, and a teacher that is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from layerline.pipeline.errors import ConfigError, TaskError
from layerline.training.data.distillation import Distillation, Taught, soft_loss
from layerline.training.data.loss import counted_labels, default_loss

_KL = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # (3/4, 1/4) against (1/2, 1/2)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_by_hand(temperature: float) -> None:
    teacher = torch.tensor([[math.log(3.0) * temperature, 0.0]])
    seen = soft_loss(torch.zeros(1, 2), teacher, temperature=temperature)
    assert seen.item() == pytest.approx(temperature**2 * _KL, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 6), st.floats(0.5, 20), st.integers(0, 2**31))
def test_like_torchs_kl_div_and_zero_only_for_equals(batch: int, classes: int, temperature: float, seed: int) -> None:
    torch.manual_seed(seed)
    a, b = torch.randn(2, batch, classes)
    p, q = (torch.log_softmax(x / temperature, -1) for x in (b, a))
    expected = nn.functional.kl_div(q, p, log_target=True, reduction="batchmean") * temperature**2
    assert soft_loss(a, b, temperature=temperature).item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert soft_loss(a, a.clone(), temperature=temperature).item() == 0.0
    assert soft_loss(a, b, temperature=temperature).item() >= -1e-6


def test_the_gradient_tends_to_that_of_matching_logits_at_high_temperature() -> None:
    student = torch.tensor([[0.3, -0.1, 0.4]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -1.0]])
    soft_loss(student, teacher, temperature=1000.0).backward()
    centred = (student.detach() - student.detach().mean()) - (teacher - teacher.mean())
    assert student.grad is not None
    assert torch.allclose(student.grad, centred / 3, atol=1e-3)  # Hinton et al. 2015, equation 4


def test_axis_and_positions_are_averaged() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 5, 3, 4)
    rows = soft_loss(a.movedim(1, -1).reshape(-1, 5), b.movedim(1, -1).reshape(-1, 5))
    assert torch.allclose(soft_loss(a, b, axis=1), rows)


def test_an_excluded_class_counts_nothing_and_leaves_the_gradient_finite() -> None:
    student = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, -math.inf]])
    loss = soft_loss(student, teacher, temperature=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(soft_loss(student[:, :2], teacher[:, :2], temperature=1.0).item())
    assert student.grad is not None and torch.isfinite(student.grad).all()


def test_half_logits_are_compared_in_float32() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 8, 10)
    half = soft_loss(a.half(), b.half())
    assert half.dtype == torch.float32 and half.item() == pytest.approx(soft_loss(a, b).item(), rel=1e-2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.calls = nn.Linear(3, 2), nn.Dropout(0.5), 0

    def forward(self, x: Tensor, *, extra: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        return {"logits": self.drop(self.linear(x)) + (0 if extra is None else extra)}


def test_the_teacher_is_in_eval_mode_and_gets_no_gradient() -> None:
    teacher, student = Counting(), nn.Linear(3, 2)
    distill = Distillation(teacher, temperature=2.0, weight=0.25)
    teacher.train()  # what model.train() does where the teacher is a part of it
    x, state = torch.randn(4, 3), torch.get_rng_state()
    out = student(x)
    hard = out.square().mean()
    loss = distill(out, hard, x, extra=torch.tensor(1.0))
    assert torch.equal(state, torch.get_rng_state()) and not teacher.training and not teacher.drop.training
    expected = 0.75 * hard + 0.25 * soft_loss(out, teacher.linear(x) + 1, temperature=2.0)
    assert loss.item() == pytest.approx(expected.item())
    loss.backward()
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters()) and student.weight.grad is not None


def test_weight_zero_is_the_plain_loss_and_does_not_run_the_teacher() -> None:
    teacher = Counting()
    loss = torch.tensor(3.0)
    assert Distillation(teacher, weight=0.0)(torch.zeros(1, 2), loss, torch.zeros(1, 3)) is loss and teacher.calls == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"distill.temperature: a temperature of 0"):
        Distillation(nn.Linear(1, 1), temperature=0)
    with pytest.raises(ConfigError, match=r"distill.weight: a weight of 2"):
        Distillation(nn.Linear(1, 1), weight=2)
    with pytest.raises(ConfigError, match=r"the student gives \(1, 2\), the teacher \(1, 3\)"):
        soft_loss(torch.zeros(1, 2), torch.zeros(1, 3))


@pytest.mark.parametrize("weight", [None, 4.0])
def test_a_tasks_loss_with_the_teachers_by_hand(weight: float | None) -> None:
    student, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
    x = torch.randn(4, 3)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float | None]:
        each = model(batch).square().mean(1)
        return (each.mean() if weight is None else each.sum()), weight

    both = Taught(loss, student, Distillation(teacher, temperature=2.0, weight=0.25))
    seen, over = both(student, x)
    soft = soft_loss(student(x), teacher(x), temperature=2.0)
    expected = 0.75 * student(x).square().mean() + 0.25 * soft
    torch.testing.assert_close(seen, expected * (weight or 1.0))
    assert over == weight and not student._forward_hooks
    with pytest.raises(TaskError, match="never calls the model"):
        Taught(lambda model, batch: (batch.sum(), None), student, both.distillation)(student, x)


def test_padding_is_not_distilled_and_any_split_gives_the_whole() -> None:
    student, teacher, x = nn.Linear(3, 4), nn.Linear(3, 4), torch.randn(4, 5, 3)
    y = torch.randint(0, 4, (4, 5))
    y[0, 1:] = y[1, 2:] = -100

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float | None]:
        counted = counted_labels(batch)
        assert counted is not None
        return default_loss(model, batch, reduction="sum"), float(counted.sum())

    taught = Taught(loss, student, Distillation(teacher, temperature=2.0, weight=0.5), skips_ignored=True)
    whole, labels = taught(student, (x, y))
    real = y != -100
    by_hand = F.cross_entropy(student(x)[real], y[real]) + soft_loss(
        student(x)[real], teacher(x)[real], temperature=2.0
    )
    assert labels == 13
    torch.testing.assert_close(whole / 13, 0.5 * by_hand)
    parts = [taught(student, (x[:2], y[:2]))[0], taught(student, (x[2:], y[2:]))[0]]
    torch.testing.assert_close(sum(parts), whole)


def test_the_classes_are_on_axis_1_of_images_and_on_the_last_one_of_sequences() -> None:
    quarters = torch.tensor([math.log(3.0), 0.0])  # softmax (3/4, 1/4)
    image = quarters.view(1, 2, 1, 1).expand(1, 2, 3, 3)
    assert soft_loss(torch.zeros(1, 2, 3, 3), image, temperature=1.0).item() == pytest.approx(_KL, rel=1e-6)
    sequence = quarters.expand(1, 5, 2)
    assert soft_loss(torch.zeros(1, 5, 2), sequence, temperature=1.0).item() == pytest.approx(_KL, rel=1e-6)


@pytest.mark.parametrize("own_loss", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 5), (2, 3, 4, 5, 5)])
def test_the_shape_of_the_labels_says_where_the_classes_are(shape: tuple[int, ...], own_loss: bool) -> None:
    student, teacher, x = nn.Linear(1, 1), nn.Linear(1, 1), torch.randn(*shape, 1)
    outputs = nn.Module()
    outputs.forward = lambda value: student(value).squeeze(-1)  # type: ignore[method-assign]
    teachers = nn.Module()
    teachers.forward = lambda value: teacher(value).squeeze(-1)  # type: ignore[method-assign]
    taught = Taught(lambda model, batch: (model(batch[0]).sum() * 0, None), outputs,
                    Distillation(teachers, temperature=1.0, weight=1.0), skips_ignored=not own_loss)  # fmt: skip
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    loss, _ = taught(outputs, (x, y))
    rows = [value(x).squeeze(-1).movedim(1, -1).reshape(-1, 3) for value in (student, teacher)]
    torch.testing.assert_close(loss, soft_loss(*rows, temperature=1.0))
