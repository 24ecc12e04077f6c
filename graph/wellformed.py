"""What makes a file no ONNX at all, told by node: a value that nothing computes, an operator set that is not imported.

onnx's checker refuses more than that, files that every runtime runs among them; these two no runtime takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import onnx

from layerline.backends.light import Light, bodies
from layerline.graph import io
from layerline.pipeline.errors import StageError

_OWN = ("", "ai.onnx")


def refuse_broken(light: Light) -> None:
    """Refuses a model that can't be anyone's.

    Raises:
        StageError: names the node, and the value or the domain.
    """
    graph, stored = light.model.graph, frozenset(light.weights)
    imported = {o.domain for o in light.model.opset_import} | {f.domain for f in light.model.functions}
    for some in io.graphs(light.model):
        for node in some.node:
            if not {node.domain, *(_OWN if node.domain in _OWN else ())} & imported:
                raise StageError(
                    f"not valid ONNX: {node.op_type} is of the domain {node.domain or 'ai.onnx'!r}, which the model "
                    "does not import",
                    where=f"node {_called(node)}",
                    hint="add it to the model's opset_import: onnx.helper.make_opsetid(domain, version)",
                )
    for node, name in _undefined(graph, stored):
        raise StageError(
            f"not valid ONNX: it reads {name!r}, which is no input, no weight and no node's output",
            where=f"node {_called(node)}",
            hint="onnx.checker.check_model(model) says the same",
        )
    made = _made(graph) | stored
    for output in graph.output:
        if output.name not in made:
            raise StageError("not valid ONNX: nothing computes it", where=f"output {output.name}")


def _undefined(graph: onnx.GraphProto, outer: Set[str]) -> Iterator[tuple[onnx.NodeProto, str]]:
    known = outer | _made(graph)
    for node in graph.node:
        yield from ((node, name) for name in node.input if name and name not in known)
        for body in bodies(node):
            yield from _undefined(body, known)


def _made(graph: onnx.GraphProto) -> set[str]:
    """Every name that the graph itself gives a value, whatever the order of its nodes."""
    named: Iterable[str] = (x.name for x in (*graph.input, *graph.initializer))
    sparse = (s.values.name for s in graph.sparse_initializer)
    return {*named, *sparse, *(name for node in graph.node for name in node.output)}


def _called(node: onnx.NodeProto) -> str:
    return node.name or f"{node.op_type} of {next(filter(None, node.output), 'nothing')}"
