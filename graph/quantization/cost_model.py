"""What an assignment of formats to layers costs, in bytes moved: a stated model, not a measurement.

- A value is written once in each format that a layer reads it in, and read by each of these layers. A second format is
  what Q/DQ or a cast adds: it is made from the widest one, which is read once more.
- A weight is read once, in the format of its layer.
- Multiplications count as the bytes that a device moves in their time: MACS_PER_BYTE, in the ratio of the rates at
  which tensor cores multiply (float32 as TF32).

docs/quantization.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import dim, first_output, name_of
from layerline.graph.fusion import affine_ops
from layerline.graph.quantization.targets import WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of

# Bytes of an element of a weight, with its part of the block's scale. What the layer reads is float.
WEIGHT_ONLY = {"int4": 0.5 + 4 / 32, "nvfp4": 0.5 + 1 / 16}
BYTES = {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
MACS_PER_BYTE = {"int8": 256.0, "fp8": 256.0, "fp16": 128.0, "bf16": 128.0, "fp32": 64.0}
# Stands for the inner dimension of a product of two activations where it is symbolic.
_INNER_DIM = 64


@dataclass(frozen=True)
class _Layer:
    """A node: the activations that it reads, elements of its weights, and its multiplications."""

    reads: tuple[str, ...]
    weights: int
    macs: float


class CostModel:
    """The cost of one model, for samples of one size.

    Args:
        elements: of each value; values that are missing cost nothing.
    """

    def __init__(self, model: ir.Model, elements: Mapping[str, int]) -> None:
        self._elements = elements
        self._layers = {first_output(node): _layer(node, elements) for node in model.graph}

    def cost(self, formats: Mapping[str, str], rest: str = "fp32") -> float:
        """Bytes of a run, with the format of each layer by its first output; the others have the format `rest`."""
        total = 0.0
        written: dict[str, set[str]] = {}
        for name, layer in self._layers.items():
            layer_format = formats.get(name, rest)
            # Formats of weights alone: the layer computes in the type of the rest.
            weight_bytes = WEIGHT_ONLY.get(layer_format)
            if weight_bytes is not None:
                layer_format = rest
            total += layer.weights * (weight_bytes or BYTES[layer_format]) + layer.macs / MACS_PER_BYTE[layer_format]
            for value in layer.reads:
                total += self._elements.get(value, 0) * BYTES[layer_format]
                written.setdefault(value, set()).add(layer_format)
        for value, value_formats in written.items():
            sizes = [BYTES[value_format] for value_format in value_formats]
            # With one format, Q is part of the layer that makes the value. Otherwise it reads what that layer wrote.
            conversions = (len(sizes) - 1) * max(sizes)
            total += self._elements.get(value, 0) * (sum(sizes) + conversions)
        return total


def _layer(node: ir.Node, elements: Mapping[str, int]) -> _Layer:
    reads: list[str] = []
    weights = 0
    for value in node.inputs:
        if value is None or not value.name:
            continue
        array = weight_of(value)
        if array is not None:
            weights += array.size
        elif value.name in elements:
            reads.append(value.name)
    return _Layer(tuple(reads), weights, _macs(node, elements))


def _macs(node: ir.Node, elements: Mapping[str, int]) -> float:
    """Multiplications of a layer with weights, or of a product of two activations; 0 for other nodes."""
    if node.op_type not in WEIGHTED or len(node.inputs) < 2 or node.domain:
        return 0.0
    outputs = elements.get(first_output(node), 0)
    weight = weight_of(node.inputs[1])
    if weight is None or weight.ndim < 2:
        inner = dim(node.inputs[0], -1)
        if not isinstance(inner, int):
            inner = _INNER_DIM
        return float(outputs * inner)
    if node.op_type == "ConvTranspose":
        # Each input element meets the weights of its channel.
        inputs = elements.get(name_of(node.inputs[0]) or "", 0)
        return float(inputs * weight.size / weight.shape[0])
    if affine_ops.outputs_come_first(node):
        return float(outputs * weight.size / max(weight.shape[0], 1))
    return float(outputs * weight.shape[-2])
