"""Carries out a quantisation plan: adds explicit QuantizeLinear and DequantizeLinear nodes, as TensorRT reads them.

Nothing is renamed, and only float weights without readers are removed. The tensor X stays the float value; X/quantized
and X/dequantized are added, and the plan's readers read X/dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import MODULE
from layerline.calib import assign
from layerline.calib.calibrators import Calibrator
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan, QuantValue
from layerline.calib.range_candidates import BOUND, bound_of, group_of
from layerline.calib.scales import Stored, in_blocks, numpy_dtype, quantize
from layerline.graph.analysis.ir_queries import (
    FreshNames,
    add_initializer,
    captures,
    copied,
    first_output,
    values_by_name,
)
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.analysis.value_ranges import ValueRanges, greatest
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import dynamic_blocks
from layerline.graph.quantization.channel_axes import channel_axis
from layerline.graph.quantization.qdq_placement import Placement
from layerline.graph.quantization.targets import FORMATS, OF_TYPE
from layerline.graph.quantization.weight_sources import drop_unread, weight_of
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import decibels

QUANTIZED, DEQUANTIZED, SCALE, ZERO_POINT = "/quantized", "/dequantized", "/scale", "/zero_point"
# A channel of a weight is dead below this part of the mean power of a channel: a millionth of its size.
_DEAD = 1e-12


def required_opset(model: ir.Model, least: int = 13) -> int:
    """The least opset for Q/DQ: 13 has per-channel axes, 19 half-precision scales; `least` that of the formats."""
    types = {value.dtype for value in (*model.graph.initializers.values(), *model.graph.inputs)}
    if types & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return max(19, least)
    return least


def make_plan(
    model: ir.Model,
    placement: Placement,
    histograms: Mapping[str, Histogram],
    calibrator: Calibrator,
    *,
    percentile: float = 99.99,
    chosen: Mapping[tuple[str, str], tuple[str, float]] | None = None,
) -> QuantPlan:
    """Gives every placed value its scales: activations from their histograms, weights from their numbers.

    An activation that is bounded by construction takes its bound, whatever the calibrator.

    Args:
        calibrator: for integers. Floats have fine steps near 0 whatever their range, so they take `minmax`, or
            `percentile` where that is asked for.
        chosen: thresholds that were chosen before, by value and type, with the name of the calibrator of each.

    Raises:
        StageError: calibration observed no finite number of an activation, or weights are not finite.
    """
    graph = model.graph
    values = values_by_name(graph)
    value_bounds = bounds(graph)
    items: list[QuantValue] = []
    for wanted in placement.wanted:
        if wanted.role == "weight":
            array = weight_of(values[wanted.name])
            assert array is not None
            items.append(assign.weight(wanted, array))
            continue
        threshold = (chosen or {}).get((wanted.name, wanted.dtype))
        if threshold is None:
            bound = bound_of(group_of(wanted), histograms, value_bounds)
            if bound is not None:
                threshold = (BOUND, bound)
        own_calibrator = calibrator
        if "int" not in wanted.dtype and calibrator != "percentile":
            own_calibrator = "minmax"
        items.append(assign.activation(wanted, histograms, own_calibrator, percentile=percentile, chosen=threshold))
    return QuantPlan(values=tuple(items), kept=placement.kept)


def bounds(graph: ir.Graph) -> dict[str, float]:
    """The greatest |x| of the values that are bounded by construction."""
    magnitudes: dict[str, float] = {}
    for value, computed_range in ValueRanges(graph, finite=False).computed.items():
        if math.isfinite(greatest(computed_range)):
            magnitudes[value.name or ""] = greatest(computed_range)
    return magnitudes


@dataclass(frozen=True)
class WeightLoss:
    """The SQNR of one quantised weight in dB: of the whole weight, and of the output channel that lost most.

    Channels that are 120 dB below the others are left out.
    """

    sqnr_db: float
    worst_channel_db: float


def stored_weights(
    model: ir.Model, plan: QuantPlan, rounded: Mapping[str, npt.NDArray[Any] | Stored]
) -> dict[tuple[str, str], npt.NDArray[Any]]:
    """What each quantised weight of the float model stands for, in the weight's own type, by name and type."""
    values = values_by_name(model.graph)
    stored_types = {entry.weight for entry in FORMATS.values()}
    weights: dict[tuple[str, str], npt.NDArray[Any]] = {}
    for item in plan.values:
        # A model may bring types that no weight is given here, and scales of blocks, which a plan does not hold.
        is_ours = item.dtype in stored_types and item.zero_point == 0
        if item.role != "weight" or not is_ours or (item.block and item.calibrator == "model"):
            continue
        array = weight_of(values[item.name])
        if array is None:
            continue
        stored = _stored(array, item, rounded.get(item.name)).dequantized()
        weights[item.name, item.dtype] = stored.astype(array.dtype)
    return weights


