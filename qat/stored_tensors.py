"""The tensors that an ONNX graph stores: in torch, and which of them are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from layerline.calib.plan import QuantValue
from layerline.graph.quantization.targets import WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import StageError

_OTHERS = {"BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2),
           "LayerNormalization": (1, 2), "RMSNormalization": (1,),
           "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3)}  # fmt: skip
"""Places of weights and biases among the inputs of normalisation and recurrent layers."""
PASSES = ("Identity", "Transpose", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten")


def stored(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """The tensors that a graph stores, as initializers and in Constants, by name."""
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        tensors[name] = value.const_value
    for node in graph:
        if node.op_type == "Constant" and "value" in node.attributes:
            tensors[node.outputs[0].name or ""] = node.attributes["value"].as_tensor()
    return tensors


def trained_names(graph: ir.Graph, tensors: Mapping[str, ir.TensorProtocol]) -> set[str]:
    """Stored float tensors that are weights or biases of products, or of normalisation and recurrent layers."""
    names: set[str] = set()
    for node in graph:
        places: tuple[int, ...] = ()
        if node.domain == "" and node.op_type in WEIGHTED:
            places = (0, 1, 2)
        elif node.domain == "":
            places = _OTHERS.get(node.op_type, ())
            if node.op_type == "Add" and any(_has_weight(v) for v in node.inputs):
                places = (0, 1)  # the bias of a product on either side
        for place in places:
            name = _stored_source(node.inputs[place]) if place < len(node.inputs) else ""
            if not name or not tensors[name].dtype.is_floating_point():
                continue
            sizes = tensors[name].shape.numpy()
            # A constant added to a product is its bias where it has one number for each channel; a mask has not.
            if node.op_type != "Add" or math.prod(sizes) == max(sizes, default=0):
                names.add(name)
    return names


def _has_weight(value: ir.Value | None) -> bool:
    """Whether a product of activations with a stored weight computes the value."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in WEIGHTED:
        return False
    return any(_stored_source(operand) for operand in node.inputs[:2])


def _stored_source(value: ir.Value | None) -> str:
    """The stored tensor that a value holds, behind operators that only move its numbers; empty where there is none."""
    while value is not None:
        node = value.producer()
        if value.is_initializer() or (node is not None and node.op_type == "Constant" and "value" in node.attributes):
            return value.name or ""
        if node is None or node.op_type not in PASSES:
            return ""
        value = node.inputs[0]
    return ""


def rank_of(graph: ir.Graph, item: QuantValue) -> int:
    """The number of axes of a value whose scales run along one of them."""
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name == item.name and item.axis is not None:
                array = weight_of(value)
                if array is None:
                    raise StageError("its scales run along an axis, and it is not constant", where=item.name)
                return array.ndim
    return 0


def in_torch(tensor: ir.TensorProtocol) -> Tensor:
    array = np.array(tensor.numpy())  # a copy: training changes it in place
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def attribute_value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return in_torch(attribute.as_tensor())
    return attribute.value
