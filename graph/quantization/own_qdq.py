"""Q/DQ that a model brings along, from training with fake quantisation or from another tool: read, and taken out.

Nothing here changes a scale. The plan that is read from the graph says what is quantised and how; the graph without
its pairs is what the quantised one is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.calib.plan import Kept, QuantPlan, QuantValue, Role
from layerline.graph.analysis.ir_queries import FreshNames, add_initializer, constant, copied, dim, first_output
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.quantization import dynamic_blocks
from layerline.graph.quantization.naming import module_of
from layerline.graph.quantization.qdq_placement import products
from layerline.graph.quantization.weight_sources import drop_unread, weight_of

_LEFT_OUT = "the model's own Q/DQ leave it out"
_WHY = "the model brings its own Q/DQ here"
_MOVES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity")


def present(model: ir.Model) -> bool:
    """Whether any value of the main graph is quantised already."""
    return any(n.op_type in ("QuantizeLinear", "DequantizeLinear") and not n.domain for n in model.graph)


def read(model: ir.Model) -> QuantPlan:
    """The plan that the Q/DQ pairs of a model carry out; every matrix product without one is listed as float."""
    graph = model.graph
    values: list[QuantValue] = []
    readers = set[str]()
    for node in _dequantizers(graph):
        uses = list(node.outputs[0].uses())
        scales_another = uses and all(u.node.op_type == "DequantizeLinear" and u.idx == 1 for u in uses)
        value = _value(node)
        if value is not None and not scales_another:
            values.append(value)
            readers.update(reader for reader, _ in value.readers)
    nodes = {first_output(n): n for n in graph}
    kept = tuple(
        Kept(name=name, op=nodes[name].op_type, module=module_of(nodes[name]), reason=_LEFT_OUT)
        for name in products(model)
        if name not in readers and name in nodes
    )
    return QuantPlan(values=tuple(values), kept=kept)


def without(model: ir.Model) -> ir.Model:
    """The same model in float, without its pairs.

    A weight that the file stores in float has that value; of one that is stored in integers only the values that they
    stand for are left.
    """
    copy = copied(model)
    graph = copy.graph
    for node in list(_dequantizers(graph)):
        output, data = node.outputs[0], node.inputs[0]
        if output.is_graph_output() or data is None:
            continue
        maker = data.producer()
        value = _as_float(graph, node)
        if value is None and maker is not None and maker.op_type in ("QuantizeLinear", dynamic_blocks.OP):
            value = maker.inputs[0]
        if value is not None:
            _replace(graph, node, value)
    return copy


def emulate(model: ir.Model) -> ir.Model:
    """The same model without float4, which onnxruntime lacks: weights are the numbers that they stand for, and blocks
    that are quantised while running are rounded by ordinary operators. What has no float4 is returned as it is."""
    if all(value.dtype != ir.DataType.FLOAT4E2M1 for value in model.graph.initializers.values()):
        return model
    copy = copied(model)
    graph = copy.graph
    infer_types(copy)
    names = FreshNames(copy)
    for node in [each for each in graph if each.op_type == dynamic_blocks.OP]:
        ordinary = dynamic_blocks.emulation(graph, names, node)
        node.prepend(ordinary)
        for use in list(node.outputs[0].uses()):
            result = ordinary[-1].outputs[0]
            name = use.node.outputs[0].name
            use.node.outputs[0].name = names.fresh(f"{name}/float4")
            _replace(graph, use.node, result)
            result.name = name
    graph.opset_imports.pop(dynamic_blocks.DOMAIN, None)
    for node in list(_dequantizers(graph)):
        # The weight itself, and before it its scales.
        data = [node.inputs[0], *(use.node.inputs[0] for use in node.outputs[0].uses() if use.node.inputs)]
        if not any(v is not None and v.dtype == ir.DataType.FLOAT4E2M1 for v in data):
            continue
        value = _as_float(graph, node)
        if value is not None:
            _replace(graph, node, value)
    return copy


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Puts a value in the place of a node's output, and removes the node and what only it read."""
    inputs = [v for v in node.inputs if v is not None]
    node.outputs[0].replace_all_uses_with(value)
    graph.remove(node, safe=True)
    for read in inputs:
        drop_unread(read)


