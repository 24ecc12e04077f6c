"""Names that nothing in a model has yet."""

from __future__ import annotations

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import graph_values


def fresh_name(wanted: str, taken: set[str]) -> str:
    """Returns the first of `wanted`, `wanted_2`, `wanted_3`, … that is not in `taken`, and adds it there."""
    name = wanted
    number = 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


class FreshNames:
    """The names of a model's values and nodes; gives out only free ones.

    A body of If, Loop or Scan reads the values of the graphs around it, so no two graphs of a model may share a name.
    """

    def __init__(self, model: ir.Model) -> None:
        self._taken = value_names(model) | node_names(model)

    def fresh(self, name: str) -> str:
        """`name`, or the first of `name_2`, `name_3`, … that is free."""
        return fresh_name(name, self._taken)


def value_names(model: ir.Model) -> set[str]:
    """Names of all values of a model, bodies included."""
    names: set[str] = set()
    for graph in model.graphs():
        names.update(value.name for value in graph_values(graph) if value.name is not None)
    return names


def node_names(model: ir.Model) -> set[str]:
    """Names of all nodes of a model, bodies included."""
    names: set[str] = set()
    for graph in model.graphs():
        names.update(node.name for node in graph if node.name is not None)
    return names
