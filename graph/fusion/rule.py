"""What a rewrite rule is, and the words it is written in: match, decline with a reason, replace.

A rule file says what becomes what; naming, recording, pruning and proof are the machine's (graph/fusion/rewriter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import consumers

if TYPE_CHECKING:
    from layerline.graph.fusion.rewriter import Rewriting


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
        result: the name that holds the new value inside `nodes`, or an initializer's, or another value of the unfused
            model.
        nodes: the new nodes, in order; empty when the value was replaced by one that was there.
        tensors: initializers that the unfused model doesn't have, by name.
    """

    result: str
    nodes: tuple[onnx.NodeProto, ...] = ()
    tensors: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)


@dataclass(frozen=True)
class Firing:
    """One application of a rule.

    Attributes:
        site: rule and place.
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


@dataclass(frozen=True)
class Decline:
    """A rule that matched and did not fire, and why."""

    site: Site
    reason: str


@dataclass(frozen=True)
class Rule:
    """One rewrite, switched on and off by its name.

    Attributes:
        name: as written in pipe.yaml.
        summary: one line for the documentation.
        run: applies it wherever it fits.
    """

    name: str
    summary: str
    run: Callable[[Rewriting], None]


Rewrite = Callable[[ir.Node, Tape, "Rewriting"], "ir.Value | None"]


def on(name: str, summary: str, ops: Iterable[str], rewrite: Rewrite) -> Rule:
    """A rule tried at every node of the given operators.

    `rewrite(node, tape, work)` returns the value that replaces the node's first output: the output of a node it made on
    the tape, or a value that is there already. None means no match; raising Declined means a match that must not fire.
    """
    wanted = frozenset(ops)

    def run(work: Rewriting) -> None:
        for graph in work.graphs():
            for node in graph:
                if node.domain == "" and node.op_type in wanted:
                    work.attempt(name, node, rewrite)

    return Rule(name, summary, run)


def sole(value: ir.Value | None, reader: ir.Node) -> None:
    """Declines unless `reader` is the only one that sees `value`."""
    assert value is not None
    producer = value.producer()
    what = f"{producer.op_type} output {value.name}" if producer else f"{value.name}"
    if value.is_graph_output():
        raise Declined(f"{what} is a graph output")
    others = [n for n in consumers(value) if n is not reader]
    if others:
        raise Declined(f"{what} has a second consumer {others[0].outputs[0].name}")


def only_within(node: ir.Node, *inputs: ir.Value | None) -> None:
    """Declines unless everything between `inputs` and `node` is read only there, so that all of it can go."""
    region, pending = {node}, [node]
    while pending:
        for value in pending.pop().inputs:
            producer = value.producer() if value is not None and value not in inputs else None
            if producer is not None and producer not in region and producer.op_type != "Constant":
                region.add(producer)
                pending.append(producer)
    for inner in region - {node}:
        for value in inner.outputs:
            if value.is_graph_output():
                raise Declined(f"{inner.op_type} output {value.name} is a graph output")
            outside = [c for c in consumers(value) if c not in region]
            if outside:
                raise Declined(f"{inner.op_type} output {value.name} has another consumer {outside[0].outputs[0].name}")
