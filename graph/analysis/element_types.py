"""Element types of every value: what Q/DQ scales and half precision are chosen by."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass


def infer_types(model: ir.Model) -> None:
    """Fills in the types and shapes that a file leaves out; what it declares stays, for the model is written again."""
    # Data propagation would write out what a ConstantOfShape holds, however much that is.
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
