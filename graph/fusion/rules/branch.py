"""If whose condition is a constant: the branch that is always taken moves out, the other goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule


@dataclass
class _Moved:
    """Nodes and tensors of a branch on their way out, in the form of a tape."""

    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)


def run(work: Rewriting) -> None:
    for graph in work.graphs():
        for node in graph:
            if node.op_type != "If" or node.domain != "":
                continue
            condition = constant(node.inputs[0])
            if condition is not None and condition.size == 1:
                try:
                    _inline(node, bool(condition.item()), work)
                except Declined as declined:
                    work.decline(RULE.name, node.outputs[0], str(declined))


def _inline(node: ir.Node, taken: bool, work: Rewriting) -> None:
    branch_name = "else_branch"
    if taken:
        branch_name = "then_branch"
    body = node.attributes[branch_name].as_graph()
    ends = list(body.outputs)
    for old, end in zip(node.outputs, ends, strict=True):
        producer = end.producer()
        is_computed = producer is not None and producer.graph is body
        if not is_computed or ends.count(end) > 1:
            raise Declined(f"branch output {end.name} of If {old.name} is not computed in the branch, or given twice")
    if node.outputs and not work.permits(RULE.name, node.outputs[0]):
        return
    moved = _Moved(list(body), list(body.initializers.values()))
    # A node can't move while its graph still holds on to it.
    body.outputs.clear()
    body.initializers.clear()
    body.remove(moved.nodes)
    work.release(moved.nodes, moved.initializers)
    work.swap(RULE.name, list(zip(node.outputs, ends, strict=True)), moved)


RULE = Rule("constant-branch", "If whose condition is constant, replaced by the branch it takes", run)
