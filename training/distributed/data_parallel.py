"""Data parallel training: every rank holds the whole model, and the gradient of a step is that of all ranks' samples.

Gradients are reduced in buckets while the backward pass still runs. The buckets hold the same parameters in every step
and are sent in the same order on every rank. So a resumed run adds in the same order as the run it continues, and any
rank may leave any layer out: a gradient that the pass has not computed is sent as it is, or as zeros.
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
from layerline.training.distributed.ranks import Ranks, buckets, flattened, lines, unflatten
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import named
from layerline.training.model.precision import HALF_TYPES


def prepare(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Checks that every rank has the same model, and copies the weights of rank 0; before an optimizer is made."""
    names = named(model)
    ranks.compare(lines(names, config))
    with ranks.phases.guarded("sharing weights", 0), torch.no_grad():
        ranks.spread([t.detach() for t in names.tensors.values()])


class Replicas(Peers):
    """A whole model on each rank.

    At the end of a window the ranks exchange one small message: which parameters have a gradient, and whether one has
    changed since it was sent. Then all gradients are sent again. A parameter that no rank used has no
    gradient, as in one process.
    """

    def __init__(self, lane: LaneState, ranks: Ranks, config: Config) -> None:
        super().__init__(lane, ranks)
        self._size = config.distributed.bucket_mb * 2**20
        self._type = HALF_TYPES.get(config.distributed.compress)
        self._steps = config.accumulate.steps
        if isinstance(lane.model, DistributedDataParallel):
            _silence(lane.model)
        # Buckets are in reverse order, because a backward pass computes the gradients of the last layers first. With
        # masters nothing is sent during the pass: they take the gradients after it.
        overlaps = config.distributed.overlap and lane.masters is None
        self._buckets = list(buckets(lane.params[::-1], self._size)) if overlaps else []
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._is_sending = False
        self._awaited: list[int] = []  # by bucket: number of gradients that are not computed yet
        self._sent_buckets: list[tuple[Any, Tensor]] = []  # handle and tensor of each bucket sent, in order
        # Each parameter with its gradient as it was sent (None: it had none) and the version counter of that gradient.
        self._sent_gradients: list[tuple[Tensor, Tensor | None, int]] = []
        for bucket in self._buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self._reach)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps each backward pass. The first one of the window's last micro-batch sends the gradients."""
        with super().backward():
            self._is_sending = not self._sent_buckets and self.lane.window.micro == self._steps - 1
            self._awaited = list(map(len, self._buckets))
            try:
                yield
                self.ready()
                if self._is_sending:
                    self._send_rest()
            finally:
                self._is_sending = False

    def before_step(self) -> None:
        """Replaces the window's gradients by their mean over the ranks."""
        with self.guarded("reducing gradients"):
            if not self._sent_buckets:
                self.ready()
            self._send_rest()  # a backward pass that failed may have sent some of them
            self._settle_gradients()
            self._settle_buffers()
        self._sent_buckets, self._sent_gradients = [], []

    def _reach(self, param: Tensor) -> None:
        """A hook that torch calls when a gradient is complete. Sends the buckets whose turn it is."""
        if self._is_sending:
            self._awaited[self._bucket_of[id(param)]] -= 1
            while len(self._sent_buckets) < len(self._buckets) and self._awaited[len(self._sent_buckets)] <= 0:
                self._send_next()

    def _send_rest(self) -> None:
        while len(self._sent_buckets) < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent_buckets)]
        self._sent_gradients += [(p, p.grad, _version(p.grad)) for p in bucket]
        self._sent_buckets.append(self._send([_gradient_or_zeros(p) for p in bucket]))

    @torch.no_grad()
    def _send(self, grads: Sequence[Tensor]) -> tuple[Any, Tensor]:
        flat = flattened(grads, self.ranks.device).div_(self.ranks.size)
        message = flat.to(self._type or flat.dtype)
        return dist.all_reduce(message, async_op=True), message

    @torch.no_grad()
    def _settle_gradients(self) -> None:
        lane = self.lane
        # Reasons: a further backward pass, the user's code, a window that was dropped, or a checkpoint that was loaded.
        changed = any(p.grad is not grad or _version(grad) != version for p, grad, version in self._sent_gradients)
        has_gradient = [s.grad is not None for s in lane.stepped]
        # The maximum over the ranks is a logical or.
        flags = torch.tensor([*has_gradient, changed], dtype=torch.uint8, device=self.ranks.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        *used, changed_somewhere = flags.tolist()
        grads = {id(stepped): _gradient_or_zeros(stepped) for stepped in lane.stepped}
        settled: set[int] = set()
        for (work, message), bucket in zip(self._sent_buckets, self._buckets, strict=True):
            work.wait()
            if not changed_somewhere:
                settled |= set(map(id, bucket))
                unflatten(message, [grads[id(p)] for p in bucket])
        rest = []
        for stepped, somewhere in zip(lane.stepped, used, strict=True):
            stepped.grad = grads[id(stepped)] if somewhere else None
            if somewhere and id(stepped) not in settled:  # changed since, or joined later and in no bucket
                rest.append(grads[id(stepped)])
        # All are sent before the first is waited for.
        reductions = [(bucket, *self._send(bucket)) for bucket in buckets(rest, self._size)]
        for bucket, work, message in reductions:
            work.wait()
            unflatten(message, bucket)
        unused = [name for name, somewhere in zip(lane.names, used, strict=True) if not somewhere]
        if unused and self._buckets:
            who = f"{unused[0]} gets"
            if len(unused) > 1:
                who = f"{unused[0]} and {len(unused) - 1} more get"
            text = f"{who} no gradient: what is sent with it waits for the end of the backward pass"
            lane.monitor.warn("unused", text)


def _gradient_or_zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _version(grad: Tensor | None) -> int:
    """torch's counter of writes into a tensor."""
    return -1 if grad is None else grad._version


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
