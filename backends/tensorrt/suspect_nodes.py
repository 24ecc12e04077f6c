"""Finds the nodes that a parser's message may be about when it names none: by its importer and attribute."""

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
    """The operator that a function such as `importScatterElements` imports, and the nodes of that operator.

    Nodes with an attribute that the message mentions come alone, if there are any.

    Args:
        function: the parser's function that refused.
        text: its message ("Unsupported reduction type").
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
    if not nodes:
        return "", []
    with_attribute = [node for node in nodes if _has_attribute(node, words)]
    return named[1], [_name(node) for node in with_attribute or nodes]


def _has_attribute(node: onnx.NodeProto, lower_names: set[str]) -> bool:
    return any(attribute.name.lower() in lower_names for attribute in node.attribute)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of a graph and of the bodies in it."""
    for node in graph.node:
        yield node
        for body in light.bodies(node):
            yield from _nodes(body)


def _name(node: onnx.NodeProto) -> str:
    if node.name:
        return str(node.name)
    for output in node.output:
        if output:
            return str(output)
    return ""
