"""Identity and inference-time Dropout: the value is the one before."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import trains
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on


def identity(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    return node.inputs[0]


def dropout(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    if trains(node) or (work.opset < 7 and not node.attributes.get_int("is_test", 0)):
        raise Declined(f"Dropout {node.outputs[0].name} may be in training mode")
    return node.inputs[0]


IDENTITY = on("identity", "Identity removed", ["Identity"], identity)
DROPOUT = on("dropout", "Dropout removed where it never drops", ["Dropout"], dropout)
