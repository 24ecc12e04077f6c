"""A model, its optimizer and everything that moves with them. The step engine builds on this class; the modules around
a step know no more of the engine than this, so that no import leads back to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.config.sections import Config
from layerline.training.loop.accumulation import Window
from layerline.training.loop.ema import average
from layerline.training.loop.monitors import Monitor
from layerline.training.loop.running_stats_guard import RunningStatsGuard, guarded
from layerline.training.model.canonical_names import Slots, named
from layerline.training.model.policy import Policy
from layerline.training.model.precision import LossScale, masters
from layerline.training.model.split_tensors import device_of, local
from layerline.training.optimizers import custom, gradient_norm, param_groups, registry
from layerline.training.optimizers.gradient_norm import numbers
from layerline.training.optimizers.lr import Rate
from layerline.training.optimizers.param_groups import Member
from layerline.training.optimizers.strides import Strides, fused


class FiniteWeights:
    """The weights of one model that were finite at first; what holds an Inf on purpose is left alone."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._watched = dict(zip(names, params, strict=True))
        for name in self._spoilt():
            del self._watched[name]

    def first_spoilt(self) -> str | None:
        """The name of the first weight with an Inf or NaN (one pass over all weights, one read of the device)."""
        return next(iter(self._spoilt()), None)

    @torch.no_grad()
    def _spoilt(self) -> list[str]:
        parts: dict[str, Tensor] = {}
        for name, param in self._watched.items():
            if local(param).numel():  # a rank may hold no element of a split parameter
                parts[name] = local(param.detach())
        if not parts:
            return []
        # The norm is not finite where an element is not, and where the squares of large ones overflow. Reading it first
        # is ten times as fast as looking at each element.
        norms = numbers(torch._foreach_norm(list(parts.values())))
        suspects = [name for name, norm in zip(parts, norms, strict=True) if not math.isfinite(norm)]
        return [name for name in suspects if not parts[name].isfinite().all()]


@dataclass
class _Count:
    number: int = 0


# Backward passes of all lanes. One of another ModelOptimizer may have left gradients in a lane's parameters. It is no
# attribute of a class: writing to one makes Python forget what it knows of the class, which each step would pay for.
passes = _Count()


class LaneState:
    """The state of one model's training."""

    def __init__(self, model: nn.Module, config: Config, optimizer: Any, *, shared: bool) -> None:
        self.own_passes = passes.number
        self.model, self.config, self.shared = model, config, shared
        self.named = named(model)
        self.members = param_groups.placed(model, self.named, config.optimizer)
        self.params = [m.param for m in self.members]
        self.names = [m.name for m in self.members]
        self.device = device_of(self.params[0])
        self.custom = optimizer is not None
        self.masters = masters(config, self.params, custom=self.custom)
        self.stepped = self.params  # what the optimizer steps: `params`, or their masters
        if self.masters is not None:
            self.stepped = [self.masters.stepped(p) for p in self.params]
        if self.custom:
            custom.check(optimizer, self.params)
        else:
            optimizer = registry.build(config.optimizer, self.members, self.stepped)
        self.optimizer = optimizer
        # torch's own zero_grad() would only go through gradients that are cleared already.
        clear = getattr(optimizer.zero_grad, "__func__", None)
        self._clears_itself = self.custom and clear is not torch.optim.Optimizer.zero_grad
        self.needs_closure = self.custom and custom.needs_closure(optimizer)
        self.rate = Rate(config, optimizer, custom=self.custom)
        self.scale = LossScale(config.precision)
        self.window = Window()
        self.ema = average(self.named, self.masters, config)
        self.monitor = Monitor(config.monitor, self.names, self.stepped)
        statistics = Slots(self.named, guarded(self.named))
        self.guard = RunningStatsGuard(statistics) if statistics.names else None
        self.peers: RankExchange | None = None  # the exchange with other ranks; None in a single process
        self.masks: Policy | None = None
        self.judge: RejectionPolicy | None = None  # what follows rejected steps; None for the default policy
        self.largest_part: int | None = None  # greatest number of samples in a pass, where a whole batch did not fit
        # Accepted and rejected steps, rejected ones in a row that no smaller loss scale answers, and the number of the
        # first rejected one among all attempted ones.
        self.steps = self.skipped = self.skipped_in_a_row = self.first_rejected = 0
        # Of the last accepted step, before clipping and per sample.
        self.grad_norm = self.loss = math.nan
        self.take_stock()

    def policies(self) -> list[Policy]:
        """The policies of this model in the order in which they act, before a step and after it."""
        in_order: tuple[Policy | None, ...] = (
            # The parallel strategy sums gradients over the ranks: all that follows must see the same ones.
            self.peers,
            # Master weights take over what was written into half weights before anything steps or averages them. After
            # a step the model has them again before masks and averages look at it.
            self.masters,
            # What is masked is zero again before it is averaged.
            self.masks,
            self.ema,
            # Running statistics come after the average, which follows them too: a growing mask may have run the model.
            self.guard,
            # Loss scale and schedule set what the next step reads: the log row of this one has the values before.
            self.scale,
            self.rate,
        )
        return list(filter(None, in_order))

    def take_stock(self) -> None:
        """Works out what depends on `params`: at first, and when some were added."""
        self.kinds = [(p.dtype, p.device) for p in self.params]
        self.find_frozen()
        # Some update rules, as adafactor's, divide by the number of elements: without a gradient none steps these.
        self.empty = [p for p in self.stepped if not p.numel()]
        self.finite = FiniteWeights(self.names, self.params)
        self.small = gradient_norm.is_small(self.stepped)
        plain = all(type(p) is nn.Parameter for p in self.stepped) and (not self.custom or fused(self.optimizer))
        self.strides = Strides(self.optimizer, self.params, self.stepped) if plain else None

    def find_frozen(self) -> None:
        """Notes which parameters of the model are frozen: when one is not any more, a step says so."""
        self.frozen = [p for p in self.named.params.values() if not p.requires_grad]

    def forget(self) -> None:
        """Drops the window: its losses and its gradients."""
        self.window.clear()
        self.own_passes = passes.number
        for param in self.stepped:
            param.grad = None
        if self.masters is not None:
            for half in self.masters.half:  # a backward pass that failed has left gradients there
                half.grad = None
        if self._clears_itself:
            self.optimizer.zero_grad()

    def refuse_averages(self, where: str) -> None:
        """Training would change the averages, which the model holds, and not the weights."""
        if self.ema is not None and self.ema.swapped:
            raise ConfigError("the model holds its EMA weights", where=where, hint="call switch_to_online() first")

    def backward(self, loss: Tensor, weight: float | None = None, *, share: float = 1.0) -> None:
        """Adds the gradients of one loss to the window."""
        raise NotImplementedError


class RankExchange(Policy, Protocol):
    """What a lane exchanges with the other ranks; see `distributed.parallel_strategy.Peers`."""

    ask: float
    asked: float

    @property
    def size(self) -> int: ...
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
    def mean_statistics(self, window: Mapping[str, Any]) -> dict[str, Tensor]: ...
    def split(self, tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]: ...


class RejectionPolicy(Protocol):
    """Decides what follows rejected steps; see `diagnostics.triage.Judge`."""

    def rejected(self, lane: LaneState, loss: float, norm: float) -> None: ...
    def enough(self, lane: LaneState, error: StageError) -> None: ...
