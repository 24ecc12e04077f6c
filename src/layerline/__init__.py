"""Layerline: from a trained PyTorch model to a TensorRT engine, every artifact hashed, every layer compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerline.training import ModelOptimizer

__version__ = "0.1.0"
__all__ = ["ModelOptimizer", "__version__"]


def __getattr__(name: str) -> Any:
    # Resolved on use: `pipe --help` and a fully cached `pipe run all` must not pay for importing torch.
    if name == "ModelOptimizer":
        from layerline.training import ModelOptimizer

        return ModelOptimizer
    raise AttributeError(f"module 'layerline' has no attribute {name!r}")
