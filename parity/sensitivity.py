"""What each quantised layer costs in accuracy: its own error, and how much of the outputs' error comes from it.

Both come from one graph that holds the float and the quantised model. An error that a node receives is taken to leave
it enlarged by one factor for all of its inputs: what the node's output has beyond the node's own error, over what its
inputs have, relative to their size where the node multiplies them. From the outputs backwards these factors give the
share of every layer. It is an estimate that ranks layers; what is decided by it is measured afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.compare.compare_models import distances
from layerline.compare.tensor_distance import Distance
from layerline.pipeline.report import decibels

_PRODUCTS = ("Mul", "Div", "MatMul")
LEAST_PASSED_ON = 0.1
"""Part of a node's error that counts as received, where its own error and the received one cancel."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Of one layer.

    Attributes:
        own_db: SQNR of its output where its inputs are exact.
        output_db: SQNR of the outputs, if all error came from this layer: an estimate.
        share: noise power that it adds to the outputs, relative to their signal.
    """

    own_db: float
    output_db: float
    share: float


@dataclass(frozen=True)
class Sensitivity:
    """The effect of every layer by its first output, and the elements of every value over all feeds."""

    effects: Mapping[str, Effect]
    elements: Mapping[str, int]


def measure(reference: Light, quantized: Light, feeds: Sequence[Feed], layers: Sequence[str]) -> Sensitivity:
    """Compares the two models once, over all feeds.

    Args:
        layers: first outputs of the quantised layers.
    """
    values = distances(reference, quantized, feeds)
    elements = {name: whole.count for name, (whole, _) in values.items()}
    for feed in feeds:
        for name, array in feed.items():
            elements[name] = elements.get(name, 0) + array.size
    influence = _influence(reference, values)
    effects: dict[str, Effect] = {}
    for name in layers:
        if name not in values:
            continue
        own = values[name][1]
        share = influence.get(name, 0.0) * own.ee
        own_db = decibels(own.aa, own.ee)
        effects[name] = Effect(own_db=own_db, output_db=decibels(1.0, share), share=share)
    return Sensitivity(effects, elements)


def _influence(reference: Light, values: Mapping[str, tuple[Distance, Distance]]) -> dict[str, float]:
    """By value: the noise power that a unit of its own adds to the outputs, relative to their signal."""
    graph = reference.model.graph
    influence: dict[str, float] = {}
    for output in graph.output:
        if output.name in values and values[output.name][0].aa > 0:
            influence[output.name] = influence.get(output.name, 0.0) + 1 / values[output.name][0].aa
    for node in reversed(graph.node):
        inputs = [name for name in dict.fromkeys(node.input) if name in values]
        # A product adds relative errors; elsewhere errors add as they are.
        sizes = {name: values[name][0].aa if node.op_type in _PRODUCTS else 1.0 for name in inputs}
        received = sum(values[name][0].ee / (sizes[name] or 1.0) for name in inputs)
        if not received or not math.isfinite(received):
            continue
        for output in node.output:
            if output not in influence or output not in values:
                continue
            whole, own = values[output]
            passed_on = max(whole.ee - own.ee, LEAST_PASSED_ON * whole.ee)
            for name in inputs:
                gain = passed_on / received / (sizes[name] or 1.0)
                influence[name] = influence.get(name, 0.0) + influence[output] * gain
    return influence
