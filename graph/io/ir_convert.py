"""From what was read to onnx_ir's form, in which weights stay the arrays they are."""

from __future__ import annotations

import onnx_ir as ir

from layerline.backends.light import Light, Model, split
from layerline.graph.io.proto_queries import graphs
from layerline.pipeline.errors import StageError, first_line


def as_ir(model: Model | Light) -> ir.Model:
    """A model in onnx_ir's form, which is `model` itself where it has that form already.

    Its tensors share their memory with those of `model`, where that is in two parts. Nodes stand behind what they read.
    Raises StageError: what ONNX has not, or a sparse initializer, which onnx_ir can't hold.
    """
    if isinstance(model, ir.Model):
        return model
    light = split(model)
    for graph in graphs(light.model):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise StageError("sparse initializers are not supported", where=name, hint="store the tensor densely")
    try:
        out = ir.serde.deserialize_model(light.stand_ins(light.weights))
    except ir.serde.SerdeError as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise StageError(f"not valid ONNX: {first_line(str(root))}", where="model") from error
    for name, weight in light.weights.items():
        out.graph.initializers[name].const_value = weight
    for body in out.graph.subgraphs():
        for output in body.outputs:
            if output.graph is not body:
                what = f"not valid ONNX: a branch or loop returns {output.name!r}, which its body does not compute"
                raise StageError(what, where="model", hint="put an Identity in front of it")
    # Runtimes sort nodes themselves, passes over the graph do not.
    try:
        out.graph.sort()
    except ValueError as error:
        raise StageError("not valid ONNX: nodes read each other's values in a circle", where="model") from error
    return out