def _as_float(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """The float numbers of a dequantised weight as a stored tensor of the same name; None where it is no weight."""
    stored = _dequantized(node)
    if stored is None:
        return None
    output = node.outputs[0]
    name = output.name or ""
    output.name = f"{name}/dequantized"
    return add_initializer(graph, name, stored)


def _dequantizers(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        if node.op_type == "DequantizeLinear" and node.domain == "":
            yield node


def _value(node: ir.Node) -> QuantValue | None:
    """What one DequantizeLinear says; None where its scale is computed, or it reads neither a Q nor a constant."""
    scales, data = _scales(node), node.inputs[0]
    if scales is None or data is None:
        return None
    maker, stored = data.producer(), _dequantized(node)
    role: Role = "activation"
    points = _points(node)
    kind = data.dtype or ir.DataType.INT8
    axis = node.attributes.get_int("axis", 1) if scales.size > 1 else None
    if axis is not None and axis < 0 and data.shape is not None:
        axis += len(data.shape)
    if stored is not None:
        role = "weight"
        name, low, high = node.outputs[0].name, float(stored.min(initial=0)), float(stored.max(initial=0))
    elif maker is not None and maker.op_type == "QuantizeLinear" and maker.inputs[0] is not None:
        if weight_of(maker.inputs[0]) is not None:
            role = "weight"
        least, greatest = _bounds(kind)
        name = maker.inputs[0].name
        wide = scales.astype(np.float64)
        low, high = float(((least - points) * wide).min()), float(((greatest - points) * wide).max())
    else:
        return None
    point: Any = int(points.flat[0]) if np.all(points == points.flat[0]) else tuple(int(p) for p in points.ravel())
    readers = tuple(dict.fromkeys(_readers(node.outputs[0])))
    block = _block(node, scales) if scales.ndim > 1 else 0
    first = next((u.node for u in node.outputs[0].uses()), node)
    return QuantValue(
        name=name or "",
        role=role,
        module=module_of(first) or module_of(node),
        axis=axis,
        readers=readers,
        why=_WHY,
        block=block,
        dtype=kind.name.lower(),
        zero_point=point,
        scales=() if block else tuple(float(s) for s in scales.astype(np.float32).ravel()),
        amax=max(abs(low), abs(high)),
        seen=(low, high),
        calibrator="model",
    )


def _readers(value: ir.Value) -> Iterator[tuple[str, int]]:
    """Who reads a dequantised value, through nodes that only move it."""
    for use in value.uses():
        yield first_output(use.node), use.idx
        if use.node.op_type in _MOVES and use.idx == 0:
            yield from _readers(use.node.outputs[0])


def _points(node: ir.Node) -> npt.NDArray[Any]:
    points = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    return np.zeros(1, np.int64) if points is None else points.astype(np.int64).reshape(-1)


def _bounds(kind: ir.DataType) -> tuple[float, float]:
    """The least and the greatest number of the quantised type."""
    dtype = kind.numpy()
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return float(limits.min), float(limits.max)
    floats = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(floats.min), float(floats.max)


def _scales(node: ir.Node) -> npt.NDArray[Any] | None:
    """The stored scales of a DequantizeLinear, which may be quantised as well; None where they are computed."""
    scales = node.inputs[1]
    maker = scales.producer() if scales is not None else None
    if maker is not None and maker.op_type == "DequantizeLinear" and maker.domain == "":
        return _dequantized(maker)
    return constant(scales)


def _dequantized(node: ir.Node) -> npt.NDArray[Any] | None:
    """The float numbers that a stored weight stands for; None where it is no weight."""
    data, scales = node.inputs[0], _scales(node)
    whole = constant(data)
    if whole is None or scales is None:
        return None
    zero = _spread(_points(node), scales, whole, node)
    wide = _spread(scales, scales, whole, node)
    numbers = (whole.astype(np.float32) - zero.astype(np.float32)) * wide.astype(np.float32)
    return np.asarray(numbers, scales.dtype)


def _spread(
    values: npt.NDArray[Any], scales: npt.NDArray[Any], whole: npt.NDArray[Any], node: ir.Node
) -> npt.NDArray[Any]:
    """Scales or zero points in a shape that broadcasts over the weight: one number, one a channel, or one a block."""
    if values.size == 1:
        return values.reshape(())
    axis = node.attributes.get_int("axis", 1)
    if scales.ndim == 1:
        shape = [1] * whole.ndim
        shape[axis] = -1
        return values.reshape(shape)
    repeated = np.repeat(values.reshape(scales.shape), _block(node, scales), axis)
    return repeated.take(range(whole.shape[axis]), axis)


def _block(node: ir.Node, scales: npt.NDArray[Any]) -> int:
    """Elements that share a scale along the axis of scales in blocks."""
    axis = node.attributes.get_int("axis", 1)
    size = dim(node.inputs[0], axis)
    return node.attributes.get_int("block_size", 0) or -(-int(size or 0) // scales.shape[axis])
