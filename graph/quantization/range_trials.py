"""Measures, in one graph, the error of every candidate range of an activation at the layers that read it.

The trial graph holds the float model and, for every candidate, the quantised activation and a copy of each layer that
reads it, with quantised weights. Each copy is fed exact inputs, and its output is compared with the float one. Errors
are reduced to sums inside the graph, so that memory does not grow with the number of candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.plan import Wanted
from layerline.calib.range_candidates import Candidates, Error
from layerline.calib.scales import numpy_dtype, steps_of
from layerline.graph.analysis.proto_queries import in_order
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.io.ir_convert import to_ir
from layerline.graph.quantization.targets import WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of

_PREFIX = "trial//"
_FLAT, _ROWS, _SPATIAL = f"{_PREFIX}flat", f"{_PREFIX}rows", f"{_PREFIX}spatial"


@dataclass(frozen=True)
class _Case:
    """One candidate of one value at one layer, and the prefix of the tensors that measure it."""

    value: str
    candidate: str
    layer: str
    tag: str
    channels: int


def measure(
    model: Light,
    stored: Light,
    wanted: Sequence[Wanted],
    candidates: Candidates,
    feeds: Iterable[Feed],
    ends: Mapping[str, tuple[float, float]] | None = None,
) -> dict[tuple[str, str, str], Error]:
    """The error of every layer with every candidate, over all feeds.

    Args:
        model: the float model, at an opset that has Q/DQ.
        stored: the model with quantised weights alone.
        wanted: the activations, with their readers.
        candidates: thresholds by value and by the candidate's name.
        feeds: arrays by input name.
        ends: least and greatest number of each value; only uint8 needs them.

    Returns:
        By value, candidate and layer (its first output). Layers that only pass values on (Concat) are left out.
    """
    trial = _Trial(model, stored)
    for item in wanted:
        for name, threshold in candidates[item.name].items():
            trial.add(item, name, threshold, (ends or {}).get(item.name, (-threshold, threshold)))
    if not trial.cases:
        return {}
    session = OnnxRuntime(few_runs=True).open(trial.model())
    totals: dict[str, npt.NDArray[np.float64]] = {}
    for feed in feeds:
        for name, array in session.run(feed).items():
            totals[name] = totals.get(name, np.zeros(())) + array.astype(np.float64)
    return {(c.value, c.candidate, c.layer): _error(c, totals) for c in trial.cases}


def _error(case: _Case, totals: Mapping[str, npt.NDArray[np.float64]]) -> Error:
    signal, error = float(totals[f"{_PREFIX}{case.layer}//aa"]), float(totals[f"{case.tag}//ee"])
    if not case.channels:
        return Error(signal=signal, error=error)
    sums, count = totals[f"{case.tag}//sums"], float(totals[f"{_PREFIX}{case.layer}//count"]) / case.channels
    return Error(signal=signal, error=error, shift=sums / max(count, 1.0), count=count)


class _Trial:
    """Builds the trial graph, one candidate at a time."""

    def __init__(self, model: Light, stored: Light) -> None:
        self.float = model
        self.stored = stored
        self.cases: list[_Case] = []
        self._layers = {n.output[0]: n for n in stored.model.graph.node if n.output}
        self._measures: list[onnx.NodeProto] = []
        self._others: list[onnx.NodeProto] = []
        self._outputs: list[str] = []
        self._tensors = [
            numpy_helper.from_array(np.array([0, 0, -1], np.int64), _SPATIAL),
            numpy_helper.from_array(np.array([0, 2], np.int64), _ROWS),
            numpy_helper.from_array(np.array([0], np.int64), _FLAT),
        ]
        typed = to_ir(model)
        infer_types(typed)
        self._types = {v.name: v.dtype for v in typed.graph.inputs}
        self._channels: dict[str | None, int] = {}
        for node in typed.graph:
            self._types.update({v.name: v.dtype for v in node.outputs})
            if node.outputs:
                self._channels[node.outputs[0].name] = _channels(node)
        self._measured_layers = set[str]()

    def add(self, item: Wanted, name: str, threshold: float, ends: tuple[float, float]) -> None:
        """Adds one candidate of one value, at every layer that reads it."""
        readers: dict[str, list[int]] = {}
        for layer, index in item.readers:
            node = self._layers[layer]
            if node.op_type != "Concat" and len(node.output) == 1:
                readers.setdefault(layer, []).append(index)
        if not readers:
            return
        tag, dtype = f"{_PREFIX}{item.name}/{name}", self._types[item.name]
        assert dtype is not None
        scale, zero_point = steps_of(threshold, item.dtype, *ends)
        self._tensors.append(numpy_helper.from_array(scale.astype(dtype.numpy()).reshape(()), f"{tag}//scale"))
        zero = np.array(zero_point, numpy_dtype(item.dtype))
        self._tensors.append(numpy_helper.from_array(zero, f"{tag}//zero"))
        scales = [f"{tag}//scale", f"{tag}//zero"]
        self._others.append(helper.make_node("QuantizeLinear", [item.name, *scales], [f"{tag}//q"]))
        self._others.append(helper.make_node("DequantizeLinear", [f"{tag}//q", *scales], [f"{tag}//dq"]))
        for layer, places in readers.items():
            self._layer(f"{tag}/{layer}", f"{tag}//dq", layer, places)
            case = _Case(item.name, name, layer, f"{tag}/{layer}", self._channels[layer])
            self._measure(case)
            self.cases.append(case)

    def _layer(self, output: str, read: str, layer: str, places: Sequence[int]) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(self._layers[layer])
        node.ClearField("metadata_props")
        node.name = ""
        node.output[:] = [output]
        for place in places:
            node.input[place] = read
        self._others.append(node)

    def _measure(self, case: _Case) -> None:
        tag, layer = case.tag, case.layer
        exact = self._reference(case)
        self._others.append(helper.make_node("Cast", [tag], [f"{tag}//float"], to=onnx.TensorProto.FLOAT))
        self._others.append(helper.make_node("Sub", [f"{tag}//float", exact], [f"{tag}//e"]))
        self._reduce("ReduceSumSquare", [f"{tag}//e"], f"{tag}//ee")
        if not case.channels:
            return
        if self._layers[layer].op_type in ("Conv", "ConvTranspose"):
            shape, axes = _SPATIAL, _ROWS
        else:
            shape, axes = f"{_PREFIX}last{case.channels}", _FLAT
            if not any(t.name == shape for t in self._tensors):
                self._tensors.append(numpy_helper.from_array(np.array([-1, case.channels], np.int64), shape))
        self._others.append(helper.make_node("Reshape", [f"{tag}//e", shape], [f"{tag}//table"]))
        self._reduce("ReduceSum", [f"{tag}//table", axes], f"{tag}//sums")

    def _reference(self, case: _Case) -> str:
        """The name of the layer's float output, in float32. The first call adds the nodes that measure it."""
        exact = f"{_PREFIX}{case.layer}//exact"
        if case.layer not in self._measured_layers:
            self._measured_layers.add(case.layer)
            self._others.append(helper.make_node("Cast", [case.layer], [exact], to=onnx.TensorProto.FLOAT))
            self._reduce("ReduceSumSquare", [exact], f"{_PREFIX}{case.layer}//aa")
            self._measures.append(helper.make_node("Size", [exact], [f"{_PREFIX}{case.layer}//count"]))
            self._outputs.append(f"{_PREFIX}{case.layer}//count")
        return exact

    def _reduce(self, op: str, inputs: Sequence[str], output: str) -> None:
        self._measures.append(helper.make_node(op, inputs, [output], keepdims=0))
        self._outputs.append(output)

    def model(self) -> Light:
        source = self.float.model
        quantized = self.stored.model.graph
        # The quantised weights come with DequantizeLinear nodes and tensors that the float model has not.
        computed = set[str]()
        for node in source.graph.node:
            computed.update(node.output)
        weight_nodes = [n for n in quantized.node if not computed.issuperset(n.output)]
        stored_names = {t.name for t in source.graph.initializer}
        weight_tensors = [t for t in quantized.initializer if t.name not in stored_names]
        tensors = [*source.graph.initializer, *weight_tensors, *self._tensors]
        nodes = in_order(self._measures, [*source.graph.node, *weight_nodes, *self._others])
        outputs = [helper.make_empty_tensor_value_info(o) for o in self._outputs]
        graph = helper.make_graph(nodes, "trials", list(source.graph.input), outputs, tensors)
        graph.sparse_initializer.extend(source.graph.sparse_initializer)
        model = helper.make_model(graph, opset_imports=list(source.opset_import), ir_version=source.ir_version)
        model.functions.extend(source.functions)
        return Light(model, {**self.stored.weights, **self.float.weights})


def _channels(node: ir.Node) -> int:
    """Number of output channels of a layer with constant weights; 0 for other nodes.

    They lie along axis 1 of the output of a convolution, and along the last axis of that of a product.
    """
    if node.op_type not in WEIGHTED or len(node.inputs) < 2:
        return 0
    weight = weight_of(node.inputs[1])
    if weight is None or weight.ndim < 2:
        return 0
    shape: tuple[int, ...] = weight.shape
    if node.op_type == "ConvTranspose":
        groups: int = node.attributes.get_int("group", 1)
        return shape[1] * groups
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    if node.op_type == "Conv" or transposed:
        return shape[0]
    return shape[-1]
