"""Describes a parsed TensorRT network: each layer, the type it computes in, and the ONNX node it came from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# The layers that quantisation speeds up.
COMPUTE = frozenset({"CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY", "EINSUM"})
# They move elements without changing them, so a dequantised operand may lie behind them.
_MOVES = frozenset({"SHUFFLE", "SQUEEZE", "UNSQUEEZE", "IDENTITY"})
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8e4m3fn", "FP4": "float4e2m1"}
_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")


@dataclass(frozen=True)
class Tensor:
    """A layer's output; -1 stands for a dynamic size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the network, before the builder fuses anything.

    Attributes:
        type: TensorRT's name of the kind (CONVOLUTION).
        precision: the type it computes in. For a convolution or matrix product whose operands are both dequantised,
            that is the type they were stored in; for any other layer, the type of its output.
        reads: names of its input tensors.
        node: name of the ONNX node it came from; empty for helpers of the parser.
    """

    name: str
    type: str
    precision: str
    reads: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    node: str


def describe(network: Any) -> tuple[Layer, ...]:
    """Every layer of a parsed network, in its order, before the builder runs."""
    return settle([_layer(network.get_layer(i)) for i in range(network.num_layers)])


def settle(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Sets the precision of convolutions and matrix products to the stored type of their operands."""
    # Tensors name the edges: a layer is found by what it gives.
    by_output: dict[str, Layer] = {}
    for layer in layers:
        by_output.update(dict.fromkeys((output.name for output in layer.outputs), layer))
    settled: list[Layer] = []
    for layer in layers:
        # A bias may stay in float: the first two operands decide.
        if layer.type in COMPUTE and len(layer.reads) > 1:
            first, second = (_stored(name, by_output) for name in layer.reads[:2])
            if first is not None and first == second:
                layer = replace(layer, precision=first)
        settled.append(layer)
    return tuple(settled)


def compute_precisions(layers: Sequence[Layer]) -> dict[str, int]:
    """Number of convolutions and matrix products by precision, most frequent first."""
    return dict(Counter(layer.precision for layer in layers if layer.type in COMPUTE).most_common())


def dtype_name(dtype: Any) -> str:
    """numpy's name of a TensorRT element type."""
    name: str = dtype.name
    return _DTYPES.get(name, name.lower())


def _layer(layer: Any) -> Layer:
    # Optional inputs and outputs that are absent are None.
    all_inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    all_outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    outputs = tuple(tensor(t) for t in all_outputs if t is not None)
    return Layer(
        name=layer.name,
        type=layer.type.name,
        precision="".join(output.dtype for output in outputs[:1]),
        reads=tuple(t.name for t in all_inputs if t is not None),
        outputs=outputs,
        node="".join(_NODE.findall(layer.metadata)[:1]),
    )


def tensor(trt_tensor: Any) -> Tensor:
    """Name, type and shape of a TensorRT ITensor."""
    try:
        shape = tuple(int(d) for d in trt_tensor.shape)
    except ValueError:  # a rank that is not known yet
        shape = ()
    return Tensor(trt_tensor.name, dtype_name(trt_tensor.dtype), shape)


def _stored(name: str, by_output: Mapping[str, Layer]) -> str | None:
    """The type that the tensor is dequantised from; None where it is not dequantised."""
    layer = by_output.get(name)
    while layer is not None and layer.reads:
        producer = by_output.get(layer.reads[0])
        if layer.type == "DEQUANTIZE":
            return producer.outputs[0].dtype if producer else None
        if layer.type not in _MOVES:
            return None
        layer = producer
    return None
