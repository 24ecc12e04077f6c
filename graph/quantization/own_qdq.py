"""Q/DQ that a model brings along, from training with fake quantisation or from another tool: read, and taken out.

Nothing here changes a scale. The plan that is read from the graph says what is quantised and how; the graph without
its pairs is what the quantised one is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array
from layerline.calib.plan import QuantPlan, QuantValue, Role, readers_of
from layerline.graph.analysis.ir_queries import (
    FreshNames,
    add_initializer,
    constant,
    copied,
    dim,
    first_output,
    optional_input,
    parent,
)
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.quantization import dynamic_blocks
from layerline.graph.quantization.naming import kept_float, module_of
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
    values: list[QuantValue] = []
    for node in _dequantizers(model.graph):
        value = _entry(node)
        if value is not None:
            values.append(value)
    left_out = set(products(model)) - readers_of(values)
    kept = tuple(kept_float(node, _LEFT_OUT) for node in model.graph if first_output(node) in left_out)
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
    """The same model without float4, which onnxruntime lacks; one without any is returned as it is.

    Weights are the numbers that they stand for, and blocks that are quantised while running are rounded by ordinary
    operators.
    """
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


def _entry(node: ir.Node) -> QuantValue | None:
    """What one DequantizeLinear says; None where its scale is computed, or it reads neither a Q nor a constant.

    None also where it gives the scales of another one.
    """
    output, data = node.outputs[0], node.inputs[0]
    scales, points = _scales(node), _points(node)
    uses = list(output.uses())
    scales_another = uses and all(use.node.op_type == "DequantizeLinear" and use.idx == 1 for use in uses)
    if scales is None or data is None or scales_another:
        return None
    kind = data.dtype or ir.DataType.INT8
    role: Role = "activation"
    stored, maker = _dequantized(node), data.producer()
    if stored is not None:
        role = "weight"
        name = output.name
        low, high = float(stored.min(initial=0)), float(stored.max(initial=0))
    elif maker is not None and maker.op_type == "QuantizeLinear" and maker.inputs[0] is not None:
        # A float weight that is quantised while running has a Q in front as well.
        if weight_of(maker.inputs[0]) is not None:
            role = "weight"
        name = maker.inputs[0].name
        least, greatest = _bounds(kind)
        wide = scales.astype(np.float64)
        low, high = float(((least - points) * wide).min()), float(((greatest - points) * wide).max())
    else:
        return None
    axis = None
    if scales.size > 1:
        axis = node.attributes.get_int("axis", 1)
        if axis < 0 and data.shape is not None:
            axis += len(data.shape)
    zero_point: int | tuple[int, ...] = int(points[0])
    if np.any(points != points[0]):
        zero_point = tuple(int(point) for point in points)
    block = 0
    numbers = tuple(float(scale) for scale in scales.astype(np.float32).ravel())
    if scales.ndim > 1:
        # A plan holds no scales of blocks.
        block = _block(node, scales)
        numbers = ()
    first_reader = uses[0].node if uses else node
    return QuantValue(
        name=name or "",
        role=role,
        module=module_of(first_reader) or module_of(node),
        axis=axis,
        readers=tuple(dict.fromkeys(_readers(output))),
        why=_WHY,
        block=block,
        dtype=kind.name.lower(),
        zero_point=zero_point,
        scales=numbers,
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


def _points(node: ir.Node) -> Array:
    """The zero points, one or one for each scale; 0 where the node has none."""
    points = constant(optional_input(node, 2))
    if points is None:
        return np.zeros(1, np.int64)
    return points.astype(np.int64).reshape(-1)


def _bounds(kind: ir.DataType) -> tuple[float, float]:
    """The least and the greatest number of the quantised type."""
    dtype = kind.numpy()
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return float(limits.min), float(limits.max)
    floats = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(floats.min), float(floats.max)


def _scales(node: ir.Node) -> Array | None:
    """The stored scales of a DequantizeLinear, which may be quantised as well; None where they are computed."""
    maker = parent(node.inputs[1], "DequantizeLinear")
    if maker is not None:
        return _dequantized(maker)
    return constant(node.inputs[1])


def _dequantized(node: ir.Node) -> Array | None:
    """The float numbers that a stored weight stands for; None where it is no weight."""
    data, scales = node.inputs[0], _scales(node)
    whole = constant(data)
    if whole is None or scales is None:
        return None
    zero = _spread(_points(node), scales, whole, node).astype(np.float32)
    numbers = (whole.astype(np.float32) - zero) * _spread(scales, scales, whole, node).astype(np.float32)
    return np.asarray(numbers, scales.dtype)


def _spread(numbers: Array, scales: Array, whole: Array, node: ir.Node) -> Array:
    """Scales or zero points in a shape that broadcasts over the weight: one number, one a channel, or one a block."""
    if numbers.size == 1:
        return numbers.reshape(())
    axis = node.attributes.get_int("axis", 1)
    if scales.ndim == 1:
        shape = [1] * whole.ndim
        shape[axis] = -1
        return numbers.reshape(shape)
    repeated = np.repeat(numbers.reshape(scales.shape), _block(node, scales), axis)
    # The last block may be cut short.
    return repeated.take(range(whole.shape[axis]), axis)


def _block(node: ir.Node, scales: Array) -> int:
    """Elements that share a scale along the axis of scales in blocks."""
    axis = node.attributes.get_int("axis", 1)
    size = dim(node.inputs[0], axis)
    # Without an attribute it is the least size that has as many blocks.
    return node.attributes.get_int("block_size", 0) or -(-int(size or 0) // scales.shape[axis])
