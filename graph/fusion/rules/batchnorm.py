"""BatchNormalization into the linear op before it.

y = gamma (Wx + b - mean) / sqrt(var + eps) + beta scales each output channel of W by gamma / sqrt(var + eps). The
shipped rule of onnxscript is not used: it leaves training-mode nodes, missing optional inputs and weights in Constant
nodes out of account. Arithmetic is in float64, so that the fused weights are rounded once.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, name_of
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole

DEFAULT_EPSILON = 1e-5


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    before = affine_ops.behind(node.inputs[0])
    if before is None:
        return None
    where = f"BatchNormalization {node.outputs[0].name}"
    _refuse_training(node, work.opset, where)
    # Whoever else reads the layer wants it without the normalisation.
    sole(node.inputs[0], node)
    if before.axis != 1:
        name = before.node.outputs[0].name
        raise Declined(f"{where} normalises axis 1, the channels of {name} lie on axis {before.axis}")
    parameters: list[Array] = []
    for value in node.inputs[1:5]:
        parameter = constant(value)
        if parameter is None:
            raise Declined(f"{name_of(value) or 'a parameter'} of {where} is computed")
        if parameter.shape != (before.channels,):
            raise Declined(f"{name_of(value)} of {where} has shape {parameter.shape}, not {before.channels}")
        parameters.append(parameter.astype(np.float64))
    gamma, beta, mean, var = parameters
    spread = var + node.attributes.get_float("epsilon", DEFAULT_EPSILON)
    if not (spread > 0).all():
        raise Declined(f"{where} divides by the root of a variance that is not above 0 ({spread.min()})")
    scale = gamma / np.sqrt(spread)
    return before.scaled(tape, scale, beta - mean * scale, "batchnorm")


def _refuse_training(node: ir.Node, opset: int, where: str) -> None:
    attributes = node.attributes
    # Up to opset 6 training is the default.
    if attributes.get_int("training_mode", 0) or (opset < 7 and not attributes.get_int("is_test", 0)):
        raise Declined(f"{where} is in training mode")
    if any(o.name for o in node.outputs[1:]):
        raise Declined(f"{where} gives batch statistics ({node.outputs[1].name}): it is in training mode")
    if not attributes.get_int("spatial", 1):
        raise Declined(f"{where} normalises every element on its own (spatial=0)")


RULE = on("batchnorm", "BatchNormalization into Conv, ConvTranspose, Gemm or MatMul", ["BatchNormalization"], rewrite)
