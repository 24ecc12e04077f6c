"""Which nodes a parser means that names none: by the importer that refused, and the attribute that it speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerline.backends import light

if TYPE_CHECKING:
    import onnx

_IMPORTER = re.compile(r"^import(\w+)$")


def suspects(function: str, text: str, path: Path) -> tuple[str, list[str]]:
    """The operator that `importScatterElements` imports, and its nodes: those that have the attribute told, if any has.

    Args:
        function: the parser's function that refused.
        text: what it says ("Unsupported reduction type").
        path: the model's file.

    Returns:
        Operator and names of nodes (of one without a name, that of its first output); empty where no node is of it.
    """
    import onnx

    named = _IMPORTER.match(function)
    if named is None:
        return "", []
    nodes = [n for n in _nodes(onnx.load(str(path), load_external_data=False).graph) if n.op_type == named[1]]
    words = set(re.findall(r"\w+", text.lower()))
    told = [n for n in nodes if words & {a.name.lower() for a in n.attribute}]
    return (named[1], [_name(n) for n in told or nodes]) if nodes else ("", [])


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of a graph and of the bodies in it."""
    for node in graph.node:
        yield node
        for body in light.bodies(node):
            yield from _nodes(body)


def _name(node: onnx.NodeProto) -> str:
    return node.name or next((o for o in node.output if o), "")
