"""Distillation as a loss helper: the student also learns from the softened outputs of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline.pipeline.errors import ConfigError, TaskError
from layerline.training.data.loss import class_axis, counted_labels, first_output


def soft_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 4.0, axis: int | None = None,
    counted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """T² · KL(softmax(teacher / T) ‖ softmax(student / T)), averaged over all positions, or over those that `counted`
    marks in the shape of the logits without `axis` (Hinton et al. 2015).

    T² keeps the gradient's size when T changes. Computed in float32, without a gradient for the teacher. A class that
    the teacher excludes (logit -inf) counts nothing. The classes are on `axis`; None: as `loss.class_axis` finds it.
    """
    if student.shape != teacher.shape:
        what = f"the student gives {tuple(student.shape)}, the teacher {tuple(teacher.shape)}"
        raise ConfigError(what, where="distill")
    if axis is None:
        axis = class_axis(student, None)
    wanted = F.log_softmax(teacher.detach().float() / temperature, axis)
    learnt = F.log_softmax(student.float() / temperature, axis)
    share = wanted.exp()
    terms = torch.where(share > 0, share * (wanted - learnt), 0.0)
    by_position = terms.sum(axis)
    if counted is None or counted.shape != by_position.shape:
        return temperature**2 * by_position.mean()
    number = counted.sum().clamp(min=1)
    return temperature**2 * torch.where(counted, by_position, 0.0).sum() / number


class Distillation:
    """(1 - weight) · loss + weight · soft_loss, the teacher in eval mode and without gradients.

        distill = Distillation(teacher, temperature=4, weight=0.9)
        out = model(x)
        loss = distill(out, criterion(out, y), x)

    Args:
        teacher: left as it is but for its mode: eval.
        temperature: T > 0; higher shows more of the teacher's small probabilities.
        weight: share of the soft loss, 0 to 1. At 0 the teacher is not run.
        axis: the axis of the classes. None: axis 1 of images (N, classes, H, W), the last axis of other outputs; in the
            `train` stage the shape of the labels decides.
    """

    def __init__(
        self, teacher: nn.Module, *, temperature: float = 4.0, weight: float = 0.9, axis: int | None = None
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"a temperature of {temperature}", where="distill.temperature", hint="above 0")
        if not 0 <= weight <= 1:
            raise ConfigError(f"a weight of {weight}", where="distill.weight", hint="a share, 0 to 1")
        self.teacher = teacher.eval()
        self.temperature, self.weight, self.axis = temperature, weight, axis

    def __call__(self, outputs: Any, loss: Tensor, *inputs: Any, **named_inputs: Any) -> Tensor:
        """The loss to train on: `outputs` are what the student gave for `inputs`, `loss` its own mean loss."""
        return self.mixed(outputs, loss, inputs, named_inputs)

    def mixed(
        self, outputs: Any, loss: Tensor, inputs: tuple[Any, ...], named_inputs: dict[str, Any],
        labels: Tensor | None = None, counted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The same over the positions that `counted` marks; the shape of `labels` says where the classes are."""
        if not self.weight:
            return loss
        if self.teacher.training:  # model.train() on a module that holds the teacher too
            self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher(*inputs, **named_inputs)
        return (1 - self.weight) * loss + self.weight * self.distance(outputs, wanted, labels, counted)

    def distance(self, outputs: Any, wanted: Any, labels: Tensor | None, counted: Tensor | None) -> Tensor:
        """How far the outputs are from what the teacher gave: the soft loss of the first of them."""
        logits, axis = first_output(outputs), self.axis
        if axis is None:
            axis = class_axis(logits, labels)
        return soft_loss(logits, first_output(wanted), temperature=self.temperature, axis=axis, counted=counted)


Loss = Callable[[nn.Module, Any], tuple[Tensor, float | None]]


class Taught:
    """A task's loss with the teacher's added: what the student was called with while the loss was computed, the teacher
    is called with too."""

    def __init__(
        self, loss: Loss, student: nn.Module, distillation: Distillation,
        blaming: Callable[[], AbstractContextManager[Any]] = nullcontext, *, skips_ignored: bool = False,
    ) -> None:  # fmt: skip
        self.skips_ignored = skips_ignored  # whether `loss` leaves out labels of -100
        self.loss, self.student, self.distillation, self.blaming = loss, student, distillation, blaming

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, float | None]:
        """The loss to train on, with the same weight."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            calls.append((args, kwargs, out))

        with self.student.register_forward_hook(note, with_kwargs=True):
            loss, weight = self.loss(model, batch)
        if not calls:  # a loss may call parts of the model alone
            raise TaskError("loss() never calls the model, so there is nothing to distil", where="loss")
        # A sum over `weight` samples is a mean for the teacher's loss, and a sum again after it.
        scale = max(weight or 1.0, 1.0)
        labels = counted = None
        with self.blaming():
            with suppress(TaskError):  # a batch in a form of its own, for a loss of the task's own
                labels = counted_labels(batch)
            if self.skips_ignored:
                counted = labels
            parts = []
            for args, kwargs, out in calls:
                parts.append(self.distillation.mixed(out, loss / scale, args, kwargs, labels, counted))
        total = torch.stack(parts).mean() * scale
        if weight == 0:  # no label counts, so the teacher does not either
            total = total * 0
        return total, weight
