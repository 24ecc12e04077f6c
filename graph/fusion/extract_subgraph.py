"""Cutting a rewritten graph where values of the unfused model begin: the piece that a proof runs."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import onnx
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import captures
from layerline.graph.fusion.rule import After


def cut(new: ir.Value, known: AbstractSet[str | None], *, made: bool) -> After:
    """What computes `new`, back to values that the unfused model has.

    Args:
        known: names of those values. A value of such a name has the unfused model's numbers, whoever computes it now.
        made: whether `new` itself was just made: it carries the name of what it replaces and is not that value yet.
    """
    nodes: list[onnx.NodeProto] = []
    tensors: dict[str, ir.TensorProtocol] = {}
    seen: set[ir.Value] = set()

    def visit(value: ir.Value) -> None:
        if value in seen or (value.name in known and not (made and value is new)):
            return
        producer = value.producer()
        seen.update(producer.outputs if producer is not None else [value])
        if producer is None:
            if value.const_value is not None:
                tensors[value.name or ""] = value.const_value
            return
        for read in (*producer.inputs, *captures(producer)):
            if read is not None:
                visit(read)
        nodes.append(ir.serde.serialize_node(producer))

    visit(new)
    return After(new.name or "", tuple(nodes), tensors)


def known_after(value: ir.Value, known: AbstractSet[str | None]) -> list[str]:
    """The nearest values downstream, in the same graph, that the unfused model has."""
    found: dict[str, None] = {}
    pending, seen = [value], {value}
    while pending:
        for use in pending.pop().uses():
            for output in use.node.outputs:
                if output.name in known and output.graph is value.graph:
                    found[output.name or ""] = None
                elif output not in seen:
                    seen.add(output)
                    pending.append(output)
    return list(found)
