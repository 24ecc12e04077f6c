"""Scales the inputs of layers whose weights are quantised in blocks, so that the inputs that matter keep more.

After J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (arXiv
2306.00978): an input channel of mean magnitude m is divided by mᵃ, and its weights are multiplied by it. The exponent a
is the one of a grid with the least error at the outputs of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.calib.plan import QuantPlan
from layerline.calib.scales import in_blocks
from layerline.graph.analysis.ir_queries import copied, first_output
from layerline.graph.fusion.channel_groups import Group
from layerline.graph.quantization import equalization, rounding
from layerline.graph.quantization.equalization import MOST, Equalized
from layerline.graph.quantization.rounding import QuantizedLayer

Numbers = npt.NDArray[np.float32]
# The paper's grid, beside 0, which changes nothing.
EXPONENTS = np.linspace(0.05, 1.0, 20)
# Rows (tokens) of what a layer reads on which the exponents are compared, from all samples together.
ROWS = 512
ROWS_OF_A_FEED = 64
# Evenly spread outputs of a layer that are compared: each exponent rounds their weights once.
OUTPUTS = 512


def scale_inputs(model: ir.Model, plan: QuantPlan, feeds: Callable[[], Iterable[Feed]]) -> Equalized:
    """Scales the channels that layers with weights in blocks read, where their outputs lose less by it.

    Args:
        feeds: gives samples by input name.
    """
    work = copied(model)
    layers = {first_output(layer.node): layer for layer in rounding.layers_of(model, plan, blocks=True)}
    rows = _rows(model, list(layers.values()), feeds())
    groups = equalization.groups_of(work, norms=None)
    return equalization.with_factors(model, work, groups, lambda group: _best(group, layers, rows))


def _rows(model: ir.Model, layers: Sequence[QuantizedLayer], feeds: Iterable[Feed]) -> dict[str, Numbers]:
    """By the value that layers read: rows of it, (rows, inputs)."""
    # Layers that read one value get the same rows.
    first_readers = {layer.source: layer for layer in reversed(layers)}
    parts: dict[str, list[Numbers]] = {source: [] for source in first_readers}
    for layer, value in rounding.values_read(model, list(first_readers.values()), feeds):
        flat = value.reshape(-1, value.shape[-1])
        # One NaN would spoil every mean.
        flat = flat[np.isfinite(flat).all(axis=1)]
        missing = ROWS - sum(len(part) for part in parts[layer.source])
        count = min(missing, ROWS_OF_A_FEED, len(flat))
        if count > 0:
            parts[layer.source].append(flat[np.linspace(0, len(flat) - 1, count).astype(np.int64)])
    return {source: np.concatenate(arrays) for source, arrays in parts.items() if arrays}


def _best(
    group: Group, layers: Mapping[str, QuantizedLayer], rows: Mapping[str, Numbers]
) -> npt.NDArray[np.float64] | None:
    """The factors with the least error over all layers that read the group; None where 1 is as good."""
    readers: list[tuple[QuantizedLayer, Numbers, int]] = []
    magnitudes: list[npt.NDArray[np.float64]] = []
    for node in group.consumers:
        layer = layers.get(first_output(node))
        value = node.inputs[0]
        if layer is None or value is None or layer.source not in rows:
            continue
        inputs = rows[layer.source]
        spread = group.places[value][1]
        readers.append((layer, inputs, spread))
        by_channel = np.abs(inputs).mean(axis=0, dtype=np.float64).reshape(group.channels, spread).mean(axis=1)
        magnitudes.append(by_channel / max(float(by_channel.mean()), 1e-30))
    # No reader has a weight in blocks, or samples reached none of them.
    if not readers or not np.isfinite(magnitudes).all():
        return None
    magnitude = np.maximum(np.mean(magnitudes, axis=0), 1e-30)
    ones = np.ones(group.channels)
    best, least = None, sum(_error(layer, inputs, np.repeat(ones, spread)) for layer, inputs, spread in readers)
    for exponent in EXPONENTS:
        logarithms = exponent * np.log2(magnitude)
        logarithms -= (logarithms.max() + logarithms.min()) / 2
        factors = np.exp2(np.clip(logarithms, -MOST, MOST))
        error = sum(_error(layer, inputs, np.repeat(factors, spread)) for layer, inputs, spread in readers)
        if error < least:
            best, least = factors, error
    return best


def _error(layer: QuantizedLayer, inputs: Numbers, factors: npt.NDArray[np.float64]) -> float:
    """The power of a layer's error over that of its output, once its inputs are divided by these factors."""
    outputs = layer.rows[0]
    weight = outputs[:: max(1, len(outputs) // OUTPUTS)].astype(np.float32)
    by_input = factors.astype(np.float32)
    stored = in_blocks((weight * by_input).astype(layer.array.dtype), 1, layer.weight.block, layer.weight.dtype)
    difference = stored.dequantized() / by_input - weight
    signal = float(np.square(inputs @ weight.T, dtype=np.float64).sum())
    if signal <= 0:
        return 0.0
    return float(np.square(inputs @ difference.T, dtype=np.float64).sum()) / signal
