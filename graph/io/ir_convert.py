"""A model in onnx_ir's form, and back; its weights stay the arrays they are."""

from __future__ import annotations

import onnx_ir as ir

from layerline.backends.light import Light, Model, split, travels
from layerline.pipeline.errors import StageError, first_line


def to_ir(model: Model) -> ir.Model:
    """A model in onnx_ir's form; its tensors share their memory with those of `model`, where that is in two parts.

    Raises StageError for what ONNX has not, such as a value of an unknown element type.
    """
    light = split(model)
    try:
        out = ir.serde.deserialize_model(light.stand_ins(light.weights))
    except ir.serde.SerdeError as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise StageError(f"not valid ONNX: {first_line(str(root))}", where="model") from error
    for name, weight in light.weights.items():
        out.graph.initializers[name].const_value = weight
    return out


def from_ir(model: ir.Model) -> Light:
    """The two parts of a model, which loses its large initializers; they share their memory with it."""
    weights = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        if travels(tensor.dtype.value, tensor.nbytes):
            weights[name] = tensor
            del model.graph.initializers[name]
    return Light(ir.serde.serialize_model(model), weights)


def store(light: Light, name: str, tensor: ir.TensorProtocol) -> None:
    """Adds a tensor to a model: beside the graph, or to it where it is small."""
    if travels(tensor.dtype.value, tensor.nbytes):
        light.weights[name] = tensor
    else:
        light.model.graph.initializer.append(ir.serde.serialize_tensor(tensor))
        light.model.graph.initializer[-1].name = name
