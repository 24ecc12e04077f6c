"""Refuses files that are no valid ONNX for any runtime: a value that nothing computes or that is defined twice, an
operator set that is not imported, recursive functions. The error names the node.

onnx's own checker is stricter and refuses files that every runtime runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

import onnx

from layerline.backends.light import Light, bodies
from layerline.graph.io import inline_functions
from layerline.graph.io.proto_queries import defined, graphs, node_label, nodes
from layerline.pipeline.errors import StageError

_OWN = ("", "ai.onnx")
_MOST_AXES = 64
"""numpy takes no more."""


def refuse_broken(light: Light) -> None:
    """Refuses a model that can't be anyone's, by a StageError that names the node, and value, domain or function."""
    graph = light.model.graph
    stored = frozenset(light.weights)
    _refuse_doubled(light)
    _refuse_ends(graph)
    inline_functions.check_functions(light.model)
    _refuse_attributes(light.model)
    _refuse_versions(light.model.opset_import, "opset_import")
    for function in light.model.functions:
        _refuse_versions(function.opset_import, f"function {function.name}")
    # A model's own functions are an operator set as well.
    imported = {o.domain for o in light.model.opset_import} | {f.domain for f in light.model.functions}
    # The two spellings of ONNX's own domain are one.
    if not imported.isdisjoint(_OWN):
        imported.update(_OWN)
    for each in graphs(light.model):
        for node in each.node:
            if node.domain not in imported:
                raise StageError(
                    f"not valid ONNX: {node.op_type} is of the domain {node.domain or 'ai.onnx'!r}, which the model "
                    "does not import",
                    where=f"node {node_label(node)}",
                    hint="add it to the model's opset_import: onnx.helper.make_opsetid(domain, version)",
                )
    _refuse_undefined(graph.node, [output.name for output in graph.output], defined(graph) | stored)
    for function in light.model.functions:
        results = {name for node in function.node for name in node.output}
        _refuse_undefined(function.node, function.output, results | set(function.input))


def _refuse_ends(graph: onnx.GraphProto) -> None:
    """Refuses an input or output without a name, of an unknown element type, or of more axes than numpy takes."""
    for side, infos in (("input", graph.input), ("output", graph.output)):
        for info in infos:
            if not info.name:
                raise StageError(f"not valid ONNX: an {side} of the model has no name", where=f"graph {graph.name}")
            axes = len(info.type.tensor_type.shape.dim)
            if axes > _MOST_AXES:
                raise StageError(f"the {side} has {axes} axes; {_MOST_AXES} is the most", where=info.name)
            code = info.type.tensor_type.elem_type
            if code not in onnx.TensorProto.DataType.values():
                raise StageError(f"the {side} is of element type {code}, which ONNX has not", where=info.name)


def _refuse_versions(imports: Iterable[onnx.OperatorSetIdProto], where: str) -> None:
    """Refuses two versions of one operator set: the same operator may mean something else in each."""
    versions: dict[str, int] = {}
    for opset in imports:
        version = versions.setdefault(opset.domain or "ai.onnx", opset.version)
        if version != opset.version:
            what = f"not valid ONNX: it imports versions {version} and {opset.version} of {opset.domain or 'ai.onnx'!r}"
            raise StageError(what, where=where, hint="keep the version that its operators were written for")


def _refuse_doubled(light: Light) -> None:
    """Refuses a graph or function that gives one name to two values; an input may also be stored, as old files have it.

    Raises StageError: names the value, and all that define it.
    """
    for graph in graphs(light.model):
        stored: list[str] = []
        if graph is light.model.graph:
            stored += light.weights
        stored += [tensor.name for tensor in graph.initializer]
        stored += [sparse.values.name for sparse in graph.sparse_initializer]
        _refuse_twice([i.name for i in graph.input], stored, graph.node, f"graph {graph.name}")
    for function in light.model.functions:
        _refuse_twice(list(function.input), [], function.node, f"function {function.name}")
    # A call finds a function by these three.
    called = Counter((f.domain, f.name, f.overload) for f in light.model.functions)
    for (_, name, _), count in called.items():
        if count > 1:
            raise StageError(f"not valid ONNX: it is defined {count} times", where=f"function {name}")


def _refuse_twice(inputs: list[str], stored: list[str], graph_nodes: Iterable[onnx.NodeProto], where: str) -> None:
    makers: dict[str, list[str]] = {}
    for node in graph_nodes:
        for name in filter(None, node.output):
            makers.setdefault(name, []).append(f"node {node_label(node)}")
    input_counts = Counter(inputs)
    stored_counts = Counter(stored)
    for name in dict.fromkeys([*makers, *inputs, *stored]):
        definitions = ["an input"] * input_counts[name] + ["a stored tensor"] * stored_counts[name]
        definitions += makers.get(name, [])
        # Old files list what they store among the inputs.
        if len(definitions) > 1 and definitions != ["an input", "a stored tensor"]:
            what = f"not valid ONNX: {name!r} is defined {len(definitions)} times: {', '.join(definitions[:4])}"
            raise StageError(what, where=where, hint="give each value a name of its own")


def _refuse_attributes(model: onnx.ModelProto) -> None:
    """Refuses a node that has two attributes of one name, of which runtimes take either, or one without a type."""
    for node in nodes(model):
        where = f"node {node_label(node)}"
        for name, count in Counter(attribute.name for attribute in node.attribute).items():
            if count > 1:
                raise StageError(f"not valid ONNX: it has {count} attributes of the name {name!r}", where=where)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.UNDEFINED:
                raise StageError(f"not valid ONNX: its attribute {attribute.name!r} has no type", where=where)


def _refuse_undefined(graph_nodes: Iterable[onnx.NodeProto], outputs: Iterable[str], available: Set[str]) -> None:
    """Refuses a node that reads, or an output that is, what neither its graph nor one around it defines."""
    # Whatever the order of the nodes: onnxruntime sorts them itself.
    for node in graph_nodes:
        for name in node.input:
            if name and name not in available:
                what = f"not valid ONNX: it reads {name!r}, which is no input, no weight and no node's output"
                hint = "onnx.checker.check_model(model) says the same"
                raise StageError(what, where=f"node {node_label(node)}", hint=hint)
        for body in bodies(node):
            _refuse_undefined(body.node, [output.name for output in body.output], available | defined(body))
    for name in outputs:
        if name not in available:
            raise StageError("not valid ONNX: nothing computes it", where=f"output {name}")
