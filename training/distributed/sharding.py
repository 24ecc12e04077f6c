"""Training of a model that the user has split over the ranks by torch's `fully_shard`. Whatever leaves the process
(checkpoint, export) is put together again and doesn't show how many ranks there were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from layerline.pipeline.errors import ConfigError
from layerline.training.distributed.parallel_strategy import Peers
from layerline.training.model.split_tensors import like, local

if TYPE_CHECKING:
    from layerline.training.optimizers.param_groups import Member


class Shards(Peers):
    """A part of the model on each rank. Every micro-batch reduces its gradients, also within a window: only then are
    they never held whole."""

    reduces_at_end: ClassVar[bool] = False  # passes gather weights and reduce gradients on their way

    def before_step(self) -> None:
        """The backward pass has reduced the gradients; buffers are settled."""
        self.ready()
        with self.guarded("reducing gradients"):
            self._settle_buffers()

    def admit(self, fresh: Sequence[Member]) -> None:
        """Nothing joins: units are split once, and what was frozen then takes no gradient."""
        if fresh:  # join() without new parameters is no fault
            hint = "change the model, and unfreeze what shall be trained, before fully_shard splits it"
            raise ConfigError("a parameter cannot join a model that is split already", where=fresh[0].name, hint=hint)

    def norms(self, grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
        """From the norms of the parts, in one collective."""
        parts = torch._foreach_norm([local(g) for g in grads], dtype=dtype)
        squares = torch.stack(list(parts)).to(self.ranks.device, torch.float64).square()
        with self.guarded("reducing gradients"):
            dist.all_reduce(squares)
        return list(squares.sqrt().unbind())

    def greatest(self, value: float) -> float:
        """The greatest over all ranks; NaN where one has it."""
        with self.guarded("exchanging notes"):
            values = [row[0] for row in self.ranks.floats(value)]
        if any(map(math.isnan, values)):
            return math.nan
        return max(values)

    def split(self, tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
        """Whatever has a parameter's name and shape is split as the parameter is."""
        params, out = self.lane.named.params, dict(tensors)
        for key, tensor in tensors.items():
            param = params.get(_owner(key.removeprefix(prefix)))
            if param is not None and param.shape == tensor.shape:
                out[key] = like(param, tensor)
        return out

    def mean_by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing: every backward pass has reduced them."""
        return tensors

    def release(self) -> None:
        """What units hold of their weights in whole form is dropped."""
        # Weights that fully_shard offloads may still be on their way to the GPU, for a forward pass that is queued.
        if self.lane.device.type == "cuda" and any(param.device.type == "cpu" for param in self.lane.params):
            torch.cuda.synchronize()
        for module in self.lane.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _owner(key: str) -> str:
    """The parameter a tensor of a checkpoint belongs to; "" for none."""
    for kind in ("online/", "ema/", "masters/", "window/grads/"):
        if key.startswith(kind):
            return key.removeprefix(kind)
    if key.startswith("optimizer/state/"):
        return key.removeprefix("optimizer/state/").rpartition("/")[0]
    return ""
