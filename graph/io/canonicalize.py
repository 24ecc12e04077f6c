"""What has to be put straight before any rule looks at a foreign model; each change is told in a note."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from layerline.backends.light import Light, Model, bodies, rename, split
from layerline.graph.analysis.fresh_names import fresh_name
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
    light, notes = split(model).copy(), []
    out = light.model
    # Before version 4 of the format every initializer had to be an input.
    out.ir_version = max(out.ir_version, 4)
    for graph in onnx_files.graphs(out):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise StageError("sparse initializers are not supported", where=name, hint="store the tensor densely")
        stored = light.stored if graph is out.graph else {t.name for t in graph.initializer}
        if doubled := [i.name for i in graph.input if i.name in stored]:
            kept = [i for i in graph.input if i.name not in stored]
            del graph.input[:]
            graph.input.extend(kept)
            notes.append(f"{len(doubled)} initializers were also inputs ({doubled[0]}, …); they are constants now")
    _one_domain(out)
    if out.functions:
        inlined, note = inline_functions.inline(light.whole())
        light = split(inlined)
        notes.append(note)
    if shadowing := _unshadow(light):
        notes.append(f"{len(shadowing)} values in bodies were called like others around them ({shadowing[0]}, …)")
    return light, notes


def _one_domain(model: onnx.ModelProto) -> None:
    for item in (*onnx_files.nodes(model), *model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if item.domain == "ai.onnx":
            item.domain = ""


def _unshadow(light: Light) -> list[str]:
    """Gives what a body calls like something around it a name of its own, in place; returns the names it had.

    ONNX forbids such names and onnxruntime reads them, the innermost first; moved from one graph into another, a node
    would read something else.
    """
    model = light.model
    taken = {n for g in onnx_files.graphs(model) for n in _defined(g)} | light.weights.keys()
    found: list[str] = []

    def visit(graph: onnx.GraphProto, around: frozenset[str], renamed: Mapping[str, str]) -> None:
        own = {n: fresh_name(n, taken) for n in sorted(_defined(graph) & around)}
        found.extend(own)
        renamed = {**renamed, **own}
        if renamed:
            rename(graph, renamed, nested=False)
        within = around | _defined(graph)
        for node in graph.node:
            for body in bodies(node):
                visit(body, within, renamed)

    visit(model.graph, frozenset(light.weights), {})
    return found


def _defined(graph: onnx.GraphProto) -> set[str]:
    stored = {t.name for t in graph.initializer}
    return stored | {i.name for i in graph.input} | {o for n in graph.node for o in n.output if o}
