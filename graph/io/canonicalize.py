"""Brings a foreign model into the form that the fusion rules expect. Each change is reported in a note."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from layerline.backends.light import Light, Model, bodies, rename, split
from layerline.graph.analysis.ir_queries import fresh_name
from layerline.graph.analysis.proto_queries import defined
from layerline.graph.io import inline_functions, onnx_files
from layerline.pipeline.errors import StageError


def prepare(model: Model) -> tuple[Light, list[str]]:
    """A copy whose operators all lie in the graph itself, with constants that are constants, and what was done.

    - The two spellings of ONNX's own domain become one.
    - Initializers that are also inputs become constants: they are the weights of old files, not inputs anyone feeds.
    - Model-local functions are inlined where the versions they ask for allow it.
    - No value in a body has the name of one around it.

    Raises:
        StageError: a sparse initializer, which neither the runtime's optimiser nor TensorRT reads.
    """
    light = split(model).copy()
    notes: list[str] = []
    out = light.model
    # Before version 4 of the format every initializer had to be an input.
    out.ir_version = max(out.ir_version, 4)
    for graph in onnx_files.graphs(out):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise StageError("sparse initializers are not supported", where=name, hint="store the tensor densely")
        stored = {tensor.name for tensor in graph.initializer}
        if graph is out.graph:
            stored = light.stored
        doubled = [item.name for item in graph.input if item.name in stored]
        if doubled:
            fed = [item for item in graph.input if item.name not in stored]
            del graph.input[:]
            graph.input.extend(fed)
            notes.append(f"{len(doubled)} initializers were also inputs ({doubled[0]}, …); they are constants now")
    # Before functions are looked up by their domain.
    named: list[onnx.NodeProto | onnx.OperatorSetIdProto] = [*onnx_files.nodes(out), *out.opset_import]
    for function in out.functions:
        named += function.opset_import
    for item in named:
        if item.domain == "ai.onnx":
            item.domain = ""
    if out.functions:
        inlined, note = inline_functions.inline(light.whole())
        light = split(inlined)
        notes.append(note)
    shadowing = _unshadow(light)
    if shadowing:
        notes.append(f"{len(shadowing)} values in bodies were called like others around them ({shadowing[0]}, …)")
    return light, notes


def _unshadow(light: Light) -> list[str]:
    """Gives what a body calls like something around it a name of its own, in place; returns the names it had.

    ONNX forbids such names and onnxruntime reads them, the innermost first; moved from one graph into another, a node
    would read something else.
    """
    model = light.model
    taken = set(light.weights)
    for each in onnx_files.graphs(model):
        taken |= defined(each)
    shadowing: list[str] = []

    def visit(graph: onnx.GraphProto, around: frozenset[str], renamed: Mapping[str, str]) -> None:
        # Sorted, so that the same file always gets the same new names.
        new_names = {name: fresh_name(name, taken) for name in sorted(defined(graph) & around)}
        shadowing.extend(new_names)
        renamed = {**renamed, **new_names}
        if renamed:
            rename(graph, renamed, nested=False)
        within = around | defined(graph)
        for node in graph.node:
            for body in bodies(node):
                visit(body, within, renamed)

    visit(model.graph, frozenset(light.weights), {})
    return shadowing
