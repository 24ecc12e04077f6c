"""Evaluating the part of a graph that depends on constants alone, on the runtime that the rest will run on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import Array
from layerline.graph.io.ir_convert import store
from layerline.pipeline.errors import StageError


def evaluate(nodes: Sequence[ir.Node], wanted: Iterable[ir.Value], model: ir.Model) -> dict[str, Array]:
    """Runs `nodes` (in order, fed by constants only) and returns the wanted values by name.

    Raises:
        StageError: the runtime has no kernel for one of them, or one of them fails.
    """
    light = _submodel(nodes, wanted, model)
    try:
        outputs = OnnxRuntime(threads=1, few_runs=True).open(light).run({})
        return {name: np.asarray(array) for name, array in outputs.items()}
    except StageError as error:
        where = light.model.graph.output[0].name
        raise StageError(f"onnxruntime can't compute it ({error.what.splitlines()[0]})", where=where) from error


def _submodel(nodes: Sequence[ir.Node], wanted: Iterable[ir.Value], model: ir.Model) -> Light:
    computed: set[ir.Value] = set()
    for node in nodes:
        computed.update(node.outputs)
    constants: dict[str | None, ir.Value] = {}
    for node in nodes:
        constants.update((value.name, value) for value in node.inputs if value is not None and value not in computed)
    outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in wanted]
    graph = onnx.helper.make_graph([ir.serde.serialize_node(n) for n in nodes], "constants", [], outputs)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    light = Light(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version), {})
    for name, value in constants.items():
        assert value.const_value is not None and name
        store(light, name, value.const_value)
    return light
