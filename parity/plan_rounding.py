"""What rounding a layer's inputs and weights costs, computed from the plan and without the model's Q/DQ.

Relative errors of inputs and weights can't be added up: a channel that is small beside the others may count as much as
they do, and a signal may cancel where its rounding errors do not. So the layers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.compare.compare_models import compare
from layerline.compare.value_pairs import computed_values
from layerline.compare.value_types import infer
from layerline.graph.analysis.ir_queries import add_initializer, copied, first_output, values_by_name
from layerline.graph.quantization import qdq
from layerline.graph.quantization.convert import Converted
from layerline.pipeline.report import OWN

_FP8 = "float8e4m3fn"
_ROUNDED = ("int8", "uint8", _FP8)  # what a model brings may be other types


def own_errors(converted: Converted, feeds: Sequence[Feed]) -> dict[str, float]:
    """The SQNR in dB of each layer with exact inputs, if it loses what the plan says and nothing else.

    Left out are layers that read activations of which the plan has more than one scale, or weights whose numbers it
    does not determine.
    """
    model, plan = converted.reference, converted.plan
    weights = qdq.stored_weights(model, plan, converted.rounded)
    activations = [value for value in plan.values if value.role == "activation" and len(value.scales) == 1]
    types = infer(model, [value.name for value in activations])
    rounded = copied(model)
    graph = rounded.graph
    exact = values_by_name(graph)
    replaced: dict[tuple[str, int], ir.Value] = {}
    unknown = set[str]()
    for value in plan.values:
        name = f"{value.name}/by plan/{value.dtype}"
        # A bias in int32 has steps far below those of the products.
        if value.dtype == "int32":
            continue
        if (value.name, value.dtype) in weights:
            by_plan = add_initializer(graph, name, weights[value.name, value.dtype])
        elif value in activations and value.dtype in _ROUNDED and value.name in types:
            numbers = np.array([value.scales[0], *_limits(value)], types[value.name][0])
            constants: list[ir.Value] = []
            for key, number in zip(("scale", "least", "greatest"), numbers, strict=True):
                constants.append(add_initializer(graph, f"{name}/{key}", np.asarray(number)))
            by_plan = _rounded(graph, exact[value.name], name, constants, value.dtype)
        else:
            unknown.update(reader for reader, _ in value.readers)
            continue
        replaced.update(dict.fromkeys(value.readers, by_plan))
    # Q/DQ that a model brings may be read by another pair, which the float model does not have.
    layers = {reader for reader, _ in replaced}.intersection(computed_values(graph)) - unknown
    for node in graph:
        layer = first_output(node)
        for place in range(len(node.inputs)):
            if layer in layers and (layer, place) in replaced:
                node.replace_input_with(place, replaced[layer, place])
    # Layers alone are paired: what lies between them is computed from the reference's values all the same.
    rows = compare(model, rounded, feeds, isolated=True, pairs={name: name for name in layers})
    errors: dict[str, float] = {}
    for row in rows:
        own = row.extra.get(OWN)
        if row.name in layers and isinstance(own, int | float):
            errors[row.name] = float(own)
    return errors


def _limits(value: Any) -> tuple[float, float]:
    """The least and the greatest number of steps from zero."""
    if value.dtype == _FP8:
        return -448.0, 448.0
    limits, zero_point = np.iinfo(value.dtype), np.asarray(value.zero_point).item()
    return limits.min - zero_point, limits.max - zero_point


def _rounded(graph: ir.Graph, value: ir.Value, name: str, constants: Sequence[ir.Value], dtype: str) -> ir.Value:
    """Adds nodes that clip and round an activation, without QuantizeLinear; returns the rounded value."""
    scale, *limits = constants
    nodes = [ir.node("Div", [value, scale], name="")]
    nodes.append(ir.node("Clip", [nodes[-1].outputs[0], *limits], name=""))
    if dtype == _FP8:
        nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(ir.DataType.FLOAT8E4M3FN)}, name=""))
        assert scale.dtype is not None
        nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(scale.dtype)}, name=""))
    else:
        nodes.append(ir.node("Round", nodes[-1].outputs, name=""))
    nodes.append(ir.node("Mul", [nodes[-1].outputs[0], scale], name=""))
    for index, node in enumerate(nodes):
        node.outputs[0].name = f"{name}/{index}"
    nodes[-1].outputs[0].name = name
    maker = value.producer()
    if maker is None:
        graph.insert_before(graph[0], nodes)
    else:
        graph.insert_after(maker, nodes)
    return nodes[-1].outputs[0]
