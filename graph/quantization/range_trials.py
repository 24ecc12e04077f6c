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
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.plan import Wanted
from layerline.calib.range_candidates import Candidates, Error
from layerline.calib.scales import numpy_dtype, steps_of
from layerline.graph.analysis.assembly import Assembly, in_order
from layerline.graph.analysis.ir_queries import copied, first_output, names
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.quantization.channel_axes import output_rows

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
    model: ir.Model,
    stored: ir.Model,
    wanted: Sequence[Wanted],
    candidates: Candidates,
    feeds: Iterable[Feed],
    ends: Mapping[str, tuple[float, float]] | None = None,
) -> dict[tuple[str, str, str], Error]:
    """The error of every layer with every candidate, over all feeds.

    Args:
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
        sums = session.run(feed)
        # A layer whose float output is not finite on a feed says nothing there about any candidate.
        silent = {c.layer for c in trial.cases if not np.isfinite(sums[f"{_PREFIX}{c.layer}//aa"])}
        for case in trial.cases:
            if case.layer in silent:
                exact = f"{_PREFIX}{case.layer}"
                for name in (f"{exact}//aa", f"{exact}//count", f"{case.tag}//ee", f"{case.tag}//sums"):
                    if name in sums:
                        sums[name] = np.zeros_like(sums[name])
        for name, array in sums.items():
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

    def __init__(self, model: ir.Model, stored: ir.Model) -> None:
        self.float = model
        self.cases: list[_Case] = []
        self._layers = {first_output(node): node for node in stored.graph}
        self._measures: list[ir.Node] = []
        self._outputs: list[str] = []
        self._graph = Assembly()
        self._graph.store(_SPATIAL, np.array([0, 0, -1], np.int64))
        self._graph.store(_ROWS, np.array([0, 2], np.int64))
        self._graph.store(_FLAT, np.array([0], np.int64))
        # The quantised weights come with DequantizeLinear nodes and tensors that the float model has not.
        computed = set[str]()
        for node in model.graph:
            self._graph.copy(node)
            computed.update(names(node.outputs))
        for node in stored.graph:
            if not computed.issuperset(names(node.outputs)):
                self._graph.copy(node)
        tensors = {**dict(stored.graph.initializers.tensor_items()), **dict(model.graph.initializers.tensor_items())}
        for name, tensor in tensors.items():
            self._graph.store(name, tensor)
        typed = copied(model)
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
            if node.op_type != "Concat" and len(node.outputs) == 1:
                readers.setdefault(layer, []).append(index)
        if not readers:
            return
        tag, dtype = f"{_PREFIX}{item.name}/{name}", self._types[item.name]
        assert dtype is not None
        scale, zero_point = steps_of(threshold, item.dtype, *ends)
        self._graph.store(f"{tag}//scale", scale.astype(dtype.numpy()).reshape(()))
        self._graph.store(f"{tag}//zero", np.array(zero_point, numpy_dtype(item.dtype)))
        scales = [f"{tag}//scale", f"{tag}//zero"]
        self._graph.node("QuantizeLinear", [item.name, *scales], f"{tag}//q")
        self._graph.node("DequantizeLinear", [f"{tag}//q", *scales], f"{tag}//dq")
        for layer, places in readers.items():
            self._layer(f"{tag}/{layer}", f"{tag}//dq", layer, places)
            case = _Case(item.name, name, layer, f"{tag}/{layer}", self._channels[layer])
            self._measure(case)
            self.cases.append(case)

    def _layer(self, output: str, read: str, layer: str, places: Sequence[int]) -> None:
        node = self._graph.copy(self._layers[layer], write=lambda _: output)
        node.name = ""
        for place in places:
            node.replace_input_with(place, self._graph.value(read))

    def _measure(self, case: _Case) -> None:
        tag, layer = case.tag, case.layer
        exact = self._reference(case)
        self._graph.node("Cast", [tag], f"{tag}//float", to=int(ir.DataType.FLOAT))
        self._graph.node("Sub", [f"{tag}//float", exact], f"{tag}//e")
        self._reduce("ReduceSumSquare", [f"{tag}//e"], f"{tag}//ee")
        if not case.channels:
            return
        if self._layers[layer].op_type in ("Conv", "ConvTranspose"):
            shape, axes = _SPATIAL, _ROWS
        else:
            shape, axes = f"{_PREFIX}last{case.channels}", _FLAT
            self._graph.store(shape, np.array([-1, case.channels], np.int64))
        self._graph.node("Reshape", [f"{tag}//e", shape], f"{tag}//table")
        self._reduce("ReduceSum", [f"{tag}//table", axes], f"{tag}//sums")

    def _reference(self, case: _Case) -> str:
        """The name of the layer's float output, in float32. The first call adds the nodes that measure it."""
        exact = f"{_PREFIX}{case.layer}//exact"
        if case.layer not in self._measured_layers:
            self._measured_layers.add(case.layer)
            self._graph.node("Cast", [case.layer], exact, to=int(ir.DataType.FLOAT))
            self._reduce("ReduceSumSquare", [exact], f"{_PREFIX}{case.layer}//aa")
            self._measures.append(self._graph.node("Size", [exact], f"{_PREFIX}{case.layer}//count"))
            self._outputs.append(f"{_PREFIX}{case.layer}//count")
        return exact

    def _reduce(self, op: str, inputs: Sequence[str], output: str) -> None:
        self._measures.append(self._graph.node(op, inputs, output, keepdims=0))
        self._outputs.append(output)

    def model(self) -> ir.Model:
        source = self.float
        return self._graph.model(
            in_order(self._measures),
            source.graph.inputs,
            self._outputs,
            opsets=source.opset_imports,
            ir_version=source.ir_version,
            functions=source.functions.values(),
        )


def _channels(node: ir.Node) -> int:
    """Number of output channels of a layer with constant weights; 0 for other nodes.

    They lie along axis 1 of the output of a convolution, and along the last axis of that of a product.
    """
    rows = output_rows(node)
    return 0 if rows is None else len(rows)
