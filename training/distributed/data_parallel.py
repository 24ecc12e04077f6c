"""Data parallel training: every rank holds the whole model, and the gradient of a step is that of all ranks' samples.

DistributedDataParallel reduces while the backward pass still runs. Where it can't serve (several models in one graph,
float32 masters of accumulated half gradients, curvature estimates, a short last window, a second backward pass, a
parameter that joined later, a model that was called without its wrapper), gradients are reduced here after the backward
pass. The sums are the same; with three ranks or more their order is not: DDP sorts its buckets anew after its first
step, so that a resumed run adds in another order than the one it goes on from. Without overlap the order is always the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.distributed.parallel_strategy import Peers
from layerline.training.distributed.ranks import Ranks, flattened, lines, unflatten
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import named
from layerline.training.model.hooks import Attached
from layerline.training.model.precision import HALF_TYPES

HOOKS = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def prepare(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Before an optimizer is made: every rank has the same model, and starts from the weights of rank 0."""
    names = named(model)
    ranks.compare(lines(names, config))
    with ranks.pulse.guarded("sharing weights", 0), torch.no_grad():
        ranks.spread([t.detach() for t in names.tensors.values()], config.distributed.bucket_mb * 2**20)


class Replicas(Peers):
    """A whole model on each rank.

    Any rank may leave any parameter out in any pass. DDP would wait for it for ever, on all ranks: after each backward
    pass that was to reduce, a rank sends zeros for what the pass did not reach here. After the window ranks tell each
    other, in one small message, who has a gradient for which parameter and whose gradients DDP has not seen whole. A
    parameter that no rank used has no gradient, as in one process.
    """

    def __init__(self, lane: LaneState, ranks: Ranks, config: Config) -> None:
        super().__init__(lane, ranks)
        self._config = config.distributed
        self._every_step = config.accumulate.steps == 1
        self._ddp = lane.model if isinstance(lane.model, DistributedDataParallel) else None
        # DDP reduces what the last backward pass finds in .grad: masters have taken the earlier part away by then.
        self._by_hand = lane.shared or lane.sophia is not None or not self._config.overlap \
            or (lane.masters is not None and not self._every_step) or self._searches()  # fmt: skip
        if self._ddp is None and not self._by_hand:
            self._ddp = self.model = _Guarded(lane.model, self)
        self._sent: list[Tensor] = []  # what DDP reduces
        # The gradients as they were before the backward pass that DDP is waiting for; None where it waits for none.
        self._before: list[_Mark] | None = None
        self._whole = False  # whether that pass has reached every parameter
        self._done = False  # whether DDP has reduced all that the window holds
        self._idle: list[Tensor] = []  # parameters whose gradient is but the zeros sent from here
        if self._ddp is not None and not self._by_hand:
            self._watch(self._ddp)
        self.arm(sync=self._every_step)

    def arm(self, *, sync: bool) -> None:
        """Whether the coming forward pass prepares DDP to reduce in its backward pass; that is when DDP decides it."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = sync and not self._by_hand

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around each backward pass: what DDP waits for and the pass did not reach is sent as zeros."""
        idle, before = self._idle, [_mark(p) for p in self._idle]
        with self.guarded("the backward pass"):
            yield
            self._done, self._idle = False, _untouched(idle, before)
            self._complete()

    def before_step(self) -> None:
        """Brings the window's gradients to their mean over the ranks."""
        lane = self.lane
        with self.guarded("reducing gradients"):
            if self._before is not None:  # a forward pass without a backward pass here: the others wait for it
                self._complete()
                if lane.masters is not None:
                    lane.masters.collect()
            if not self._done:
                self.ready()
            self._agree_and_reduce(lane)
            self._settle_buffers()
        self._done, self._idle = False, []

    def release(self) -> None:
        """Nothing: each rank steps its own weights, and nobody keeps a copy."""

    def norms(self, grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
        """The gradients are whole on each rank, and the same."""
        norms: Sequence[Tensor] = torch._foreach_norm(list(grads), dtype=dtype)
        return norms

    @torch.no_grad()
    def _agree_and_reduce(self, lane: LaneState) -> None:
        idle, sent = {id(p) for p in self._idle}, {id(p) for p in self._sent}
        pairs = list(zip(lane.params, lane.stepped, strict=True))
        here = [s.grad is not None and id(p) not in idle for p, s in pairs]
        notes = torch.tensor([*here, not self._done], dtype=torch.uint8, device=self.ranks.device)
        dist.all_reduce(notes, dist.ReduceOp.MAX)
        *used, by_hand = notes.tolist()
        grads = []
        for (param, stepped), somewhere in zip(pairs, used, strict=True):
            if not somewhere:
                stepped.grad = None
                continue
            stepped.grad = torch.zeros_like(stepped) if stepped.grad is None else stepped.grad
            # Reduced once more, what DDP has reduced stays as it is; what joined later DDP does not know.
            if by_hand or id(param) not in sent:
                grads.append(stepped.grad)
        if lane.sophia is not None:
            grads += lane.sophia.curvature.values()
        self._mean_of(grads)
        if sent and not all(used):
            unused = [name for name, somewhere in zip(lane.names, used, strict=True) if not somewhere]
            who = f"{unused[0]} and {len(unused) - 1} more get" if len(unused) > 1 else f"{unused[0]} gets"
            text = f"{who} no gradient: what is sent with it waits for the end of the backward pass"
            self.lane.monitor.warn("unused", text)

    def _mean_of(self, grads: Sequence[Tensor]) -> None:
        half, size = HALF_TYPES.get(self._config.compress), self._config.bucket_mb * 2**20
        flights = []
        for flat, parts in flattened(grads, size, self.ranks.device):
            sent = flat.div_(self.ranks.size).to(half or flat.dtype)
            flights.append((dist.all_reduce(sent, async_op=True), sent, parts))
        for flight, sent, parts in flights:
            assert flight is not None
            flight.wait()
            unflatten(sent, parts)

    def _complete(self) -> None:
        """Ends what DDP has begun: it gets zeros for every parameter that the backward pass has not reached."""
        before, self._before = self._before, None
        if before is None:
            return
        self._done = True
        if self._whole:
            return
        missing = _untouched(self._sent, before)
        idle_before = {id(p) for p in self._idle}
        self._idle = [p for p in missing if p.grad is None or id(p) in idle_before]
        frozen = [p for p in missing if not p.requires_grad]  # since the start; DDP waits for them all the same
        for param in frozen:
            param.requires_grad_(True)
        torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
        for param in frozen:
            param.requires_grad_(False)

    def _searches(self) -> bool:
        """Whether a DDP of the user's looks for unused parameters itself, which leaves nothing to be sent for them."""
        if self._ddp is None:
            return False
        if self._ddp.static_graph:
            raise ConfigError(
                "the model's DistributedDataParallel has static_graph, which allows no pass that is not reduced",
                where="model", hint="leave static_graph out, or pass the plain model",
            )  # fmt: skip
        if not self._ddp.find_unused_parameters:
            return False
        text = "with find_unused_parameters gradients are reduced after the backward pass, without it during it"
        self.lane.monitor.warn("find_unused_parameters", f"DistributedDataParallel: {text}")
        return True

    def _watch(self, ddp: DistributedDataParallel) -> None:
        def left(*_: Any) -> None:
            if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                self._before, self._whole = [_mark(p) for p in self._sent], False

        def reduces(_: Any, bucket: Any) -> Any:
            self.ready()  # the last bucket's time stays
            self._whole = bucket.is_last()
            return hook(None, bucket)  # type: ignore[arg-type]  # None is the default group

        # Torch compares them with its own classes, not with their names.
        reduces.__annotations__.clear()
        hook = HOOKS[self._config.compress]
        try:
            ddp.register_comm_hook(None, reduces)  # None is the default group
        except RuntimeError as error:
            raise ConfigError(
                "the model's DistributedDataParallel has a communication hook of its own",
                where="distributed.compress", hint="leave the hook to this field, or pass the plain model",
            ) from error  # fmt: skip
        ddp.register_forward_hook(Attached(left))
        self._sent = [p for b in ddp.reducer._get_zeros_like_grad_buckets() for p in b.parameters()]


# A gradient as it was: the tensor, and how often it had been written to. None is no gradient.
_Mark = tuple[Tensor, int] | None


def _mark(param: Tensor) -> _Mark:
    return None if param.grad is None else (param.grad, param.grad._version)


def _untouched(params: Sequence[Tensor], before: Sequence[_Mark]) -> list[Tensor]:
    """Those whose gradient was not written to since."""
    untouched = []
    for param, mark in zip(params, before, strict=True):
        if mark is None or param.grad is None:
            same = mark is None and param.grad is None
        else:
            same = mark[0] is param.grad and mark[1] == param.grad._version
        if same:
            untouched.append(param)
    return untouched


class _Guarded(DistributedDataParallel):
    """DDP whose own collectives around a forward pass are watched as well."""

    def __init__(self, model: nn.Module, peers: Replicas) -> None:
        # Without device_ids inputs stay where they are, as they do for the plain model.
        super().__init__(model, init_sync=False, bucket_cap_mb=peers.lane.config.distributed.bucket_mb)
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
