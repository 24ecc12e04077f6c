"""Nodes and stored tensors that no output depends on."""

from __future__ import annotations

from layerline.graph.fusion.rewriter import Rewriting, drop_initializer
from layerline.graph.fusion.rule import Rule


def run(work: Rewriting) -> None:
    for graph in list(work.graphs()):
        work.prune(reversed(list(graph)))
        for value in list(graph.initializers.values()):
            if not value.uses():
                drop_initializer(value)


RULE = Rule("dead-code", "nodes and initializers that no output depends on", run)
