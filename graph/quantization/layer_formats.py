"""The format of single layers, as `quantize.layers` asks for it by pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import first_output
from layerline.graph.quantization.naming import matching
from layerline.graph.quantization.targets import FORMATS
from layerline.pipeline.config.quantize_fields import HALF_TYPES


@dataclass(frozen=True)
class LayerFormats:
    """The layers whose format is settled, by the first output of their node."""

    kept: Mapping[str, str] = field(default_factory=dict)  # those that are not quantised: the reason
    half: Collection[str] = frozenset()  # those that compute in half precision
    # the format of those that are quantised whatever else says that they stay float
    quantized: Mapping[str, str] = field(default_factory=dict)
    half_type: str = ""  # "fp16", "bf16", or "" where no layer asks for half precision

    @property
    def single(self) -> set[str]:
        """Layers that stay float32."""
        return set(self.kept) - set(self.half)


def refuse_unknown(model: ir.Model, skip: Sequence[str], layers: Mapping[str, str]) -> None:
    """Refuses patterns that match nothing in a model, before anything is calibrated."""
    matching(model, skip, field="quantize.skip")
    matching(model, [*layers], field="quantize.layers", reads=False)


def resolve(model: ir.Model, layers: Mapping[str, str]) -> LayerFormats:
    """Looks the patterns up in a model. Where several match a layer, the last decides.

    Args:
        layers: one of FORMATS, "fp16", "bf16", "fp32" or "skip" (stays float32) by pattern: the name of a value that
            the layer computes, of its weight, of its node, or of its module or one above it; or a glob.

    Raises:
        ConfigError: a pattern matches nothing in this model.
    """
    decided: dict[str, tuple[str, str]] = {}
    # Patterns in their order: what comes later overwrites.
    for pattern, wanted in layers.items():
        for node in matching(model, [pattern], field="quantize.layers", reads=False):
            decided[first_output(node)] = (wanted, pattern)
    kept: dict[str, str] = {}
    half = set[str]()
    quantized: dict[str, str] = {}
    half_type = ""
    for name, (wanted, pattern) in decided.items():
        if wanted in FORMATS:
            quantized[name] = wanted
            continue
        kept[name] = f"layers: {pattern} is {wanted}"
        if wanted in HALF_TYPES:
            half.add(name)
            half_type = wanted
    return LayerFormats(kept, half, quantized, half_type)
