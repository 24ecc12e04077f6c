"""Raising a model to a newer opset, and to an ir_version that the runtime reads."""

from __future__ import annotations

import onnx_ir as ir
from onnx import checker, defs, shape_inference, version_converter

from layerline.backends.light import Light, Model, split, weightless
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.errors import StageError

OLDEST = 11
# The newest ir_version that every opset here can be written in and onnxruntime 1.22 and later read.
IR_VERSION = 10
_REFUSALS = (checker.ValidationError, shape_inference.InferenceError, version_converter.ConvertError)


def opset_of(model: Model) -> int:
    """The version of the default domain."""
    imports = as_ir(model).opset_imports
    return imports.get("", imports.get("ai.onnx", 1))


def raise_opset(model: Model, to: int) -> ir.Model:
    """The model at opset `to`, or as it is where it is there already; value names stay.

    Raises StageError: the opset is too old, or an operator can't be raised; names both versions.
    """
    model = as_ir(model)
    have = opset_of(model)
    if have >= to:
        return model
    if have < OLDEST:
        raise StageError(f"the model is at opset {have}; {OLDEST} is the oldest that can be raised", where="opset")
    newest = defs.onnx_opset_version()
    if to > newest:
        what = f"opset {have} can't be raised to {to}: the installed onnx knows opsets up to {newest}"
        raise StageError(what, where="opset")
    # onnx's converter works on its own form. To it weights may as well be inputs.
    light = split(model)
    proto = weightless(light)
    proto.graph.name = proto.graph.name or "main"  # the converter takes no graph without a name
    try:
        proto = version_converter.convert_version(proto, to)
        # An output of two ranks, out of two branches, has no shape; onnx's checker wants one of every tensor.
        for output in proto.graph.output:
            if output.type.HasField("tensor_type"):
                output.type.tensor_type.shape.SetInParent()
        checker.check_model(proto)
    except (RuntimeError, ValueError, *_REFUSALS) as error:
        what = f"opset {have} can't be raised to {to}: {error}"
        raise StageError(what, where="opset", hint=f"export the model at opset {to}") from error
    # What was put in for the converter and the checker alone.
    inputs = {value.name for value in model.graph.inputs}
    for item in [item for item in proto.graph.input if item.name not in inputs]:
        proto.graph.input.remove(item)
    raised = as_ir(Light(proto, light.weights))
    for before, after in zip(model.graph.outputs, raised.graph.outputs, strict=True):
        after.shape = after.shape if before.shape is not None else None
    _keep_metadata(model, raised)
    return raised


def _keep_metadata(before: ir.Model, after: ir.Model) -> None:
    """The converter forgets each node's metadata; outputs keep their names, so it is found again by them."""
    metadata = {node.outputs[0].name: node.metadata_props for node in before.graph.all_nodes() if node.outputs}
    for node in after.graph.all_nodes():
        if node.outputs and not node.metadata_props:
            node.metadata_props.update(metadata.get(node.outputs[0].name, {}))
