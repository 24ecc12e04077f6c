"""What rounding a layer's inputs and weights costs, computed from the plan and without the model's Q/DQ.

Relative errors of inputs and weights can't be added up: a channel that is small beside the others may count as much as
they do, and a signal may cancel where its rounding errors do not. So the layers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, helper, numpy_helper

from layerline.backends.base import Feed
from layerline.compare.compare_models import compare
from layerline.compare.value_types import infer
from layerline.graph.analysis.proto_queries import first_output, in_order
from layerline.graph.quantization import qdq
from layerline.graph.quantization.convert import Converted
from layerline.pipeline.report import OWN


def own_errors(converted: Converted, feeds: Sequence[Feed]) -> dict[str, float]:
    """The SQNR in dB of each layer with exact inputs, if it loses what the plan says and nothing else.

    Left out are layers that read activations in other types than 8-bit integers, or weights whose numbers the plan does
    not determine.
    """
    model, plan = converted.reference, converted.plan
    weights = qdq.stored_weights(model, plan, converted.rounded)
    activations = qdq.activations(plan)
    types = infer(model, [value.name for value in activations])
    rounded = model.copy()
    steps: list[NodeProto] = []
    replaced: dict[tuple[str, int], str] = {}
    unknown = set[str]()
    for value in plan.values:
        name = f"{value.name}/by plan/{value.dtype}"
        # A bias in int32 has steps far below those of the products.
        if value.dtype == "int32":
            continue
        if (value.name, value.dtype) in weights:
            rounded.weights[name] = ir.Tensor(weights[value.name, value.dtype])
        elif value in activations:
            limits = np.iinfo(value.dtype)
            zero_point = np.asarray(value.zero_point).item()
            numbers = [value.scales[0], limits.min - zero_point, limits.max - zero_point]
            tensors = np.array(numbers, types[value.name][0])
            constants = [f"{name}/{key}" for key in ("scale", "least", "greatest")]
            for constant, number in zip(constants, tensors, strict=True):
                rounded.model.graph.initializer.append(numpy_helper.from_array(np.asarray(number), constant))
            steps += _steps(value.name, name, *constants)
        else:
            unknown.update(reader for reader, _ in value.readers)
        replaced.update(dict.fromkeys(value.readers, name))
    layers = {reader for reader, _ in replaced} - unknown
    graph = rounded.model.graph
    for node in graph.node:
        layer = first_output(node)
        if layer in layers:
            node.input[:] = [replaced.get((layer, place), name) for place, name in enumerate(node.input)]
    ordered = in_order(graph.node, steps)
    del graph.node[:]
    graph.node.extend(ordered)
    # Layers alone are paired: what lies between them is computed from the reference's values all the same.
    rows = compare(model, rounded, feeds, isolated=True, pairs={name: name for name in layers})
    errors: dict[str, float] = {}
    for row in rows:
        own = row.extra.get(OWN)
        if row.name in layers and isinstance(own, int | float):
            errors[row.name] = float(own)
    return errors


def _steps(value: str, name: str, scale: str, least: str, greatest: str) -> list[NodeProto]:
    """Nodes that round and clip an activation, without QuantizeLinear."""
    return [
        helper.make_node("Div", [value, scale], [f"{name}/quotient"]),
        helper.make_node("Round", [f"{name}/quotient"], [f"{name}/rounded"]),
        helper.make_node("Clip", [f"{name}/rounded", least, greatest], [f"{name}/steps"]),
        helper.make_node("Mul", [f"{name}/steps", scale], [name]),
    ]
