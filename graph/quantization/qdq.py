"""Carries a quantisation plan out: explicit QuantizeLinear and DequantizeLinear in the graph, as TensorRT reads them.

Nothing is renamed and nothing is removed but float weights that nothing reads any more. The tensor called X stays the
float value; beside it stand X/quantized and X/dequantized, and the plan's readers read the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from layerline.backends.base import MODULE
from layerline.backends.light import Light, Model, split
from layerline.calib import assign
from layerline.calib.calibrators import Calibrator
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan, QuantValue, Wanted
from layerline.calib.range_candidates import BOUND, bound_of, group_of
from layerline.calib.scales import Int8, quantize
from layerline.graph.analysis.element_types import infer_types
from layerline.graph.analysis.fresh_names import FreshNames
from layerline.graph.analysis.ir_queries import captures, graph_values
from layerline.graph.analysis.value_intervals import intervals, magnitude
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization.naming import first_output
from layerline.graph.quantization.qdq_placement import Placement
from layerline.graph.quantization.weight_sources import drop_unread, weight_of
from layerline.pipeline.errors import StageError

QUANTIZED, DEQUANTIZED, SCALE, ZERO_POINT = "/quantized", "/dequantized", "/scale", "/zero_point"


def required_opset(light: Light) -> int:
    """The opset that Q/DQ needs: 13 has per-channel axes, 19 half-precision scales."""
    half = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    graph = light.model.graph
    types = {t.data_type for t in graph.initializer} | {w.kind for w in light.weights.values()}
    return 19 if half & (types | {i.type.tensor_type.elem_type for i in graph.input}) else 13


def plan(
    model: Model,
    placement: Placement,
    histograms: Mapping[str, Histogram],
    calibrator: Calibrator,
    *,
    percentile: float = 99.99,
    chosen: Mapping[str, tuple[str, float]] | None = None,
) -> QuantPlan:
    """Numbers for a placement: activations from their histograms, weights from themselves.

    An activation that is bounded by construction takes its bound, whatever the calibrator.

    Args:
        chosen: thresholds by value that were chosen already, each with the name of what it comes from.

    Raises:
        StageError: an activation of which calibration saw nothing finite, or weights that are not finite.
    """
    graph = to_ir(model).graph
    values, limits = {v.name: v for v in graph_values(graph)}, bounds(graph)
    ready = chosen or {}

    def numbered(wanted: Wanted) -> QuantValue:
        array = weight_of(values[wanted.name]) if wanted.role == "weight" else None
        if array is None:
            bound = bound_of(group_of(wanted), histograms, limits)
            limit = None if bound is None else (BOUND, bound)
            own = ready.get(wanted.name, limit)
            return assign.activation(wanted, histograms, calibrator, percentile=percentile, chosen=own)
        return assign.weight(wanted, array)

    return QuantPlan(values=tuple(map(numbered, placement.wanted)), kept=placement.kept)


def bounds(graph: ir.Graph) -> dict[str, float]:
    """The greatest |x| of the values that are bounded by construction."""
    found = {v.name or "": magnitude(interval) for v, interval in intervals(graph).items()}
    return {name: greatest for name, greatest in found.items() if greatest is not None}


@dataclass(frozen=True)
class WeightLoss:
    """How well a plan keeps one weight: SQNR in dB of all of it, and of the output channel that lost most."""

    sqnr_db: float
    worst_channel_db: float


def weight_sqnr(model: Model, plan: QuantPlan) -> dict[str, WeightLoss]:
    """How well the plan keeps each weight of the float model, by name; inf where nothing is lost."""
    values, losses = {v.name: v for v in graph_values(to_ir(model).graph)}, {}
    for item in plan.values:
        array = weight_of(values[item.name]) if item.role == "weight" else None
        if array is not None:
            wide = array.astype(np.float64)
            lost = np.square(wide - _int8(array, item).dequantized())
            signal = np.square(wide)
            others = None if item.axis is None else tuple(i for i in range(array.ndim) if i != item.axis)
            channels = np.ravel(_decibels(signal.sum(axis=others), lost.sum(axis=others)))
            whole = float(_decibels(signal.sum(), lost.sum()))
            losses[item.name] = WeightLoss(whole, float(channels.min(initial=np.inf)))
    return losses


def _decibels(signal: npt.NDArray[np.float64], lost: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """10 log10(signal / lost); inf where there is nothing to lose."""
    clear = (lost == 0) | (signal == 0)
    ratio = np.where(clear, 1.0, signal) / np.where(clear, 1.0, lost)
    return np.where(clear, np.inf, 10 * np.log10(ratio))


def apply(model: Model, plan: QuantPlan) -> Light:
    """A copy of the float model with the plan's Q/DQ pairs in it.

    Raises:
        StageError: a value, weight or reader that the plan names is not in the model.
    """
    quantized = to_ir(raise_opset(model, required_opset(split(model))))
    infer_types(quantized)
    values, writer = {v.name: v for v in graph_values(quantized.graph)}, _Writer(quantized)
    for item in plan.values:
        value = values.get(item.name)
        if value is None:
            raise StageError("the plan quantises a value that the model does not have", where=item.name)
        made = writer.weight(value, item) if item.role == "weight" else writer.activation(value, item)
        _rewire(value, item, made)
        drop_unread(value)
    return from_ir(quantized)


class _Writer:
    """Adds nodes and tensors to the main graph, under names that nothing in the model has yet."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.names = FreshNames(model)
        self.first_reader: dict[ir.Value, ir.Node] = {}
        for node in self.graph:
            for value in (*node.inputs, *captures(node)):
                if value is not None:
                    self.first_reader.setdefault(value, node)

    def activation(self, value: ir.Value, item: QuantValue) -> ir.Value:
        """Q and DQ right behind the value; returns the dequantised one."""
        dtype = value.dtype or ir.DataType.FLOAT
        scale = self.tensor(item.name + SCALE, np.array(item.scales[0], dtype.numpy()))
        zero = self.tensor(item.name + ZERO_POINT, np.array(0, np.int8))
        forth = self.node("QuantizeLinear", [value, scale, zero], item, QUANTIZED, ir.DataType.INT8, value.shape)
        back = self.node("DequantizeLinear", [forth.outputs[0], scale, zero], item, DEQUANTIZED, dtype, value.shape)
        producer = value.producer()
        if producer is None:
            self.first_reader[value].prepend([forth, back])
        else:
            producer.append([forth, back])
        return back.outputs[0]

    def weight(self, value: ir.Value, item: QuantValue) -> ir.Value:
        """The weight stored in int8, and its DQ before the first reader; returns the dequantised weight."""
        array = weight_of(value)
        if array is None:
            raise StageError("the plan takes this value for a weight, but it is not constant", where=item.name)
        int8 = _int8(array, item)
        inputs = [
            self.tensor(item.name + QUANTIZED, int8.values),
            self.tensor(item.name + SCALE, int8.scales.astype(array.dtype)),
            self.tensor(item.name + ZERO_POINT, np.zeros(int8.scales.shape, np.int8)),
        ]
        axis = {} if item.axis is None else {"axis": item.axis}
        dtype, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        node = self.node("DequantizeLinear", inputs, item, DEQUANTIZED, dtype, shape, **axis)
        self.first_reader[value].prepend(node)
        return node.outputs[0]

    def tensor(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        """A new initializer."""
        name = self.names.fresh(name)
        stored = ir.tensor(array, name=name)
        made = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(stored.dtype), const_value=stored)
        self.graph.register_initializer(made)
        return made

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
        """A new node, in no graph yet, that carries the module of the plan's entry."""
        output = ir.Value(name=self.names.fresh(item.name + suffix), shape=shape, type=ir.TensorType(dtype))
        name = self.names.fresh(f"{item.name}/{op}")
        props = {MODULE: item.module} if item.module else {}
        return ir.node(op, inputs, attributes, outputs=[output], name=name, metadata_props=props)


def _int8(array: npt.NDArray[Any], item: QuantValue) -> Int8:
    # The numbers are made with the scale as it is stored: a half-precision scale is rounded first.
    scales = np.array(item.scales if item.axis is not None else item.scales[0], array.dtype)
    return quantize(array, scales.astype(np.float32), item.axis)


def _rewire(value: ir.Value, item: QuantValue, dequantized: ir.Value) -> None:
    wanted = set(item.readers)
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
