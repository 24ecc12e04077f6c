"""Training policies around a loop of your own: ModelOptimizer and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerline.training.setup.model_optimizer import ModelOptimizer

__all__ = ["ModelOptimizer"]


def __getattr__(name: str) -> Any:
    # Resolved on use: checking a configuration (`layerline.training.config`) must not pay for importing torch.
    if name == "ModelOptimizer":
        from layerline.training.setup.model_optimizer import ModelOptimizer

        return ModelOptimizer
    raise AttributeError(f"module 'layerline.training' has no attribute {name!r}")
