"""Cutting a rewritten graph where values of the unfused model begin: the piece that a proof runs."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import onnx
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import captures
from layerline.graph.fusion.firing import After


def cut(new: ir.Value, unfused_names: AbstractSet[str], *, made: bool) -> After:
    """What computes `new`, back to values that the unfused model has.

    Args:
        unfused_names: names of those values. A value of such a name has the unfused model's numbers, whoever computes
            it now.
        made: whether `new` itself was just made: it carries the name of what it replaces and is not that value yet.
    """
    nodes: list[onnx.NodeProto] = []
    tensors: dict[str, ir.TensorProtocol] = {}
    visited: set[ir.Value] = set()

    def visit(value: ir.Value) -> None:
        is_new = made and value is new
        if value in visited or (value.name in unfused_names and not is_new):
            return
        producer = value.producer()
        if producer is None:
            visited.add(value)
            if value.const_value is not None:
                tensors[value.name or ""] = value.const_value
            return
        # All outputs at once: a node is written once, whichever of them led to it.
        visited.update(producer.outputs)
        for read in (*producer.inputs, *captures(producer)):
            if read is not None:
                visit(read)
        # After everything that it reads: the order of the list is one that can be run.
        nodes.append(ir.serde.serialize_node(producer))

    visit(new)
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
