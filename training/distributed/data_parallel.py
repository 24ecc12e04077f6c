"""Data parallel training: every rank holds the whole model, and the gradient of a step is that of all ranks' samples.

Gradients are reduced in buckets while the backward pass still runs. The buckets hold the same parameters in every step
and are sent in the same order on every rank, so that a resumed run adds in the order of the one it goes on from, and
any rank may leave any layer out: what a pass has not reached is sent as it is, or as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.distributed.parallel_strategy import Peers
from layerline.training.distributed.ranks import Ranks, buckets, lines, unflatten
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import named
from layerline.training.model.precision import HALF_TYPES


def prepare(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Before an optimizer is made: every rank has the same model, and starts from the weights of rank 0."""
    names = named(model)
    ranks.compare(lines(names, config))
    with ranks.pulse.guarded("sharing weights", 0), torch.no_grad():
        ranks.spread([t.detach() for t in names.tensors.values()], config.distributed.bucket_mb * 2**20)


class Replicas(Peers):
    """A whole model on each rank. After the window ranks tell each other, in one small message, who has a gradient for
    which parameter, and whether a further backward pass has added to what was sent already: all gradients are then sent
    once more. A parameter that no rank used has no gradient, as in one process."""

    def __init__(self, lane: LaneState, ranks: Ranks, config: Config) -> None:
        super().__init__(lane, ranks)
        self._size = config.distributed.bucket_mb * 2**20
        self._type = HALF_TYPES.get(config.distributed.compress)
        self._steps = config.accumulate.steps
        # Masters have taken the gradients of earlier micro-batches away from the half parameters.
        self._overlaps = config.distributed.overlap and (lane.masters is None or self._steps == 1)
        if isinstance(lane.model, DistributedDataParallel):
            _silence(lane.model)
        # A backward pass reaches the last layers first.
        self._buckets = list(buckets(lane.params[::-1], self._size)) if self._overlaps else []
        self._listens = False
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._left: list[int] = []  # how many gradients each bucket still waits for
        self._flights: list[tuple[Any, Tensor]] = []  # the buckets that were sent, in their order
        self._added = False  # whether a backward pass came after buckets were sent
        self._last: Tensor | None = None  # the window's last loss when they were
        for bucket in self._buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self._reach)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around each backward pass: that of a window's last micro-batch sends its gradients."""
        with self.guarded("the backward pass"):
            self._added = bool(self._flights)
            self._listens = not self._added and self.lane.window.micro == self._steps - 1
            self._left = list(map(len, self._buckets))
            self._last = self._last_loss()
            yield
            self.ready()
            if self._listens:
                self._send_rest()
            self._listens = False

    def before_step(self) -> None:
        """Brings the window's gradients to their mean over the ranks."""
        with self.guarded("reducing gradients"):
            if not self._flights:
                self.ready()
                self._send_rest()
            elif self._last_loss() is not self._last:  # of a window that was dropped, or loaded over, since
                self._added = True
            self._settle_gradients()
            self._settle_buffers()
        self._flights, self._added = [], False

    def _last_loss(self) -> Tensor | None:
        losses = self.lane.window.losses
        return losses[-1] if losses else None

    def _reach(self, param: Tensor) -> None:
        """A gradient is complete: sends the buckets that are."""
        if not self._listens:
            return
        self._left[self._bucket_of[id(param)]] -= 1
        while len(self._flights) < len(self._buckets) and not self._left[len(self._flights)]:
            self._send_next()

    def _send_rest(self) -> None:
        while len(self._flights) < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._flights)]
        self._flights.append(self._send(bucket, [p.grad for p in bucket]))

    @torch.no_grad()
    def _send(self, bucket: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        parts = []
        for param, grad in zip(bucket, grads, strict=True):
            parts.append((torch.zeros_like(param) if grad is None else grad).flatten())
        flat = torch.cat(parts).to(self.ranks.device).div_(self.ranks.size)
        sent = flat.to(self._type or flat.dtype)
        return dist.all_reduce(sent, async_op=True), sent

    @torch.no_grad()
    def _settle_gradients(self) -> None:
        lane = self.lane
        notes = torch.tensor([*(s.grad is not None for s in lane.stepped), self._added], dtype=torch.uint8,
                             device=self.ranks.device)  # fmt: skip
        dist.all_reduce(notes, dist.ReduceOp.MAX)
        *used, added = notes.tolist()
        grads: dict[int, Tensor] = {}
        for param, stepped in zip(lane.params, lane.stepped, strict=True):
            grads[id(param)] = torch.zeros_like(stepped) if stepped.grad is None else stepped.grad
        sent: set[int] = set()
        for (work, flat), bucket in zip(self._flights, self._buckets, strict=True):
            work.wait()
            if not added:
                sent |= set(map(id, bucket))
                unflatten(flat, [grads[id(p)] for p in bucket])
        rest = []
        for param, stepped, somewhere in zip(lane.params, lane.stepped, used, strict=True):
            stepped.grad = grads[id(param)] if somewhere else None
            if somewhere and id(param) not in sent:  # added to since, or joined later and in no bucket
                rest.append(grads[id(param)])
        if lane.sophia is not None:
            rest += lane.sophia.curvature.values()
        flights = [(bucket, *self._send(bucket, bucket)) for bucket in buckets(rest, self._size)]
        for bucket, work, flat in flights:
            work.wait()
            unflatten(flat, bucket)
        unused = [name for name, somewhere in zip(lane.names, used, strict=True) if not somewhere]
        if unused and self._buckets:
            who = f"{unused[0]} and {len(unused) - 1} more get" if len(unused) > 1 else f"{unused[0]} gets"
            text = f"{who} no gradient: what is sent with it waits for the end of the backward pass"
            lane.monitor.warn("unused", text)


def _silence(ddp: DistributedDataParallel) -> None:
    """Leaves the reducing to `Replicas`."""
    what = ""
    if ddp.static_graph:
        what = "has static_graph, which allows no pass that is not reduced"
    elif ddp._comm_hooks:
        what = "has a communication hook of its own"
    if what:
        raise ConfigError(f"the model's DistributedDataParallel {what}", where="model",
                          hint="pass the plain model, with distributed.compress for smaller messages")  # fmt: skip
    ddp.require_backward_grad_sync = False
