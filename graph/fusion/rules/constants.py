"""Constant nodes become initializers, so that every later rule and stage finds weights in one place."""

from __future__ import annotations

from layerline.graph.analysis.ir_queries import constant_tensor
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule


def run(work: Rewriting) -> None:
    for graph in work.graphs():
        for node in graph:
            if node.domain != "" or node.op_type != "Constant" or node.outputs[0].is_graph_output():
                continue
            tensor = constant_tensor(node)
            if tensor is None:
                work.decline(
                    RULE.name, node.outputs[0], f"Constant {node.outputs[0].name} holds no dense numeric tensor"
                )
            else:
                work.fold(RULE.name, node.outputs[0], tensor)


RULE = Rule("constants", "Constant nodes to initializers", run)
