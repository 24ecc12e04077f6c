"""Data parallel training: each rank holds the whole model; the gradient of a step is that of all ranks' samples."""

from __future__ import annotations

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


def prepare(model: nn.Module, config: Config, ranks: Ranks, *, split: bool = False) -> None:
    """Checks that every rank has the same model, and copies the weights of rank 0; before an optimizer is made. The
    weights of a model that is split already are used as they are."""
    names = named(model)
    ranks.compare(lines(names, config))
    if split:
        return
    with ranks.phases.guarded("sharing weights", 0), torch.no_grad():
        ranks.spread([t.detach() for t in names.tensors.values()])


class Replicas(Peers):
    """A whole model on each rank.

    At the end of a window the ranks say which parameters have a gradient, then reduce the gradients in buckets. So any
    rank may leave any layer out: zeros are sent for it. A parameter that no rank used has no gradient, as in one
    process. Buckets hold the same parameters in the same order on every rank, and in a resumed run.
    """

    def __init__(self, lane: LaneState, ranks: Ranks, config: Config) -> None:
        super().__init__(lane, ranks)
        self._size = config.distributed.bucket_mb * 2**20
        self._type = HALF_TYPES.get(config.distributed.compress)
        if isinstance(lane.model, DistributedDataParallel):
            _silence(lane.model)

    def before_step(self) -> None:
        """Replaces the window's gradients by their mean over the ranks."""
        self.ready()
        with self.guarded("reducing gradients"):
            self._reduce_gradients()
            self._settle_buffers()

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        lane, device = self.lane, self.ranks.device
        used = torch.tensor([s.grad is not None for s in lane.stepped], dtype=torch.uint8, device=device)
        # The maximum over the ranks is a logical or.
        dist.all_reduce(used, dist.ReduceOp.MAX)
        grads: list[Tensor] = []
        for stepped, used_somewhere in zip(lane.stepped, used.tolist(), strict=True):
            if used_somewhere:
                if stepped.grad is None:
                    stepped.grad = torch.zeros_like(stepped)
                grads.append(stepped.grad)
        # All are sent before the first is waited for.
        reductions = []
        for bucket in buckets(grads, self._size):
            flat = flattened(bucket, device).div_(self.ranks.size)
            message = flat.to(self._type or flat.dtype)  # after the division: a sum of halves could overflow
            reductions.append((bucket, message, dist.all_reduce(message, async_op=True)))
        for bucket, message, work in reductions:
            work.wait()
            unflatten(message, bucket)


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
    ddp.require_backward_grad_sync = False  # what its no_sync() sets
