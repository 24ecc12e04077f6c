"""Accumulation that equals the big batch: sums of gradients and sums of weights, divided once, at the end. Nothing is
divided beforehand, so ragged tails and unequal micro-batches need no case of their own: the gradient of a window is Σ
grad(loss_i) / Σ weight_i whatever the split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.optimizers.gradient_norm import numbers

# Fields of a window that a checkpoint holds.
_SAVED = ("micro", "weight", "weighted", "factor", "open", "samples")
# A parameter, the gradient it had, and how often that had been written to.
Witness = tuple[Tensor, Tensor, int]


def loss_factor(scale: float, weight: float | None) -> float:
    """What the losses of a window are multiplied by before the backward pass."""
    if not weight:
        return scale
    # A loss that is a sum over many samples would overflow fp16 where their mean does not: it is brought to a mean's
    # size by a power of two, which costs no precision.
    return scale * 2.0 ** -round(math.log2(weight))


def check_loss(loss: object) -> None:
    """Refuses what no backward pass can begin at."""
    if isinstance(loss, Tensor) and loss.requires_grad and not loss.ndim and not loss.is_complex():
        return
    if not isinstance(loss, Tensor):
        what, hint = f"a {type(loss).__name__}", "give the loss itself, not loss.item()"
    elif loss.numel() != 1:
        what, hint = f"a tensor of shape {tuple(loss.shape)}", "take its mean, or its sum with weight="
    elif loss.is_complex():
        what, hint = f"a tensor of {loss.dtype}", "take its real part or its magnitude"
    elif not loss.requires_grad:
        what, hint = "a tensor without a gradient", "compute it from the model, undetached and without torch.no_grad()"
    else:
        return
    raise ConfigError(f"a loss is one real number with a gradient, got {what}", where="loss", hint=hint)


def counted(weight: object) -> float:
    """A weight as a plain number, whatever counted it: python, numpy or a tensor of one element."""
    number = as_float(weight)
    if number is not None and 0 <= number < math.inf:
        return number
    what = repr(weight)
    if isinstance(weight, Tensor) and weight.numel() != 1:
        what = f"a tensor of shape {tuple(weight.shape)}"
    raise ConfigError(f"a weight counts samples or tokens, got {what}", where="weight",
                      hint="give a finite number from 0 on")  # fmt: skip


def as_float(value: Any) -> float | None:
    """A number of any kind as a float; None for what is none."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def witness(params: Iterable[Tensor]) -> Witness | None:
    """One gradient as it is now: whether it is still there shows whether all are."""
    for param in params:
        if param.grad is not None:
            return param, param.grad, param.grad._version
    return None


@dataclass
class Window:
    """The micro-batches since the last optimizer step. A loss without weight is a mean and counts 1; a loss with weight
    is a sum over that many samples or tokens. Several backward calls before one step() belong to one micro-batch:
    without weights their losses add up."""

    micro: int = 0  # micro-batches closed by step()
    weight: float = 0.0  # Σ weight of the closed ones
    losses: list[Tensor] = field(default_factory=list)  # detached loss of every backward call
    weighted: bool | None = None  # whether weights are given in this window; None before the first loss
    # what every loss of the window was multiplied by (the loss scale); the gradients still carry it
    factor: float = 1.0
    carried_loss: float = 0.0
    samples: int = 0  # how many samples its micro-batches held, as far as the loop said; speed is measured by them
    open: int = 0  # backward calls since the last micro-batch was closed
    last_read: float | None = None  # the last loss that was read from the device; None since a later one was added
    witness: Witness | None = None  # a gradient as the last backward call left it

    @property
    def untouched(self) -> bool:
        """Whether nothing has been added yet, by a backward call or by hand."""
        return self.weighted is None and not self.micro

    def check(self, weight: float | None, params: Iterable[Tensor]) -> None:
        """Before a further backward call, with this weight."""
        weighted = weight is not None
        if self.weighted is not None and weighted is not self.weighted:
            what = "some losses of one accumulation window have a weight and some have none"
            hint = "give the number of samples (or tokens) with each, or with none"
            raise ConfigError(what, where="weight", hint=hint)
        self.check_gradients(params)

    def add(self, loss: Tensor, weight: float | None) -> None:
        """Takes in one backward call that was checked."""
        self.weighted = weight is not None
        if weight is not None:
            self.weight += weight
        self.losses.append(loss)
        self.last_read = None
        self.open += 1

    def close(self) -> int:
        """Ends a micro-batch; returns how many the window holds."""
        if not self.weighted:
            self.weight += 1.0
        self.micro += 1
        self.open = 0
        return self.micro

    def check_gradients(self, params: Iterable[Tensor]) -> None:
        """Whether what was added is still there: a loop's own zero_grad() would take it away without a word."""
        if self.witness is None:
            return
        param, grad, version = self.witness
        now = param.grad
        if now is grad and now._version == version:
            return
        if now is None or not any(p.grad is not None and p.grad.any() for p in params):
            raise StageError(
                "the gradients of a window were cleared before its step, and the window is dropped", where="step",
                hint="leave zero_grad() out: ModelOptimizer clears gradients after each step",
            )  # fmt: skip

    @property
    def has_loss(self) -> bool:
        """Whether a loss was given; gradients of a backward pass that the loop ran itself come without one."""
        return bool(self.losses) or self.carried_loss != 0.0

    def total_loss(self) -> float:
        """Σ loss of the window (one synchronisation)."""
        total = self.carried_loss
        for value in numbers(self.losses):  # in order, so that a window resumed half-way gives the same sum
            total += value
            self.last_read = value
        return total

    def clear(self) -> None:
        self.micro = self.open = self.samples = 0
        self.weight = self.carried_loss = 0.0
        self.factor = 1.0
        self.weighted = self.witness = None
        self.losses.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.total_loss(), **{name: getattr(self, name) for name in _SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        for name in _SAVED:
            setattr(self, name, state[name])
        self.carried_loss = state["loss"]
