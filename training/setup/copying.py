"""Copies of the models and optimizers of a ModelOptimizer, for copy.deepcopy."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from layerline.pipeline.errors import ConfigError
from layerline.training.model.canonical_names import check_copy
from layerline.training.optimizers import custom
from layerline.training.state.checkpoint import Training


def parts(mo: Training, memo: dict[int, Any]) -> tuple[dict[str, nn.Module], dict[str, Any], list[nn.Parameter]]:
    """Copies of models and custom optimizers by name, and the copied parameters that were frozen after ModelOptimizer
    was made. Those require a gradient here: the copy trains them too, from the same state, once they are unfrozen."""
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
