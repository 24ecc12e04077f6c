"""Features that are off by default: which section of the configuration switches on which module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.distributed import ranks
from layerline.training.distributed.ranks import Ranks
from layerline.training.loop.step_engine import Lane
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.split_tensors import device_of, is_split

# Sharding and triage are imported where they are used: torch's part of sharding takes long to load.


def enlist(models: Iterable[nn.Module], config: Config, *, custom: bool) -> Ranks | None:
    """Joins the other ranks where `distributed` or a wrapped model asks for it, before an optimizer is made."""
    models = list(models)
    sharded = config.distributed.shard != "none"
    wrapped = any(isinstance(model, DistributedDataParallel) for model in models)
    split = any(is_split(model) for model in models)
    # One process, as long as nothing asks for more.
    if not (config.distributed.backend or sharded or wrapped or split or ranks.joined()):
        return None
    from layerline.training.distributed import data_parallel, sharding

    if sharded:
        _check_shard(models, config, wrapped=wrapped, custom=custom)
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    group = ranks.join(config.distributed, device_of(trained[0]))
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


def attach(lane: Lane, group: Ranks | None, roll_back: Callable[[], str | None]) -> None:
    """Gives a new lane what the other ranks and the policy for non-finite steps need."""
    config = lane.config
    if config.distributed.overlap:
        text = "distributed.overlap changes nothing: gradients are reduced after the backward pass"
        lane.monitor.warn("overlap", text)
    if group is not None:
        from layerline.training.distributed.data_parallel import Replicas
        from layerline.training.distributed.sharding import Shards

        lane.peers = Shards(lane, group) if is_split(lane.model) else Replicas(lane, group, config)
        if group.rank > 0:
            lane.monitor.hush()
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        count = dist.get_world_size()
        text = f"there are {count} ranks, and each trains alone: set distributed.backend to train together"
        lane.monitor.warn("alone", text)
    if config.nonfinite.triage or config.nonfinite.policy == "rollback":
        from layerline.training.diagnostics.triage import Judge

        lane.judge = Judge(lane, roll_back)


def _check_group(group: Ranks, config: Config, param: nn.Parameter, *, split: bool) -> None:
    """Refuses a group whose backend cannot reach the parameters: gloo shards CPU memory only, NCCL sends from GPUs."""
    sharded = config.distributed.shard != "none"
    device = device_of(param).type
    if sharded and device != "cpu" and group.device.type == "cpu":
        _refuse("shard", f"the model is on {device}, where gloo splits nothing", "distributed.backend: nccl")
    if device == "cpu" and not (sharded or split or group.serves_cpu):
        what = "the model is in CPU memory, and NCCL sends what is on a GPU"
        _refuse("backend", what, 'move it first, model.to("cuda"), or use gloo')
    if device != param.device.type and not group.serves_cpu:
        what = "fully_shard keeps the parameters in CPU memory, and NCCL sends what is on a GPU"
        _refuse("backend", what, 'init_process_group("cpu:gloo,cuda:nccl")')


def _check_shard(models: list[nn.Module], config: Config, *, wrapped: bool, custom: bool) -> None:
    """Refuses what cannot be combined with sharding."""
    if wrapped:
        _refuse("shard", "the model is in DistributedDataParallel", "pass the plain model")
    if custom:
        hint = "call fully_shard yourself, then make the optimizer"
        _refuse("shard", "a custom optimizer holds the whole parameters", hint)
    if len(models) > 1:
        _refuse("shard", "several models train in one graph", "shard: none")
    if config.nonfinite.triage:
        what = "triage replays a step on one rank, and a sharded layer needs all of them"
        _refuse("shard", what, "nonfinite.triage: false")
    for name, param in unwrap(models[0]).named_parameters():
        # The float32 masters of float16 and bfloat16 parameters are whole tensors.
        if param.dtype.itemsize < 4 and param.is_floating_point():
            hint = "keep parameters in float32 and use precision.amp"
            _refuse("shard", f"{name} is {param.dtype}: float32 masters are not sharded", hint)


def _refuse(field: str, what: str, hint: str) -> None:
    raise ConfigError(what, where=f"distributed.{field}", hint=hint)