def weight_sqnr(
    model: ir.Model, plan: QuantPlan, rounded: Mapping[str, npt.NDArray[Any] | Stored]
) -> dict[tuple[str, str], WeightLoss]:
    """The SQNR of each quantised weight of the float model, by name and type; inf where nothing is lost."""
    weights = stored_weights(model, plan, rounded)
    values = values_by_name(model.graph)
    losses: dict[tuple[str, str], WeightLoss] = {}
    for item in plan.values:
        stored = weights.get((item.name, item.dtype))
        array = weight_of(values[item.name])
        if array is None or stored is None:
            continue
        wide = array.astype(np.float64)
        noise = np.square(wide - stored)
        signal = np.square(wide)
        # Channels count under one scale too: there an uneven weight loses its small ones.
        axis = item.axis
        if axis is None or item.block:
            axis = _channel_axis(values, item)
        other_axes = None
        if axis is not None:
            other_axes = tuple(i for i in range(array.ndim) if i != axis)
        signals = np.ravel(signal.sum(axis=other_axes))
        noises = np.ravel(noise.sum(axis=other_axes))
        # A dead channel may be rounded to 0, and no output shows it.
        alive = signals > _DEAD * signals.mean()
        channels = [decibels(float(s), float(n)) for s, n in zip(signals[alive], noises[alive], strict=True)]
        whole = decibels(float(signal.sum()), float(noise.sum()))
        losses[item.name, item.dtype] = WeightLoss(whole, min(channels, default=math.inf))
    return losses


def activations(plan: QuantPlan) -> list[QuantValue]:
    """The 8-bit activations that have one scale."""
    eight_bits = [value for value in plan.values if value.dtype in ("int8", "uint8")]
    return [value for value in eight_bits if value.role == "activation" and len(value.scales) == 1]


def fake_quantized(array: npt.NDArray[Any], value: QuantValue) -> tuple[npt.NDArray[Any], int]:
    """What Q and DQ make of an array, and how many of its elements lie beyond the range."""
    limits, scale = np.iinfo(value.dtype), np.float32(value.scales[0])
    steps = np.rint(array / scale) + value.zero_point
    inside = np.clip(steps, limits.min, limits.max)
    return (inside - value.zero_point).astype(np.float32) * scale, int(np.count_nonzero(inside != steps))


def _channel_axis(values: Mapping[str | None, ir.Value], item: QuantValue) -> int | None:
    """The axis of a weight that counts the channels of the layer's output; None where no axis holds them all."""
    reader, position = item.readers[0]
    node = values[reader].producer()
    if node is None or position != 1:
        return None
    return channel_axis(node)


def apply(model: ir.Model, plan: QuantPlan, rounded: Mapping[str, npt.NDArray[Any] | Stored] | None = None) -> ir.Model:
    """A copy of the float model with the plan's Q/DQ pairs in it.

    Args:
        rounded: weights by name that lie on the plan's steps already, or are stored in blocks; the others are rounded
            to the nearest.

    Raises:
        StageError: a value, weight or reader that the plan names is not in the model.
    """
    least = max((FORMATS[OF_TYPE[item.dtype]].opset for item in plan.values), default=13)
    quantized = copied(raise_opset(model, required_opset(model, least)))
    infer_types(quantized)
    if least >= 23:
        quantized.ir_version = max(quantized.ir_version, 11)  # the first with float4
    values = values_by_name(quantized.graph)
    weights = rounded or {}
    writer = _Writer(quantized)
    for item in plan.values:
        value = values.get(item.name)
        if value is None:
            raise StageError("the plan quantises a value that the model does not have", where=item.name)
        if item.role == "weight":
            dequantized = writer.weight(value, item, weights.get(item.name))
        else:
            dequantized = writer.activation(value, item)
        _rewire(value, item, dequantized)
        drop_unread(value)
    return quantized


