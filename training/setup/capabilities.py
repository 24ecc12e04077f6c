"""Features that are off by default: which section of the configuration switches on which module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.split_tensors import device_of, is_split

# Each feature imports its module where it is switched on: most trainings need none of them.
if TYPE_CHECKING:
    from layerline.training.distributed.ranks import Ranks
    from layerline.training.loop.step_engine import Lane


def enlist(models: Iterable[nn.Module], config: Config, *, custom: bool) -> Ranks | None:
    """Joins the other ranks where `distributed` or a wrapped model asks for it, before an optimizer is made."""
    models = list(models)
    options = config.distributed
    sharded = options.shard != "none"
    wrapped = any(isinstance(model, DistributedDataParallel) for model in models)
    split = any(is_split(model) for model in models)
    asked = options.backend or sharded or wrapped or split
    if not asked and not (dist.is_available() and dist.is_initialized()):
        return None
    from layerline.training.distributed import data_parallel, ranks, sharding

    if not asked and not ranks.joined():
        return None  # one process, as long as nothing asks for more
    if sharded:
        _check_shard(models, config, wrapped=wrapped, custom=custom)
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    group = ranks.join(options, device_of(trained[0]))
    if group is None:
        return None
    _check_group(group, config, trained[0], split=split)
    # What the user split already is used as it is.
    if not split:
        for model in models:
            data_parallel.prepare(model, config, group)
            if sharded:
                sharding.shard(model, config, group)
    return group


def attach(lane: Lane, ranks: Ranks | None, roll_back: Callable[[], str | None]) -> None:
    """Gives a new lane what the other ranks and the policy for non-finite steps need."""
    config = lane.config
    if ranks is not None:
        from layerline.training.distributed.data_parallel import Replicas
        from layerline.training.distributed.sharding import Shards

        lane.peers = Shards(lane, ranks) if is_split(lane.model) else Replicas(lane, ranks, config)
        if ranks.rank > 0:
            lane.monitor.hush()
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        count = dist.get_world_size()
        text = f"there are {count} ranks, and each trains alone: set distributed.backend to train together"
        lane.monitor.warn("alone", text)
    if config.nonfinite.triage or config.nonfinite.policy == "rollback":
        from layerline.training.diagnostics.triage import Judge

        lane.judge = Judge(lane, roll_back)


def _check_group(group: Ranks, config: Config, param: nn.Parameter, *, split: bool) -> None:
    """Refuses a process group whose backend can't reach the parameters: gloo shards only CPU memory, NCCL sends
    only from GPUs."""
    shard = config.distributed.shard != "none"
    device = device_of(param).type
    sends_from_cpu = config.distributed.offload if shard else device != param.device.type
    _refuse([
        (group.device.type == "cpu" and shard and device != "cpu", "shard",
         f"the model is on {device}, where gloo splits nothing", "distributed.backend: nccl"),
        (not group.serves_cpu and device == "cpu" and not (shard or split), "backend",
         "the model is in CPU memory, and NCCL sends what is on a GPU", 'move it first, model.to("cuda"), or use gloo'),
        (not group.serves_cpu and sends_from_cpu, "offload", "NCCL alone sends nothing that lies in CPU memory",
         'init_process_group("cpu:gloo,cuda:nccl"), or leave that to ModelOptimizer'),
    ])  # fmt: skip


def _check_shard(models: list[nn.Module], config: Config, *, wrapped: bool, custom: bool) -> None:
    """Refuses what cannot be combined with sharding."""
    refusals = [
        (wrapped, "shard", "the model is in DistributedDataParallel", "pass the plain model"),
        (custom, "shard", "a custom optimizer holds the whole parameters",
         "call fully_shard yourself, then make the optimizer"),
        (len(models) > 1, "shard", "several models train in one graph", "shard: none"),
        (config.nonfinite.triage, "shard", "triage replays a step on one rank, and a sharded layer needs all of them",
         "nonfinite.triage: false"),
    ]  # fmt: skip
    for name, param in unwrap(models[0]).named_parameters():
        # float16 and bfloat16; their float32 masters are whole tensors.
        half = param.dtype.itemsize < 4 and param.is_floating_point()
        refusals.append((half, "shard", f"{name} is {param.dtype}: float32 masters are not sharded",
                         "keep parameters in float32 and use precision.amp"))  # fmt: skip
    _refuse(refusals)


def _refuse(refusals: Iterable[tuple[bool, str, str, str]]) -> None:
    """Raises a ConfigError for the first row (applies, field, what, hint) that applies."""
    for applies, field, what, hint in refusals:
        if applies:
            raise ConfigError(what, where=f"distributed.{field}", hint=hint)
