"""Proved constants in the place of what computes them.

A proof or a comparison runs the unfused model on many feeds. To transpose every weight again on each of them, as
exporters write it, would take as long as all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from layerline.backends.light import Light
from layerline.graph.analysis.toposort import moving
from layerline.graph.fusion.firing import After
from layerline.graph.io.ir_convert import store


def constant_of(after: After) -> ir.TensorProtocol | None:
    """The tensor that a value has become; None where it is computed."""
    if after.nodes:
        return None
    return after.tensors.get(after.result)


def with_constants(light: Light, constants: Mapping[str, ir.TensorProtocol]) -> Light:
    """The model with these values stored in place of the nodes that compute them from nothing but constants."""
    out = light.copy()
    graph = out.model.graph
    # What depends on an input stays computed, even where a rule made it a constant.
    replaceable = constants.keys() - moving(graph)
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        outputs = set(filter(None, node.output))
        if outputs <= replaceable:
            # Sorted, so that the same model is stored the same way each time.
            for name in sorted(outputs):
                store(out, name, constants[name])
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    return out