class _Writer:
    """Adds nodes and tensors to the main graph, under names that the model does not use."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.names = FreshNames(model)
        self.first_reader: dict[ir.Value, ir.Node] = {}
        for node in self.graph:
            for value in (*node.inputs, *captures(node)):
                if value is not None:
                    self.first_reader.setdefault(value, node)

    def activation(self, value: ir.Value, item: QuantValue) -> ir.Value:
        """Adds Q and DQ right after the value; returns the dequantised value."""
        dtype = value.dtype or ir.DataType.FLOAT
        if item.block:
            whole = self.tensor(item.name + SCALE + SCALE, np.array(item.scales[0], dtype.numpy()))
            nodes = dynamic_blocks.quantizing(self.names, value, whole, item.block, item.name)
            for node in nodes:
                node.metadata_props.update(_metadata(item))
            self.graph.opset_imports.setdefault(dynamic_blocks.DOMAIN, 1)
            self._behind(value, nodes)
            return nodes[-1].outputs[0]
        scale = self.tensor(item.name + SCALE, np.array(item.scales[0], dtype.numpy()))
        zero = self.tensor(item.name + ZERO_POINT, np.array(item.zero_point, numpy_dtype(item.dtype)))
        stored = ir.DataType[item.dtype.upper()]
        forth = self.node("QuantizeLinear", [value, scale, zero], item, QUANTIZED, stored, value.shape)
        back = self.node("DequantizeLinear", [forth.outputs[0], scale, zero], item, DEQUANTIZED, dtype, value.shape)
        self._behind(value, [forth, back])
        return back.outputs[0]

    def _behind(self, value: ir.Value, nodes: list[ir.Node]) -> None:
        producer = value.producer()
        # An input of the model has no node to stand behind.
        if producer is None:
            self.first_reader[value].prepend(nodes)
        else:
            producer.append(nodes)

    def weight(self, value: ir.Value, item: QuantValue, rounded: npt.NDArray[Any] | Stored | None) -> ir.Value:
        """Stores the weight and adds its DQ before the first reader; returns the dequantised weight."""
        array = weight_of(value)
        if array is None:
            raise StageError("the plan quantises this value as a weight, but it is not constant", where=item.name)
        stored = _stored(array, item, rounded)
        dtype, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        along: dict[str, int] = {}
        if item.axis is not None:
            along["axis"] = item.axis
        if item.block:
            along["block_size"] = item.block
        quantized = self.tensor(item.name + QUANTIZED, stored.values)
        # The scales of float4 are float8 themselves, multiples of one number.
        if stored.parts is not None:
            multiples = self.tensor(item.name + SCALE + QUANTIZED, stored.parts[0])
            whole = self.tensor(item.name + SCALE + SCALE, stored.parts[1].astype(array.dtype))
            scales_shape = ir.Shape(stored.scales.shape)
            scaling = self.node("DequantizeLinear", [multiples, whole], item, SCALE, dtype, scales_shape)
            self.first_reader[value].prepend(scaling)
            scale = scaling.outputs[0]
        else:
            scale = self.tensor(item.name + SCALE, stored.scales.astype(array.dtype))
        inputs = [quantized, scale]
        # Scales in blocks are symmetric, and runtimes take them without zero points.
        if not item.block:
            inputs.append(self.tensor(item.name + ZERO_POINT, np.zeros(stored.scales.shape, stored.values.dtype)))
        node = self.node("DequantizeLinear", inputs, item, DEQUANTIZED, dtype, shape, **along)
        self.first_reader[value].prepend(node)
        return node.outputs[0]

    def tensor(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        """A new initializer."""
        return add_initializer(self.graph, self.names.fresh(name), array)

    def node(
        self,
        op: str,
        inputs: list[ir.Value],
        item: QuantValue,
        suffix: str,
        dtype: ir.DataType,
        shape: ir.Shape | None,
        **attributes: int,
    ) -> ir.Node:
        """A new node, not in a graph yet, with the module path of the plan's entry."""
        output = ir.Value(name=self.names.fresh(item.name + suffix), shape=shape, type=ir.TensorType(dtype))
        name = self.names.fresh(f"{item.name}/{op}")
        return ir.node(op, inputs, attributes, outputs=[output], name=name, metadata_props=_metadata(item))


def _metadata(item: QuantValue) -> dict[str, str]:
    """The module path that the nodes of an entry carry."""
    if not item.module:
        return {}
    return {MODULE: item.module}


def _stored(array: npt.NDArray[Any], item: QuantValue, rounded: npt.NDArray[Any] | Stored | None) -> Stored:
    """The weight as its entry says, from what a repair chose for this format where there is that."""
    if isinstance(rounded, Stored):
        same_format = rounded.values.dtype == numpy_dtype(item.dtype)
        if same_format and (rounded.axis, rounded.block) == (item.axis, item.block):
            return rounded
    elif rounded is not None:
        array = rounded
    if item.block and item.axis is not None:
        return in_blocks(array, item.axis, item.block, item.dtype)
    scales = np.array(item.scales, array.dtype)
    if item.axis is None:
        scales = scales.reshape(())
    # The numbers are computed with the scale as it is stored: a half-precision scale is rounded first.
    return quantize(array, scales.astype(np.float32), item.axis, item.dtype)


def _rewire(value: ir.Value, item: QuantValue, dequantized: ir.Value) -> None:
    wanted = set(item.readers)
    # Readers that the plan does not name keep the float value.
    for use in value.uses():
        reader = (first_output(use.node), use.idx)
        if reader in wanted:
            use.node.replace_input_with(use.idx, dequantized)
    missing = wanted - {(first_output(u.node), u.idx) for u in dequantized.uses()}
    if missing:
        raise StageError(
            f"the plan's readers {sorted(missing)} of this value are not in the model",
            where=item.name,
            hint="the plan was made for another model",
        )
