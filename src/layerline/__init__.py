"""Layerline: from a trained PyTorch model to a TensorRT engine, every artifact hashed, every layer compared.

docs/api.md shows each name in use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerline.api import FusedModel, QuantizedModel, compare_models, fuse, load_probes, open_session, quantize
    from layerline.pipeline.errors import ConfigError, PipeError, StageError, TaskError, Unavailable
    from layerline.pipeline.report import Gate, LayerDiff, Report
    from layerline.pipeline.stage import Stage, Work
    from layerline.training.setup.model_optimizer import ModelOptimizer

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "FusedModel",
    "Gate",
    "LayerDiff",
    "ModelOptimizer",
    "PipeError",
    "QuantizedModel",
    "Report",
    "Stage",
    "StageError",
    "TaskError",
    "Unavailable",
    "Work",
    "__version__",
    "compare_models",
    "fuse",
    "load_probes",
    "open_session",
    "quantize",
]

# Resolved on first use (PEP 562): `pipe --help` and a fully cached `pipe run all` must not import torch or onnx.
EXPORTS = {
    "layerline.api": (
        "FusedModel",
        "QuantizedModel",
        "compare_models",
        "fuse",
        "load_probes",
        "open_session",
        "quantize",
    ),
    "layerline.pipeline.errors": ("ConfigError", "PipeError", "StageError", "TaskError", "Unavailable"),
    "layerline.pipeline.report": ("Gate", "LayerDiff", "Report"),
    "layerline.pipeline.stage": ("Stage", "Work"),
    "layerline.training.setup.model_optimizer": ("ModelOptimizer",),
}


def __getattr__(name: str) -> Any:
    for module, names in EXPORTS.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'layerline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
