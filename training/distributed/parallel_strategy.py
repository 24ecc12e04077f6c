"""What ranks exchange, whether each holds the whole model or a part: mean losses and weights, buffers, step times."""

from __future__ import annotations

import math
import statistics as numbers
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from layerline.training.distributed.ranks import Ranks, kind
from layerline.training.distributed.rendezvous import USERS_CODE
from layerline.training.loop.ema import statistics
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import Slots
from layerline.training.model.policy import Policy

if TYPE_CHECKING:
    from layerline.training.optimizers.param_groups import Member

# Steps over which the ranks' times are compared. Slower by a fifth is told, unless it is noise of so few seconds.
_REVIEW, _SLOWER, _NOISE_S = 10, 1.2, 0.005


class Peers(Policy, ABC):
    """The ranks that train one lane's model."""

    # Whether what a rank sends follows its backward pass, so that it can be told apart.
    reduces_at_end: ClassVar[bool] = True

    def __init__(self, lane: LaneState, ranks: Ranks) -> None:
        self.lane, self.ranks = lane, ranks
        # How long each rank worked on the last step, from the end of the step before until its gradients were ready (on
        # a GPU: were queued); what it waited for others is not in it.
        self.seconds: list[float] = []
        # Share of the step before last that was spent communicating after the backward pass, on the rank that waited
        # least for others; NaN where it cannot be told apart (GPUs, sharded models).
        self.communication = self._own_share = math.nan
        self._times: list[list[float]] = []
        # A number for the other ranks (a wish to save, to stop), and the greatest of all ranks' at the last step.
        self.ask = self.asked = 0.0
        self._since, self._ready = time.perf_counter(), 0.0
        lane.monitor.add_columns(list(self.figures()))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps each backward pass."""
        with self.guarded("the backward pass"):
            yield
        self.ranks.phases.at(f"{USERS_CODE} the backward pass", self.lane.steps + 1)

    @abstractmethod
    def before_step(self) -> None:
        """After the last backward pass of a window: brings its gradients to their mean over the ranks."""

    def norms(self, grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
        """Norm of each whole gradient, where this rank may hold a part only; summed up in `dtype`."""
        norms: Sequence[Tensor] = torch._foreach_norm(list(grads), dtype=dtype)
        return norms

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    def figures(self) -> dict[str, float]:
        """Columns of the log: the share of communication, seconds of the slowest rank over the mean (1 is even), and
        each rank's seconds. NaN before the first step."""
        seconds = self.seconds or [math.nan] * self.size
        columns = {"comm_rate": self.communication, "imbalance": max(seconds) * self.size / sum(seconds)}
        return columns | {f"step_s/{rank}": s for rank, s in enumerate(seconds)}

    def guarded(self, phase: str) -> AbstractContextManager[None]:
        """A part of the step in which ranks wait for each other; see Phases.guarded."""
        return self.ranks.phases.guarded(phase, self.lane.steps + 1)

    def ready(self) -> None:
        """This rank's own gradients are there."""
        self._ready = time.perf_counter()

    def mean(self, *values: float) -> tuple[float, ...]:
        """The mean of each value over all ranks, summed in their order on each; exchanges step times and wishes."""
        with self.guarded("reducing gradients"):
            rows = self.ranks.floats(*values, self._own_share, self._ready - self._since, self.ask)
        self.seconds, self.asked = [row[-2] for row in rows], max(row[-1] for row in rows)
        self.communication = min(row[-3] for row in rows)
        now = time.perf_counter()
        # On a GPU what was queued still runs.
        if self.reduces_at_end and self.lane.device.type == "cpu":
            self._own_share = (now - self._ready) / (now - self._since)
        self._since, self.ask = now, 0.0
        self._review()
        self.ranks.phases.at(f"{USERS_CODE} the update", self.lane.steps + 1)
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))[: len(values)]

    def _review(self) -> None:
        """Warns of a rank that is slower than another one, in the median of some steps."""
        self._times.append(self.seconds)
        if len(self._times) < _REVIEW:
            return
        medians = [numbers.median(times) for times in zip(*self._times, strict=True)]
        self._times = []  # the next review looks at new steps
        slow, fast = max(medians), min(medians)
        if slow > _SLOWER * fast and slow - fast > _NOISE_S:
            text = f"rank {medians.index(slow)} takes {slow:.3g} s a step, rank {medians.index(fast)} {fast:.3g} s"
            advice = "the others wait for the slowest rank; give it less data or look at its machine"
            self.lane.monitor.warn("ranks", f"{text}: {advice}")

    def agree(self, value: float) -> float:
        """The mean of a value over all ranks, outside of a step."""
        with self.guarded("exchanging notes"):
            return sum(row[0] for row in self.ranks.floats(value)) / self.ranks.size

    def greatest(self, value: float) -> float:
        """The greatest of a value over ranks that hold different parts of the weights; they ask at the same step."""
        return value

    def gather(self, thing: Any) -> list[Any]:
        """A small object of each rank, in their order."""
        with self.guarded("exchanging notes"):
            return self.ranks.gather(thing)

    def admit(self, fresh: Sequence[Member]) -> None:
        """Before parameters join: the same ones on every rank, which start from the values of rank 0."""
        self.ranks.compare([(f"parameter {m.name}", kind(m.param)) for m in fresh])
        with self.guarded("sharing weights"), torch.no_grad():
            self.ranks.spread([m.param.detach() for m in fresh])

    def release(self) -> None:
        """Before weights are written outside of a step: nothing reads or holds them any more."""
        return

    def shared_window(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a window in a form that any number of ranks can go on from: the mean of loss and weight. Ranks
        may have run different numbers of backward passes."""
        with self.ranks.phases.guarded("save_ckpt, which every rank has to call,", self.lane.steps):
            states: list[dict[str, Any]] = self.ranks.gather(state)
            begun = (s for s in states if s["weighted"] is not None or s["micro"])
            shared = dict(next(iter(begun), state))
            for name in ("loss", "weight"):
                shared[name] = sum(s[name] for s in states) / self.size
            return shared

    def mean_by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean over the ranks of what each has by parameter name, for an open window; a rank may have nothing for a
        layer that it left out."""
        with self.ranks.phases.guarded("save_ckpt, which every rank has to call,", self.lane.steps):
            names: set[str] = set()
            for names_of_rank in self.ranks.gather(list(tensors)):
                names.update(names_of_rank)
            means: dict[str, Tensor] = {}
            for name, stepped in zip(self.lane.names, self.lane.stepped, strict=True):
                if name in tensors:
                    means[name] = tensors[name].clone()
                elif name in names:
                    means[name] = torch.zeros_like(stepped)
            self.ranks.average(list(means.values()))
        return means

    def mean_statistics(self, window: Mapping[str, Any]) -> dict[str, Tensor]:
        """Running statistics as the end of a `shared_window` would make them: their mean over the ranks. The passes of
        each rank have moved its own since the last step. Empty for a window that no rank has begun."""
        if window["weighted"] is None and not window["micro"]:
            return {}
        names = list(statistics(self.lane.named))
        means = [tensor.clone() for tensor in Slots(self.lane.named, names).now()]
        with self.ranks.phases.guarded("save_ckpt, which every rank has to call,", self.lane.steps):
            self.ranks.average(means)
        return dict(zip(names, means, strict=True))

    def split(self, tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:  # noqa: ARG002
        """This rank's part of a lane's tensors, as a checkpoint names them."""
        return tensors

    @torch.no_grad()
    def _settle_buffers(self) -> None:
        """Running statistics become their mean over the ranks, so that they count all samples; other buffers are those
        of rank 0."""
        names = self.lane.named
        averaged = statistics(names)
        # As the model holds them now: a forward pass may put new tensors in the place of its buffers.
        self.ranks.average(Slots(names, averaged).now())
        self.ranks.spread(Slots(names, [n for n in names.buffers if n not in averaged]).now())
