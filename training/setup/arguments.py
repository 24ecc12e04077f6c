"""What ModelOptimizer is made of: models by name, each with an optimizer of its own or the configured one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.model.canonical_names import check_apart
from layerline.training.optimizers import custom


def by_name(
    model: nn.Module | Mapping[str, nn.Module], optimizer: Any, config: Config
) -> tuple[dict[str, nn.Module], Mapping[str, Any]]:
    """Models and optimizers by name; a model that is the only one has the empty name."""
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    for name, module in models.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}", where=name or "model",
                              hint="several models go in by name: {'g': g, 'd': d}")  # fmt: skip
    optimizers = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(models, optimizer)
    if not models or set(optimizers) - set(models):
        raise ConfigError(f"models are {sorted(models)}, optimizers {sorted(optimizers)}", where="optimizer")
    check_apart(models)
    # A model without an optimizer of its own reads the section `optimizer`.
    if all(optimizers.get(name) is not None for name in models):
        for name in models:
            custom.check_unread(config.optimizer, optimizers[name])
    return models, optimizers
