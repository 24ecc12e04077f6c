"""Values behind nodes that choose elements by their size, such as TopK: they follow the choice that a runtime makes.

Of two equal or nearly equal elements, runtimes may choose either. What is gathered by the indices then differs by any
amount, and both sides are right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from layerline.compare.topk_indices import pointers
from layerline.graph.analysis.ir_queries import first_output, names, node_label, reads


@dataclass(frozen=True)
class Choices:
    """The choices that a graph makes.

    Attributes:
        labels: by value that holds the chosen indices, what a message calls the node that chooses.
        behind: by value of the graph, the index values that it follows; values that follow none are left out.
    """

    labels: Mapping[str, str]
    behind: Mapping[str, frozenset[str]]

    def differing(self, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> set[str]:
        """The index values that both sides have, and that are not equal."""
        result = set[str]()
        for name in self.labels:
            if name in expected and name in actual and not np.array_equal(expected[name], actual[name]):
                result.add(name)
        return result

    def followed(self, name: str, indices: Collection[str]) -> set[str]:
        """The labels of those of the choices `indices` that a value follows."""
        return {self.labels[index] for index in self.behind.get(name, ()) if index in indices}


def choices(graph: ir.Graph) -> Choices:
    """Finds them in the main graph."""
    pointed = pointers(graph)
    labels: dict[str, str] = {}
    behind: dict[str, frozenset[str]] = {}
    for node in graph:
        follows = frozenset[str]()
        for name in names(reads(node)):
            follows |= behind.get(name, frozenset())
            if name in labels:
                follows |= {name}
        index = _index_output(node)
        if index:
            labels[index] = f"{node.op_type} {node.name}" if node.name else node_label(node)
        for name in names(node.outputs):
            behind[name] = follows
            # The values of a sorted TopK are right in any choice. In no order, they are those at the indices.
            # NonZero and NonMaxSuppression point into no single tensor, so even their own row can't be judged.
            if index and name not in pointed and not _is_sorted_topk(node):
                behind[name] = follows | {index}
    for name, pointer in pointed.items():
        # Indices, behind a Cast or Reshape too, are judged by the elements that they point at.
        behind[name] = behind.get(pointer.data, frozenset())
    return Choices(labels, {name: indices for name, indices in behind.items() if indices})


def _index_output(node: ir.Node) -> str:
    """The value that holds the places of the elements that a node chooses; empty where it chooses none."""
    if node.op_type == "TopK" and len(node.outputs) > 1:
        return node.outputs[1].name or ""
    if node.op_type in {"ArgMax", "ArgMin", "NonMaxSuppression", "NonZero"}:
        return first_output(node)
    return ""


def _is_sorted_topk(node: ir.Node) -> bool:
    return node.op_type == "TopK" and node.attributes.get_int("sorted", 1) != 0
