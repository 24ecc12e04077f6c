"""The state of one lane, as the modules around a step see it.

The step engine imports these modules and passes itself to them. They know this interface only, so that no import leads
back to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import StageError
from layerline.training.config.sections import Config
from layerline.training.loop.accumulation import Window
from layerline.training.loop.ema import Ema
from layerline.training.loop.finite_weights import FiniteWeights
from layerline.training.loop.monitors import Monitor
from layerline.training.loop.running_stats_guard import Guard
from layerline.training.model.canonical_names import Named
from layerline.training.model.precision import LossScale, Masters
from layerline.training.optimizers.foreach import Sophia
from layerline.training.optimizers.lr import Rate
from layerline.training.optimizers.param_groups import Member
from layerline.training.optimizers.strides import Strides
from layerline.training.policy import Policy


class LaneState(Protocol):
    """A model, its optimizer and everything that changes with it.

    Attributes:
        model: the user's model, wrapped or not.
        config: the typed configuration.
        optimizer: the built-in or custom optimizer; `custom` says which.
        named: the model's tensors by canonical name.
        members: the trained parameters with their rates and weight decays.
        params, names: the trained parameters and their names.
        stepped: what the optimizer steps: `params`, or their masters.
        steps: accepted optimizer steps.
        largest_part: greatest number of samples in a pass, where a micro-batch did not fit into memory.
        skipped: rejected steps; `skipped_in_a_row` leaves out fp16 overflows that a smaller loss scale answers.
        first_rejected: number of the first rejected step among all attempted ones; 0 while there is none.
        gradient_bytes: size of the gradients of the first step.
        loss, grad_norm: of the last accepted step, per sample and before clipping; NaN before the first.
        peers: the exchange with other ranks; None in a single process.
        masks: applied after each accepted step.
        frozen: parameters of the model that are not trained.
        finite: whether the weights still are finite.
        strides: keeps state and gradients in the parameters' order of memory; None where this isn't needed.
        kinds: type and device of each of `params`, which must stay the same.
        judge: decides after each rejected step whether training goes on; None for the default policy.
    """

    model: nn.Module
    config: Config
    shared: bool
    named: Named
    members: tuple[Member, ...]
    params: list[nn.Parameter]
    names: list[str]
    stepped: list[nn.Parameter]
    device: torch.device
    custom: bool
    optimizer: Any
    masters: Masters | None
    sophia: Sophia | None
    rate: Rate
    scale: LossScale
    window: Window
    ema: Ema | None
    monitor: Monitor
    guard: Guard | None
    peers: RankExchange | None
    masks: Policy | None
    judge: RejectionPolicy | None
    strides: Strides | None
    finite: FiniteWeights
    frozen: list[nn.Parameter]
    kinds: list[tuple[torch.dtype, torch.device]]
    gradient_bytes: int
    largest_part: int | None
    steps: int
    skipped: int
    skipped_in_a_row: int
    first_rejected: int
    loss: float
    grad_norm: float

    def policies(self) -> list[Policy]: ...
    def take_stock(self) -> None: ...
    def refresh(self, *, warn: bool = True) -> None: ...
    def forget(self) -> None: ...
    def backward(self, loss: Tensor, weight: float | None = None, *, share: float = 1.0) -> None: ...


class RankExchange(Policy, Protocol):
    """What a lane exchanges with the other ranks; see `distributed.parallel_strategy.Peers`."""

    model: nn.Module
    ask: float
    asked: float

    @property
    def size(self) -> int: ...
    def arm(self, *, sync: bool) -> None: ...
    def backward(self) -> AbstractContextManager[None]: ...
    def norms(self, grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]: ...
    def mean(self, *values: float) -> tuple[float, ...]: ...
    def agree(self, value: float) -> float: ...
    def greatest(self, value: float) -> float: ...
    def gather(self, thing: Any) -> list[Any]: ...
    def figures(self) -> dict[str, float]: ...
    def admit(self, fresh: Sequence[Member]) -> None: ...
    def release(self) -> None: ...
    def shared_window(self, state: dict[str, Any]) -> dict[str, Any]: ...
    def mean_by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def split(self, tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]: ...


class RejectionPolicy(Protocol):
    """Decides what follows rejected steps; see `diagnostics.triage.Judge`."""

    def rejected(self, lane: LaneState, loss: float, norm: float) -> None: ...
    def enough(self, lane: LaneState, error: StageError) -> None: ...
