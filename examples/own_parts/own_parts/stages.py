"""The stage `weights-only`: stands in for quantize where only the size of the file matters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from layerline import ConfigError, Gate, Report, Stage, StageError, Work, compare_models, load_probes


class WeightsOnly(Stage):
    """Stores weights in int8 with one scale per output channel. Everything is still computed in float."""

    name: ClassVar[str] = "weights-only"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "fused"}
    gives: ClassVar[str] = "quantized"
    env: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnxruntime")

    min_db: float = 20.0
    """Least SQNR of any value that passes, in dB."""
    skip: tuple[str, ...] = ()
    """Names of weights that stay float."""

    def run(self, work: Work) -> Report:
        folder = work.inputs["model"]
        model = onnx.load(folder / "model.onnx")
        opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        if opset < 13:
            raise StageError(f"scales per channel need opset 13, the model has {opset}", where="model.onnx")
        weights = dict(_weights(model.graph))
        unknown = sorted(set(self.skip) - weights.keys())
        if unknown:
            hint = f"the weights are {', '.join(weights)}"
            raise ConfigError(f"there is no weight {unknown[0]!r}", where="quantize.skip", hint=hint)
        for name, axis in weights.items():
            if name not in self.skip:
                _store_in_int8(model.graph, name, axis)
        onnx.save(model, work.out / "model.onnx")
        # The stages behind read these beside the model.
        for file in ("signature.json", "probes.safetensors"):
            shutil.copyfile(folder / file, work.out / file)
        rows = compare_models(folder / "model.onnx", model, load_probes(folder))
        worst = min((row.sqnr_db for row in rows if row.sqnr_db is not None), default=float("inf"))
        return Report(
            stage=self.name,
            reference="float onnx on onnxruntime",
            candidate="onnx with int8 weights on onnxruntime",
            records=rows,
            metrics={"weights": len(weights) - len(self.skip), "worst_db": worst},
            gates=(Gate("SQNR", worst >= self.min_db, f"{worst:.1f} dB", f"at least {self.min_db:g} dB"),),
        )


def _weights(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """Float weights of convolutions and matrix products, each with the axis of its output channels."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        tensor = stored.get(node.input[1]) if len(node.input) > 1 else None
        if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        if node.op_type == "Conv":
            yield tensor.name, 0
        elif node.op_type == "Gemm":
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            yield tensor.name, 0 if transposed else 1
        elif node.op_type == "MatMul":
            yield tensor.name, len(tensor.dims) - 1


def _store_in_int8(graph: onnx.GraphProto, name: str, axis: int) -> None:
    """Replaces a weight by int8, scales and a DequantizeLinear that gives the value its old name."""
    [tensor] = [tensor for tensor in graph.initializer if tensor.name == name]
    weight = numpy_helper.to_array(tensor)
    others = tuple(i for i in range(weight.ndim) if i != axis)
    largest = np.abs(weight).max(axis=others, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    quantized = np.rint(weight / scale).clip(-127, 127).astype(np.int8)
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(quantized, f"{name}/int8"))
    graph.initializer.append(numpy_helper.from_array(scale.reshape(-1), f"{name}/scale"))
    node = helper.make_node(
        "DequantizeLinear", [f"{name}/int8", f"{name}/scale"], [name], name=f"{name}/dequantize", axis=axis
    )
    graph.node.insert(0, node)
