"""Raising a model to a newer opset, and to an ir_version that the runtime reads."""

from __future__ import annotations

import onnx
from onnx import checker, shape_inference, version_converter

from layerline.backends.light import Light, Model, split, weightless
from layerline.graph.io.onnx_files import graphs
from layerline.pipeline.errors import StageError

OLDEST = 11
# The newest ir_version that every opset here can be written in and onnxruntime 1.22 and later read.
IR_VERSION = 10
_REFUSALS = (checker.ValidationError, shape_inference.InferenceError, version_converter.ConvertError)


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the default domain."""
    for item in model.opset_import:
        if item.domain in ("", "ai.onnx"):
            return int(item.version)
    return 1


def raise_opset(model: Model, to: int) -> Light:
    """The model at opset `to`, or as it is where it is there already; value names stay.

    Raises:
        StageError: the opset is too old, or an operator can't be raised; names both versions.
    """
    light = split(model)
    have = opset_of(light.model)
    if have >= to:
        return light
    if have < OLDEST:
        raise StageError(f"the model is at opset {have}; {OLDEST} is the oldest that can be raised", where="opset")
    # To the converter weights may as well be inputs.
    raised = weightless(light)
    raised.graph.name = raised.graph.name or "main"  # the converter takes no graph without a name
    stand_ins = {i.name for i in raised.graph.input} - {i.name for i in light.model.graph.input}
    shapeless: set[str] = set()
    for output in raised.graph.output:
        if output.type.HasField("tensor_type") and not output.type.tensor_type.HasField("shape"):
            shapeless.add(output.name)
    try:
        raised = version_converter.convert_version(raised, to)
        # An output of two ranks, out of two branches, has no shape; onnx's checker wants one of every tensor.
        for output in raised.graph.output:
            if output.type.HasField("tensor_type"):
                output.type.tensor_type.shape.SetInParent()
        checker.check_model(raised)
    except (RuntimeError, ValueError, *_REFUSALS) as error:
        raise StageError(
            f"opset {have} can't be raised to {to}: {error}", where="opset", hint=f"export the model at opset {to}"
        ) from error
    inputs = [item for item in raised.graph.input if item.name not in stand_ins]
    del raised.graph.input[:]
    raised.graph.input.extend(inputs)
    # What was put in for the converter and the checker alone.
    for output in raised.graph.output:
        if output.name in shapeless:
            output.type.tensor_type.ClearField("shape")
    _keep_metadata(light.model, raised)
    return Light(raised, light.weights)


def _keep_metadata(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """The converter forgets each node's metadata; outputs keep their names, so it is found again by them."""
    metadata = {node.output[0]: node.metadata_props for graph in graphs(before) for node in graph.node if node.output}
    for graph in graphs(after):
        for node in graph.node:
            if node.output and not node.metadata_props and node.output[0] in metadata:
                node.metadata_props.extend(metadata[node.output[0]])
