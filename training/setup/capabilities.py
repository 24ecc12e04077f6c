"""Features that are off by default: which section of the configuration switches on which module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerline.pipeline.errors import ConfigError
from layerline.training.config.aliases import FULLY_SHARD
from layerline.training.config.sections import Config
from layerline.training.distributed import ranks
from layerline.training.distributed.ranks import Ranks
from layerline.training.loop.step_engine import Lane
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.split_tensors import device_of, is_split

# Sharding and triage are imported where they are used: torch's part of sharding takes long to load.

# Update rules that cannot step a part of a matrix.
_WHOLE_MATRICES = {
    "adafactor": "adafactor's row and column statistics need whole matrices",
    "muon": "muon makes whole matrices orthogonal",
}


def enlist(models: Iterable[nn.Module], config: Config, *, custom: Iterable[Any]) -> Ranks | None:
    """Joins the other ranks where `distributed` or a wrapped model asks for it, before an optimizer is made.

    Args:
        custom: the user's own optimizers; None for the configured one.
    """
    custom = [optimizer for optimizer in custom if optimizer is not None]
    for optimizer in custom:
        # torch's counterpart of ZeRO 1. Its state_dict() needs a transfer to one rank, which saving does not do.
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            what = "ZeroRedundancyOptimizer holds a part of the state on each rank, and checkpoints could not hold it"
            raise ConfigError(what, where="optimizer", hint=f"{FULLY_SHARD}, and pass the optimizer that it wraps")
    models = list(models)
    wrapped = any(isinstance(model, DistributedDataParallel) for model in models)
    split = any(is_split(model) for model in models)
    # One process, as long as nothing asks for more.
    if not (config.distributed.backend or wrapped or split or ranks.joined()):
        return None
    from layerline.training.distributed import data_parallel

    if split:
        _check_split(models, config, custom=bool(custom))
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    group = ranks.join(config.distributed, device_of(trained[0]))
    if group is None:
        return None
    _check_group(group, trained[0], split=split)
    for model in models:
        data_parallel.prepare(model, config, group, split=split)
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


def _check_group(group: Ranks, param: nn.Parameter, *, split: bool) -> None:
    """Refuses a group whose backend cannot reach the parameters: NCCL sends from GPUs."""
    device = device_of(param).type
    what = ""
    if device == "cpu" and not (split or group.serves_cpu):
        what = "the model is in CPU memory, and NCCL sends what is on a GPU"
        hint = 'move it first, model.to("cuda"), or use gloo'
    elif device != param.device.type and not group.serves_cpu:
        what = "fully_shard keeps the parameters in CPU memory, and NCCL sends what is on a GPU"
        hint = 'init_process_group("cpu:gloo,cuda:nccl")'
    if what:
        raise ConfigError(what, where="distributed.backend", hint=hint)


def _check_split(models: list[nn.Module], config: Config, *, custom: bool) -> None:
    """Refuses what cannot be combined with a model that fully_shard has split."""
    if len(models) > 1:
        hint = "train them without fully_shard"
        raise ConfigError("several models train in one graph, and fully_shard split one", where="model", hint=hint)
    if config.nonfinite.triage:
        what = "triage replays a step on one rank, and a split layer needs all of them"
        raise ConfigError(what, where="nonfinite.triage", hint="leave it out for a model that fully_shard split")
    if not custom:
        for name, why in _WHOLE_MATRICES.items():
            if name in config.optimizer.rules:
                hint = "use another optimizer for a model that fully_shard split"
                raise ConfigError(why, where="optimizer.name", hint=hint)
    for name, param in unwrap(models[0]).named_parameters():
        # The float32 masters of float16 and bfloat16 parameters are whole tensors.
        if param.dtype.itemsize < 4 and param.is_floating_point():
            hint = "keep parameters in float32 and use precision.amp"
            what = f"{name} is {param.dtype} and split: float32 masters are not split"
            raise ConfigError(what, where="model", hint=hint)
