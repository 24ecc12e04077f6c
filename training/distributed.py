"""Data parallel training: every rank holds the whole model, and the gradient of a step is that of all ranks' samples.

DistributedDataParallel reduces while the backward pass still runs. Where it can't serve (several models in one graph,
float32 masters of accumulated half gradients, curvature estimates, a short last window, a model that was called without
its wrapper), gradients are reduced here after the backward pass; the sums are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from layerline.pipeline.errors import ConfigError
from layerline.training.config import Config
from layerline.training.ema import statistics
from layerline.training.names import named
from layerline.training.ranks import Ranks, lines

if TYPE_CHECKING:
    from layerline.training.lane import Lane

HOOKS = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def prepare(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Before an optimizer is made: every rank has the same model, and starts from the weights of rank 0.

    Raises:
        StageError: the ranks do not have the same model or configuration.
    """
    known = named(model)
    ranks.compare(lines(known, config))
    with ranks.pulse.guarded("sharing weights", 0), torch.no_grad():
        for flat, parts in _flattened(
            [t.detach() for t in known.tensors.values()], config.distributed.bucket_mb * 2**20
        ):
            dist.broadcast(flat, 0)
            _unflatten(flat, parts)


class Peers:
    """What the ranks of one lane have in common, sharded or not.

    Args:
        lane: model and optimizer of this rank.
        ranks: the group.

    Attributes:
        seconds: how long each rank worked on the last step, from the end of the step before until its gradients were
            ready; what it waited for others is not in it.
        ask: a number for the other ranks, exchanged at the next step (a wish to save, to stop).
        asked: the greatest of all ranks' numbers at the last step.
    """

    def __init__(self, lane: Lane, ranks: Ranks) -> None:
        self.lane, self.ranks = lane, ranks
        self.seconds: list[float] = []
        self.ask = self.asked = 0.0
        self._since, self._ready = time.perf_counter(), 0.0
        self._statistics = list(statistics(lane.named).values())
        self._buffers = [b for n, b in lane.named.buffers.items() if n not in statistics(lane.named)]
        lane.model.register_forward_pre_hook(lambda _, a, k: self._enters(a, k), with_kwargs=True)
        lane.model.register_forward_hook(
            lambda *_: ranks.pulse.at("the user's code after the forward pass", lane.steps + 1)
        )

        lane.monitor.add_columns(list(self.figures()))

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def imbalance(self) -> float:
        """Seconds of the slowest rank over the mean; 1 is even. NaN before the first step."""
        return max(self.seconds) * self.size / sum(self.seconds) if self.seconds else math.nan

    def figures(self) -> dict[str, float]:
        """Columns of the log: the last step's imbalance, and each rank's seconds."""
        seconds = self.seconds or [math.nan] * self.size
        return {"imbalance": self.imbalance, **{f"step_s/{r}": s for r, s in enumerate(seconds)}}

    def guarded(self, phase: str) -> AbstractContextManager[None]:
        """A part of the step in which ranks wait for each other; see Pulse.guarded."""
        return self.ranks.pulse.guarded(phase, self.lane.steps + 1)

    def ready(self) -> None:
        """This rank's own gradients are there."""
        self._ready = time.perf_counter()

    def mean(self, *values: float) -> tuple[float, ...]:
        """The mean of each value over all ranks, summed in their order on each; exchanges step times and wishes."""
        with self.guarded("reducing gradients"):
            rows = self.ranks.floats(*values, self._ready - self._since, self.ask)
        self.seconds, self.asked = [row[-2] for row in rows], max(row[-1] for row in rows)
        self._since, self.ask = time.perf_counter(), 0.0
        self.ranks.pulse.at("the user's code after the update", self.lane.steps + 1)
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))[: len(values)]

    def agree(self, value: float) -> float:
        """The mean of a value over all ranks, outside of a step."""
        with self.guarded("exchanging notes"):
            return sum(row[0] for row in self.ranks.floats(value)) / self.ranks.size

    def gather(self, thing: Any) -> list[Any]:
        """A small object of each rank, in their order."""
        with self.guarded("exchanging notes"):
            return self.ranks.gather(thing)

    def changed(self) -> None:
        """Weights were written outside of a step."""

    def window(self, grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """An open window in a form that any number of ranks can go on from: the mean of its gradients, loss and weight
        over the ranks."""
        own = self.lane.window.state_dict()
        loss, weight = ((self.agree(own[k])) for k in ("loss", "weight"))
        with self.guarded("saving"):
            return self._mean_gradients(grads), {"loss": loss, "weight": weight}

    def _mean_gradients(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {n: g.clone() for n, g in grads.items()}
        for flat, parts in _flattened(list(copies.values()), 1 << 26):
            dist.all_reduce(flat.div_(self.ranks.size))
            _unflatten(flat, parts)
        return copies

    def split(self, tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:  # noqa: ARG002
        """This rank's part of a lane's tensors, as a checkpoint names them."""
        return tensors

    def _enters(self, args: Any, kwargs: Any) -> None:
        pulse = self.ranks.pulse
        pulse.at("forward", self.lane.steps + 1)
        pulse.inputs = ", ".join(str(tuple(t.shape)) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))

    @torch.no_grad()
    def _settle_buffers(self) -> None:
        """Running statistics become their mean over the ranks, so that they count all samples; other buffers are those
        of rank 0."""
        for flat, parts in _flattened(self._statistics, 1 << 30):
            dist.all_reduce(flat.div_(self.ranks.size))
            _unflatten(flat, parts)
        for flat, parts in _flattened(self._buffers, 1 << 30):
            dist.broadcast(flat, 0)
            _unflatten(flat, parts)


class Replicas(Peers):
    """A whole model on each rank.

    Args:
        lane: its model may be in a DistributedDataParallel of the user's already.
        ranks: the group.
        config: `distributed`, and `accumulate` for when gradients are reduced.

    Attributes:
        model: what a loop calls: the wrapper where there is one. Calling the plain model gives the same gradients,
            reduced after the backward pass.
    """

    def __init__(self, lane: Lane, ranks: Ranks, config: Config) -> None:
        super().__init__(lane, ranks)
        self._config = config.distributed
        self.model: nn.Module = lane.model
        self._by_ddp = False
        accumulates = config.accumulate.steps > 1
        # DDP reduces what the last backward pass finds in .grad: masters have taken the earlier part away by then.
        self._by_hand = lane.shared or lane.sophia is not None or (lane.masters is not None and accumulates) \
            or not self._config.overlap  # fmt: skip
        self._ddp = lane.model if isinstance(lane.model, DistributedDataParallel) else None
        if self._ddp is None and not self._by_hand:
            self._ddp = self.model = _Guarded(lane.model, self)
        if self._ddp is not None:
            self._watch(self._ddp)
        self.arm(sync=not accumulates)

    def arm(self, *, sync: bool) -> None:
        """Whether the coming forward pass prepares DDP to reduce in its backward pass; that is when DDP decides it."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = sync and not self._by_hand

    def reduce(self, lane: Lane, *, synced: bool) -> None:
        """Brings the window's gradients to their mean over the ranks."""
        done, self._by_ddp = synced and self._by_ddp, False
        if not done:
            self.ready()
        with self.guarded("reducing gradients"):
            if not done:
                self._reduce(lane)
            self._settle_buffers()

    def norms(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients are whole on each rank, and the same."""
        norms: Sequence[Tensor] = torch._foreach_norm(list(grads))
        return norms

    @torch.no_grad()
    def _reduce(self, lane: Lane) -> None:
        # A parameter may have been used on some ranks only: the others add nothing to it.
        used = torch.tensor([p.grad is not None for p in lane.stepped], dtype=torch.uint8, device=self.ranks.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        grads = []
        for param, here in zip(lane.stepped, used.tolist(), strict=True):
            if here:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                grads.append(param.grad)
        if lane.sophia is not None:
            grads += lane.sophia.curvature.values()
        half, size = HALF.get(self._config.compress), self._config.bucket_mb * 2**20
        flights = []
        for flat, parts in _flattened(grads, size):
            sent = flat.div_(self.ranks.size).to(half or flat.dtype)
            flights.append((dist.all_reduce(sent, async_op=True), sent, parts))
        for flight, sent, parts in flights:
            assert flight is not None
            flight.wait()
            _unflatten(sent, parts)

    def _watch(self, ddp: DistributedDataParallel) -> None:
        def entered(*_: Any) -> None:
            self._by_ddp = ddp.require_backward_grad_sync and torch.is_grad_enabled()

        ddp.register_forward_pre_hook(entered)
        hook = HOOKS[self._config.compress]
        try:
            # Without annotations, which torch compares with its own classes. The last bucket's time stays; None is the
            # default group.
            ddp.register_comm_hook(None, lambda state, bucket: self.ready() or hook(state, bucket))  # type: ignore[func-returns-value]
        except RuntimeError as error:
            raise ConfigError(
                "the model's DistributedDataParallel has a communication hook of its own",
                where="distributed.compress", hint="leave the hook to this field, or pass the plain model",
            ) from error  # fmt: skip


class _Guarded(DistributedDataParallel):
    """DDP whose own collectives around a forward pass are watched as well."""

    def __init__(self, model: nn.Module, peers: Replicas) -> None:
        config, device = peers.lane.config.distributed, peers.lane.device
        super().__init__(model, device_ids=[device.index] if device.type == "cuda" else None, init_sync=False,
                         bucket_cap_mb=config.bucket_mb)  # fmt: skip
        self.broadcast_buffers = False  # they are settled once a step, by their mean
        self._peers = [peers]  # in a list: peers hold this module, not the other way round

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._peers[0].guarded("forward"):
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


def _flattened(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Buckets of one dtype and at most `size` bytes (or one tensor): a flat copy, and the tensors it was made of."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[Tensor] = []
        held = 0
        for tensor in group:
            if bucket and held + tensor.numel() * tensor.element_size() > size:
                yield torch.cat([t.flatten() for t in bucket]), bucket
                bucket, held = [], 0
            bucket.append(tensor)
            held += tensor.numel() * tensor.element_size()
        yield torch.cat([t.flatten() for t in bucket]), bucket


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
