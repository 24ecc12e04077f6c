"""What rounding a layer's inputs and weights costs, computed from the plan and without the model's Q/DQ.

Relative errors of inputs and weights can't be added up: a channel that is small beside the others may count as much as
they do, and a signal may cancel where its rounding errors do not. So the layers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper

from layerline.backends.base import Feed
from layerline.compare.compare_models import compare
from layerline.compare.value_pairs import computed_values
from layerline.compare.value_types import infer
from layerline.graph.analysis.proto_queries import first_output, in_order
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
        elif value in activations and value.dtype in _ROUNDED and value.name in types:
            constants = [f"{name}/{key}" for key in ("scale", "least", "greatest")]
            numbers = np.array([value.scales[0], *_limits(value)], types[value.name][0])
            for constant, number in zip(constants, numbers, strict=True):
                rounded.model.graph.initializer.append(numpy_helper.from_array(np.asarray(number), constant))
            steps += _steps(value.name, name, constants, value.dtype, numbers.dtype)
        else:
            unknown.update(reader for reader, _ in value.readers)
        replaced.update(dict.fromkeys(value.readers, name))
    graph = rounded.model.graph
    # Q/DQ that a model brings may be read by another pair, which the float model does not have.
    layers = {reader for reader, _ in replaced}.intersection(computed_values(graph)) - unknown
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


def _limits(value: Any) -> tuple[float, float]:
    """The least and the greatest number of steps from zero."""
    if value.dtype == _FP8:
        return -448.0, 448.0
    limits, zero_point = np.iinfo(value.dtype), np.asarray(value.zero_point).item()
    return limits.min - zero_point, limits.max - zero_point


def _steps(value: str, name: str, constants: list[str], dtype: str, wide: np.dtype[Any]) -> list[NodeProto]:
    """Nodes that clip and round an activation, without QuantizeLinear."""
    scale, *limits = constants
    nodes = [
        helper.make_node("Div", [value, scale], [f"{name}/quotient"]),
        helper.make_node("Clip", [f"{name}/quotient", *limits], [f"{name}/clipped"]),
    ]
    if dtype == _FP8:
        code = helper.np_dtype_to_tensor_dtype(wide)
        nodes.append(helper.make_node("Cast", [f"{name}/clipped"], [f"{name}/fp8"], to=TensorProto.FLOAT8E4M3FN))
        nodes.append(helper.make_node("Cast", [f"{name}/fp8"], [f"{name}/steps"], to=code))
    else:
        nodes.append(helper.make_node("Round", [f"{name}/clipped"], [f"{name}/steps"]))
    return [*nodes, helper.make_node("Mul", [f"{name}/steps", scale], [name])]
