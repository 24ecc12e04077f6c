"""Data parallel training: every rank holds the whole model, and the gradient of a step is that of all ranks' samples.

DistributedDataParallel reduces while the backward pass still runs. Where it can't serve (several models in one graph,
float32 masters of accumulated half gradients, curvature estimates, parameters without a gradient, a short last window,
a model that was called without its wrapper), gradients are reduced here after the backward pass. The sums are the same;
with three ranks or more their order is not: DDP sorts its buckets anew after its first step, so that a resumed run adds
in another order than the one it goes on from. Without overlap the order is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config import Config
from layerline.training.names import named
from layerline.training.peers import Peers, flattened, unflatten
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
        for flat, parts in flattened(
            [t.detach() for t in known.tensors.values()], config.distributed.bucket_mb * 2**20
        ):
            dist.broadcast(flat, 0)
            unflatten(flat, parts)


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
        self._by_ddp = False
        self._every_step = config.accumulate.steps == 1
        # DDP reduces what the last backward pass finds in .grad: masters have taken the earlier part away by then.
        self._by_hand = lane.shared or lane.sophia is not None or not self._config.overlap \
            or (lane.masters is not None and not self._every_step)  # fmt: skip
        self._ddp = lane.model if isinstance(lane.model, DistributedDataParallel) else None
        # Whether every parameter gets a gradient, without which DDP would wait for ever; the first window tells.
        self._complete = self._ddp is not None
        if self._ddp is None and not self._by_hand:
            self._ddp = self.model = _Guarded(lane.model, self)
        if self._ddp is not None:
            self._watch(self._ddp)
        self.arm(sync=self._every_step)

    def arm(self, *, sync: bool) -> None:
        """Whether the coming forward pass prepares DDP to reduce in its backward pass; that is when DDP decides it."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = sync and not self._by_hand and self._complete

    def reduce(self, lane: Lane, *, synced: bool) -> None:
        """Brings the window's gradients to their mean over the ranks."""
        done, self._by_ddp = synced and self._by_ddp, False
        if not done:
            self.ready()
        with self.guarded("reducing gradients"):
            if not done:
                self._reduce(lane)
            self._settle_buffers()

    def changed(self) -> None:
        """Nothing: each rank steps its own weights, and nobody keeps a copy."""

    def norms(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients are whole on each rank, and the same."""
        norms: Sequence[Tensor] = torch._foreach_norm(list(grads))
        return norms

    @torch.no_grad()
    def _reduce(self, lane: Lane) -> None:
        # A parameter may have been used on some ranks only: the others add nothing to it.
        used = torch.tensor([p.grad is not None for p in lane.stepped], dtype=torch.uint8, device=self.ranks.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        if not self._complete:
            self._note_unused([n for n, here in zip(lane.names, used.tolist(), strict=True) if not here])
        grads = []
        for param, here in zip(lane.stepped, used.tolist(), strict=True):
            if here:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                grads.append(param.grad)
        if lane.sophia is not None:
            grads += lane.sophia.curvature.values()
        half, size = HALF.get(self._config.compress), self._config.bucket_mb * 2**20
        flights = []
        for flat, parts in flattened(grads, size):
            sent = flat.div_(self.ranks.size).to(half or flat.dtype)
            flights.append((dist.all_reduce(sent, async_op=True), sent, parts))
        for flight, sent, parts in flights:
            assert flight is not None
            flight.wait()
            unflatten(sent, parts)

    def _note_unused(self, names: list[str]) -> None:
        self._complete = not names
        if self._complete:
            self.arm(sync=self._every_step)
        elif self._ddp is not None:
            more = f" and {len(names) - 1} more get" if len(names) > 1 else " gets"
            text = f"{names[0]}{more} no gradient: gradients are reduced after the backward pass, not during it"
            self.lane.monitor.warn("unused", text)

    def _watch(self, ddp: DistributedDataParallel) -> None:
        def entered(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._by_ddp = ddp.require_backward_grad_sync

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

    def __getattr__(self, name: str) -> Any:
        # A loss may want a part of the model: what the wrapper has not, its model has.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._peers[0].guarded("forward"):
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
