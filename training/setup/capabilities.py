"""What is off by default: which section of the configuration brings in which module, before and after a lane."""

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

if TYPE_CHECKING:
    from layerline.training.distributed.parallel_strategy import Peers
    from layerline.training.distributed.ranks import Ranks
    from layerline.training.loop.step_engine import Lane
    from layerline.training.model.recompute import Checkpointed


def checkpoint_layers(models: Iterable[nn.Module], config: Config) -> list[Checkpointed]:
    """Recomputes activations where `memory.checkpointing` asks for it."""
    if not config.memory.checkpointing:
        return []
    from layerline.training.model.recompute import Checkpointed

    return [Checkpointed(model, config.memory.checkpoint_interval) for model in models]


def enlist(models: Iterable[nn.Module], config: Config, *, custom: bool) -> Ranks | None:
    """Joins the other ranks where `distributed` or a wrapped model asks for it, before any optimizer sees a parameter.

    Raises:
        StageError: a rank is missing, or has another model or configuration.
        ConfigError: a combination that cannot work, or nothing to train.
    """
    models, options = list(models), config.distributed
    wrapped = any(isinstance(m, DistributedDataParallel) for m in models)
    split = any(is_split(m) for m in models)
    if not (options.backend or options.shard != "none" or wrapped or split or _joined()):
        return None
    if options.shard != "none":
        _check_shard(models, config, wrapped=wrapped, custom=custom)
    from layerline.training.distributed import data_parallel, ranks, sharding

    first = next((p for m in models for p in m.parameters() if p.requires_grad), None)
    if first is None:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    group = ranks.join(options, device_of(first))
    if group is not None:
        _check_group(group, config, first, split=split)
    if group is None or split:
        return group
    for model in models:
        data_parallel.prepare(model, config, group)
        if options.shard != "none":
            sharding.shard(model, config, group)
    return group


def attach(lane: Lane, ranks: Ranks | None, roll_back: Callable[[], str | None]) -> None:
    """Gives a new lane its peers and its judge."""
    config = lane.config
    if ranks is not None:
        lane.peers = _peers(lane, ranks)
        if ranks.rank > 0:
            lane.monitor.hush()
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        alone = (
            f"there are {dist.get_world_size()} ranks, and each trains alone: set distributed.backend to train together"
        )
        lane.monitor.warn("alone", alone)
    if config.nonfinite.triage or config.nonfinite.policy == "rollback":
        from layerline.training.diagnostics.triage import Judge

        lane.judge = Judge(lane, roll_back)


def _joined() -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from layerline.training.distributed import ranks

    return ranks.joined()


def _peers(lane: Lane, ranks: Ranks) -> Peers:
    from layerline.training.distributed.data_parallel import Replicas
    from layerline.training.distributed.sharding import Shards

    return Shards(lane, ranks) if is_split(lane.model) else Replicas(lane, ranks, lane.config)


def _check_group(group: Ranks, config: Config, param: nn.Parameter, *, split: bool) -> None:
    """Refuses what cannot travel in the ranks' group."""
    shard, place = config.distributed.shard != "none", device_of(param).type
    if group.device.type == "cpu" and shard and place != "cpu":
        raise ConfigError(f"the model is on {place}, where gloo splits nothing", where="distributed.shard",
                          hint="distributed.backend: nccl")  # fmt: skip
    if group.serves_cpu:
        return
    if place == "cpu" and not (shard or split):
        raise ConfigError("the model is in CPU memory, and NCCL sends what is on a GPU", where="distributed.backend",
                          hint='move it first, model.to("cuda"), or use gloo')  # fmt: skip
    if config.distributed.offload if shard else place != param.device.type:
        raise ConfigError("NCCL alone sends nothing that lies in CPU memory", where="distributed.offload",
                          hint='init_process_group("cpu:gloo,cuda:nccl"), or leave that to ModelOptimizer')  # fmt: skip


def _check_shard(models: list[nn.Module], config: Config, *, wrapped: bool, custom: bool) -> None:
    where = "distributed.shard"
    if wrapped:
        raise ConfigError("the model is in DistributedDataParallel", where=where, hint="pass the plain model")
    if custom:
        raise ConfigError(
            "a custom optimizer holds the whole parameters",
            where=where,
            hint="call fully_shard yourself, then make the optimizer",
        )
    if len(models) > 1:
        raise ConfigError("several models train in one graph", where=where, hint="shard: none")
    if config.nonfinite.triage:
        raise ConfigError(
            "triage replays a step on one rank, and a sharded layer needs all of them",
            where=where,
            hint="nonfinite.triage: false",
        )
    for name, param in unwrap(models[0]).named_parameters():
        if param.dtype.itemsize < 4 and param.is_floating_point():
            raise ConfigError(
                f"{name} is {param.dtype}: float32 masters are not sharded",
                where=where,
                hint="keep parameters in float32 and use precision.amp",
            )
