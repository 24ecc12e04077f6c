"""Brings a foreign model into the form that the fusion rules expect. Each change is reported in a note."""

from __future__ import annotations

import onnx_ir as ir

from layerline.backends.light import Model
from layerline.graph.analysis.ir_queries import copied, fresh_name, graph_values, names, subgraphs, value_names
from layerline.graph.io import inline_functions
from layerline.graph.io.ir_convert import as_ir


def prepare(model: Model) -> tuple[ir.Model, list[str]]:
    """A copy whose operators all lie in the graph itself, with constants that are constants, and what was done.

    The two spellings of ONNX's own domain become one; initializers that are also inputs (the weights of old files)
    become constants; functions are inlined where their versions allow it; no value in a body has the name of one
    around it. Raises StageError: a sparse initializer, which neither the runtime's optimiser nor TensorRT reads.
    """
    out = copied(as_ir(model))
    notes: list[str] = []
    # Before version 4 of the format every initializer had to be an input.
    out.ir_version = max(out.ir_version, 4)
    for graph in out.graphs():
        doubled = [value for value in graph.inputs if value.is_initializer()]
        for value in doubled:
            graph.inputs.remove(value)
        if doubled:
            notes.append(f"{len(doubled)} initializers were also inputs ({doubled[0].name}, …); they are constants now")
    # onnx_ir spells the domain of nodes one way already.
    for imports in (out.opset_imports, *(function.opset_imports for function in out.functions.values())):
        if "ai.onnx" in imports:
            imports.setdefault("", imports.pop("ai.onnx"))
    if out.functions:
        out, note = inline_functions.inline(out)
        notes.append(note)
    shadowing = _unshadow(out)
    if shadowing:
        notes.append(f"{len(shadowing)} values in bodies were called like others around them ({shadowing[0]}, …)")
    return out, notes


def _unshadow(model: ir.Model) -> list[str]:
    """Gives what a body calls like something around it a name of its own, in place; returns the names it had.

    ONNX forbids such names and onnxruntime reads them, the innermost first; moved from one graph into another, a node
    would read something else.
    """
    taken = value_names(model)
    shadowing: list[str] = []

    def visit(graph: ir.Graph, around: frozenset[str]) -> None:
        # Sorted, so that the same file always gets the same new names.
        named = sorted((value.name, value) for value in graph_values(graph) if value.name in around)
        for name, value in named:
            shadowing.append(name)
            value.name = fresh_name(name, taken)
        within = around | set(names(graph_values(graph)))
        for node in graph:
            for body in subgraphs(node):
                visit(body, within)

    visit(model.graph, frozenset())
    return shadowing
