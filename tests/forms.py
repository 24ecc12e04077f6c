"""Models between ONNX's two forms in memory: tests write and read graphs as protobuf, the product works on onnx_ir."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from layerline.backends.light import Light, Model
from layerline.graph.io.ir_convert import as_ir

__all__ = ["as_ir", "proto"]


def proto(model: Model) -> onnx.ModelProto:
    """The whole model as one message."""
    if isinstance(model, Light):
        return model.whole()
    return ir.to_proto(model) if isinstance(model, ir.Model) else model
