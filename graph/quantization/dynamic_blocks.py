"""Activations in float4 that are quantised in blocks while the model runs, by an operator that only TensorRT has.

The scale of a block is its greatest |x| over 6, as a float8 multiple of one number that calibration chose. Plain ONNX
has no such operator; for onnxruntime it is written in ordinary ones.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import FreshNames, add_initializer, constant, rank

OP, DOMAIN = "TRT_FP4DynamicQuantize", "trt"
_GREATEST = 6.0


def quantizing(names: FreshNames, value: ir.Value, whole: ir.Value, block: int, name: str) -> list[ir.Node]:
    """The operator and what dequantises its result, which is the output of the last node.

    Args:
        value: with two or three axes; blocks lie along the last one.
        whole: the stored number that the scales of blocks are multiples of.
        name: what the names of the new values begin with.
    """
    kind = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    blocked = {"axis": -1, "block_size": block}
    codes = ir.Value(
        name=names.fresh(f"{name}/quantized"), type=ir.TensorType(ir.DataType.FLOAT4E2M1), shape=value.shape
    )
    multiples = ir.Value(name=names.fresh(f"{name}/scale/quantized"), type=ir.TensorType(ir.DataType.FLOAT8E4M3FN))
    attributes = {**blocked, "scale_type": int(ir.DataType.FLOAT8E4M3FN)}
    outputs = [codes, multiples]
    quantize = ir.node(OP, [value, whole], attributes, domain=DOMAIN, outputs=outputs, name=names.fresh(f"{name}/{OP}"))
    scales = ir.Value(name=names.fresh(f"{name}/scale"), type=kind)
    result = ir.Value(name=names.fresh(f"{name}/dequantized"), type=kind, shape=value.shape)
    op = "DequantizeLinear"
    scaling = ir.node(op, [multiples, whole], outputs=[scales], name=names.fresh(f"{name}/scale/{op}"))
    back = ir.node(op, [codes, scales], blocked, outputs=[result], name=names.fresh(f"{name}/{op}"))
    return [quantize, scaling, back]


def emulation(graph: ir.Graph, names: FreshNames, node: ir.Node) -> list[ir.Node]:
    """Ordinary operators in float32 that compute what the operator's dequantised result is; the last one has it.

    A block whose scale rounds to 0 becomes 0.
    """
    value, whole = node.inputs
    assert value is not None
    base = f"{value.name}/blocks"
    nodes: list[ir.Node] = []

    def op(kind: str, *inputs: ir.Value | None, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: int) -> ir.Value:
        output = ir.Value(name=names.fresh(base), type=ir.TensorType(dtype))
        nodes.append(ir.node(kind, inputs, attributes, outputs=[output], name=names.fresh(f"{base}/{kind}")))
        return output

    def number(array: object, dtype: type = np.float32) -> ir.Value:
        return add_initializer(graph, names.fresh(f"{base}/constant"), np.asarray(array, dtype))

    block = node.attributes.get_int("block_size", 16)
    scale_of_all = number(constant(whole))
    wide = op("Cast", value, to=int(ir.DataType.FLOAT))
    leading = [0] * ((rank(value) or 2) - 1)
    blocks = op("Reshape", wide, number([*leading, -1, block], np.int64))
    greatest = op("ReduceMax", op("Abs", blocks), number([-1], np.int64), keepdims=1)
    exact = op("Div", op("Div", greatest, number(_GREATEST)), scale_of_all)
    fp8 = ir.DataType.FLOAT8E4M3FN
    multiples = op("Cast", op("Cast", exact, dtype=fp8, to=int(fp8)), to=int(ir.DataType.FLOAT))
    scales = op("Mul", multiples, scale_of_all)
    empty = op("Equal", scales, number(0.0), dtype=ir.DataType.BOOL)
    steps = op("Div", blocks, op("Where", empty, number(1.0), scales))
    inside = op("Clip", steps, number(-_GREATEST), number(_GREATEST))
    # Steps of e2m1: 0.5 below 2, 1 below 4, 2 above. Round takes ties to even, as the codes do.
    size = op("Abs", inside)
    below_2 = op("Less", size, number(2.0), dtype=ir.DataType.BOOL)
    below_4 = op("Less", size, number(4.0), dtype=ir.DataType.BOOL)
    step = op("Where", below_2, number(0.5), op("Where", below_4, number(1.0), number(2.0)))
    rounded = op("Mul", op("Round", op("Div", inside, step)), step)
    # Reshape reads the sizes of the value: a batch of any size passes.
    sizes = op("Shape", value, dtype=ir.DataType.INT64)
    whole_shape = op("Reshape", op("Mul", rounded, scales), sizes)
    op("Cast", whole_shape, dtype=value.dtype or ir.DataType.FLOAT, to=int(value.dtype or ir.DataType.FLOAT))
    return nodes
