"""The record of rewriting: where a rule fired or declined, and the piece of the graph that has to be proved of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.graph.analysis.assembly import Assembly
from layerline.graph.analysis.ir_queries import captures


class Declined(Exception):
    """A rule that matched but must not fire here; the message names the value it is about."""


@dataclass(frozen=True)
class Site:
    """Where a rule fires: the value it replaces, and the nodes whose bodies lead to it (empty in the main graph)."""

    rule: str
    value: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class After:
    """What computes a replaced value now, cut where values of the unfused model begin.

    Attributes:
        result: the name that holds the new value: of a node, of a tensor, or of another value of the unfused model.
        nodes: the new nodes, in order; empty when the value was replaced by one that was there.
        tensors: initializers that the unfused model doesn't have, by name.
    """

    result: str
    nodes: tuple[ir.Node, ...] = ()
    tensors: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)


@dataclass(frozen=True)
class Firing:
    """One application of a rule.

    Attributes:
        result: what holds the place's value now: the same name, or the value that was there already.
        sources: values that are gone, in topological order.
        modules: module paths of the nodes that computed them; the first is the main one.
        after: what to prove, by the unfused model's value: the replaced one, or, where a body was rewritten, the
            outputs of the main graph's node around it. Empty where the bytes are the same by construction.
    """

    site: Site
    result: str
    sources: tuple[str, ...]
    modules: tuple[str, ...]
    after: Mapping[str, After]


def cut(new: ir.Value, unfused_names: AbstractSet[str], *, made: bool) -> After:
    """What computes `new`, back to values of the unfused model: whoever has such a name has that model's numbers.

    `made` says that `new` itself was just made: it carries the name of what it replaces and is not that value yet.
    """
    nodes: list[ir.Node] = []
    # Copies, for rewriting goes on.
    copies = Assembly()
    tensors: dict[str, ir.TensorProtocol] = {}
    visited: set[ir.Value] = set()
    # Depth first: a node comes off the stack after everything that it reads, so the list can be run in order.
    pending: list[ir.Value | ir.Node | None] = [new]
    while pending:
        item = pending.pop()
        if isinstance(item, ir.Node):
            nodes.append(copies.copy(item))
            continue
        is_new = made and item is new
        if item is None or item in visited or (item.name in unfused_names and not is_new):
            continue
        visited.add(item)
        producer = item.producer()
        if producer is not None:
            # All outputs at once: a node is written once, whichever of them led to it.
            visited.update(producer.outputs)
            pending += [producer, *reversed((*producer.inputs, *captures(producer)))]
        elif item.const_value is not None:
            tensors[item.name or ""] = item.const_value
    return After(new.name or "", tuple(nodes), tensors)


def nearest_unfused_after(value: ir.Value, unfused_names: AbstractSet[str]) -> list[str]:
    """The nearest values downstream, in the same graph, that the unfused model has."""
    nearest: dict[str, None] = {}
    visited = {value}
    pending = [value]
    while pending:
        for use in pending.pop().uses():
            for output in use.node.outputs:
                if output.name in unfused_names and output.graph is value.graph:
                    nearest[output.name or ""] = None
                elif output not in visited:
                    visited.add(output)
                    pending.append(output)
    return list(nearest)
