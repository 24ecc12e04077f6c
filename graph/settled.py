"""Proved constants in the place of what computes them.

A proof or a comparison runs the unfused model on many feeds. To transpose every weight again on each of them, as
exporters write it, would take as long as all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from layerline.backends.light import Light
from layerline.graph.exchange import store
from layerline.graph.order import moving, reads
from layerline.graph.rule import After


def folded(after: After) -> ir.TensorProtocol | None:
    """The tensor that a value has become; None where it is still computed."""
    return None if after.nodes else after.tensors.get(after.result)


def settled(light: Light, constants: Mapping[str, ir.TensorProtocol], wanted: Iterable[str] = ()) -> Light:
    """The model with these values stored; what only they needed is gone, unless it is wanted. Values that depend on an
    input are left."""
    out = light.copy()
    graph, changing = out.model.graph, moving(out.model.graph)
    kept, needed = [], {o.name for o in graph.output} | set(wanted)
    for node in reversed(graph.node):
        made = {o for o in node.output if o}
        fixed = made.isdisjoint(changing)
        if fixed and made <= constants.keys():
            for name in sorted(made):
                store(out, name, constants[name])
        elif not fixed or not made.isdisjoint(needed):
            kept.append(node)
            needed.update(reads(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    return out
