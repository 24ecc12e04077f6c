"""Models by name, each with an optimizer of its own or the configured one, and copies of them for copy.deepcopy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.model.canonical_names import check_apart, check_copy
from layerline.training.optimizers import custom
from layerline.training.state.checkpoint import Training


def by_name(
    model: nn.Module | Mapping[str, nn.Module], optimizer: Any, config: Config
) -> tuple[dict[str, nn.Module], Mapping[str, Any]]:
    """Models and optimizers by name; a model that is the only one has the empty name."""
    if not isinstance(model, Mapping):
        model = {"": model}
    models = dict(model)
    for name, module in models.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}", where=name or "model",
                              hint="several models go in by name: {'g': g, 'd': d}")  # fmt: skip
    if not isinstance(optimizer, Mapping):
        optimizer = dict.fromkeys(models, optimizer)
    if not models or set(optimizer) - set(models):
        raise ConfigError(f"models are {sorted(models)}, optimizers {sorted(optimizer)}", where="optimizer")
    check_apart(models)  # a tensor that two optimizers step would move twice
    # A model without an optimizer of its own reads the section `optimizer`.
    if all(optimizer.get(name) is not None for name in models):
        for name in models:
            custom.check_unread(config.optimizer, optimizer[name])
    return models, optimizer


def copies(mo: Training, memo: dict[int, Any]) -> tuple[dict[str, nn.Module], dict[str, Any], list[nn.Parameter]]:
    """Copies of models and custom optimizers by name, and the copied parameters that were frozen after ModelOptimizer
    was made. They require a gradient here, so that the copy knows their state once they are unfrozen."""
    if mo.ranks is not None:
        raise ConfigError("ranks train together, and a copy would be one more group", where="copy",
                          hint="save_ckpt, and load_ckpt in another run")  # fmt: skip
    models: dict[str, nn.Module] = copy.deepcopy({name: lane.model for name, lane in mo.lanes.items()}, memo)
    optimizers: dict[str, Any] = {}
    frozen: list[nn.Parameter] = []
    for name, lane in mo.lanes.items():
        check_copy(lane.named, models[name])
        if lane.custom:
            optimizers[name] = custom.copied(lane.optimizer, memo)
            lane.rate.rewind(optimizers[name])
        frozen += [memo[id(param)] for param in lane.params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    return models, optimizers, frozen
