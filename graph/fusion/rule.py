"""What a rewrite rule is, and the conditions that many rules share.

A rule file says what becomes what. Naming, recording and pruning are done in graph/fusion/rewriter.py, the proof in
graph/fusion/verify_rewrites.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import onnx_ir as ir

from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewrite, Rewriting


@dataclass(frozen=True)
class FusionRule:
    """One rewrite: its name in pipe.yaml, and what applies it wherever it fits."""

    name: str
    run: Callable[[Rewriting], None]


def everywhere(name: str) -> Callable[[Callable[[Rewriting], None]], FusionRule]:
    """A rule that looks for its places itself."""
    return lambda run: FusionRule(name, run)


def each(name: str, *ops: str) -> Callable[[Callable[[ir.Node, Rewriting], None]], FusionRule]:
    """A rule that does more at a node of these operators than to replace its first output; it may raise Declined."""

    def rule(apply: Callable[[ir.Node, Rewriting], None]) -> FusionRule:
        def run(work: Rewriting) -> None:
            for graph in work.graphs():
                for node in graph:
                    # Only ONNX's own operators: those of other domains may have the same names.
                    if node.domain == "" and node.op_type in ops:
                        try:
                            apply(node, work)
                        except Declined as declined:
                            work.decline(name, node.outputs[0], str(declined))

        return FusionRule(name, run)

    return rule


def on(name: str, *ops: str) -> Callable[[Rewrite], FusionRule]:
    """A rule tried at every node of the given operators.

    `rewrite(node, tape, work)` returns the value that replaces the node's first output: the output of a node it made on
    the tape, or a value that is there already. None means no match; raising Declined means a match that must not fire.
    """
    return lambda rewrite: each(name, *ops)(lambda node, work: work.attempt(name, node, rewrite))


def sole(value: ir.Value | None, reader: ir.Node) -> None:
    """Declines unless `reader` is the only one that sees `value`."""
    assert value is not None
    _refuse_readers(value, {reader: None}, "a second")


def move_shapes_behind(value: ir.Value | None, node: ir.Node) -> None:
    """Lets nodes that read only the shape of `value` read that of `node`'s output, which is the same.

    Exporters take sizes from the earliest value that has them, and would keep a Conv apart from what follows it.
    """
    assert value is not None
    producer = value.producer()
    readers = [reader for reader in value.consumers() if reader.op_type == "Shape" and reader.domain == ""]
    others = [other for other in node.inputs if other is not value and other is not None]
    if not readers or producer is None or any(other.producer() is not None for other in others):
        return
    graph = node.graph
    if graph is None or any(place.graph is not graph for place in (producer, *readers)):
        return
    # Directly behind its producer, the node is computed before all of the readers.
    graph.remove(node)
    graph.insert_after(producer, node)
    for reader in readers:
        reader.replace_input_with(0, node.outputs[0])


def only_within(node: ir.Node, *inputs: ir.Value | None) -> None:
    """Declines unless everything between `inputs` and `node` is read only there, so that all of it can go."""
    # The node and all that it is computed from, up to `inputs`; Constant nodes may be shared and are left out.
    region = {node: None}
    pending = [node]
    while pending:
        for value in pending.pop().inputs:
            if value is None or value in inputs:
                continue
            producer = value.producer()
            if producer is not None and producer not in region and producer.op_type != "Constant":
                region[producer] = None
                pending.append(producer)
    for inner in region:
        for value in inner.outputs:
            if inner is not node:
                _refuse_readers(value, region, "another")


def _refuse_readers(value: ir.Value, allowed: Collection[ir.Node], other: str) -> None:
    """Declines where anything but these nodes sees a value."""
    producer = value.producer()
    what = f"{producer.op_type} output {value.name}" if producer is not None else f"{value.name}"
    if value.is_graph_output():
        raise Declined(f"{what} is a graph output")
    for node in value.consumers():
        if node not in allowed:
            raise Declined(f"{what} has {other} consumer {node.outputs[0].name}")
