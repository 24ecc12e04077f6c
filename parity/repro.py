"""Cuts out the smallest ONNX model that shows a bad value, for a bug report or a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from safetensors.numpy import save_file

from layerline.backends.base import Array
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.arrays import array
from layerline.compare.tensor_distance import diff_arrays
from layerline.compare.value_types import types_of
from layerline.export.probe_files import Probe
from layerline.export.torch_export import Traced
from layerline.graph.analysis.toposort import reads
from layerline.graph.io import onnx_files
from layerline.parity.float64_reference import Twin
from layerline.pipeline.report import LayerDiff

TENSORS = "tensors.safetensors"


def reproduce(traced: Traced, probes: Sequence[Probe], rows: Sequence[LayerDiff], folder: Path) -> LayerDiff | None:
    """Writes the region behind the first value that failed, fed with torch's own values, to `folder`.

    `model.onnx` computes the bad value alone; `tensors.safetensors` holds `inputs/<name>`, `expected` (torch float32)
    and `seen` (onnxruntime), of the probe on which the two differ most.

    Returns:
        The row of that value; None where every value passed.
    """
    failed = [row for row in rows if not row.passed]
    if not failed:
        return None
    bad = failed[0]
    # Values that passed, and inputs, are where the region begins.
    good = {row.name for row in rows if row.passed} | {value.name for value in traced.model.graph.input}
    session = OnnxRuntime(few_runs=True).open(traced.light, traced.taps())
    cut = region(traced.light, bad.name, good, types_of(session))
    folder.mkdir(parents=True, exist_ok=True)
    onnx_files.save(cut, folder)
    save_file(_worst(traced, probes, bad.name, cut), str(folder / TENSORS))
    return bad


def region(light: Light, value: str, ends: set[str], types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> Light:
    """The part of a model that computes `value`, as a model of its own; values in `ends` become its inputs."""
    model = light.model
    needed = {value}
    nodes: list[onnx.NodeProto] = []
    computed = set[str]()
    for node in reversed(model.graph.node):  # nodes stand behind what they read
        if needed.intersection(node.output) - (ends - {value}):
            nodes.append(node)
            needed.update(reads(node))
            computed.update(node.output)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in needed}
    weights = {name: weight for name, weight in light.weights.items() if name in needed}
    inputs = (needed & ends) - computed - initializers.keys() - weights.keys()
    out = onnx.ModelProto()
    out.CopyFrom(model)
    out.graph.Clear()
    out.graph.name = "region"
    out.graph.node.extend(reversed(nodes))
    out.graph.initializer.extend(initializers[name] for name in sorted(initializers))
    out.graph.input.extend(_info(name, types) for name in sorted(inputs))
    out.graph.output.append(_info(value, types))
    return Light(out, weights)


def _info(name: str, types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> onnx.ValueInfoProto:
    dtype, shape = types[name]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))


def _worst(traced: Traced, probes: Sequence[Probe], value: str, cut: Light) -> dict[str, Array]:
    """Inputs, expected and seen values on the probe that shows the difference best."""
    session = OnnxRuntime(few_runs=True).open(cut)
    names = [info.name for info in cut.model.graph.input]
    value_of_node = {traced.nodes[name]: name for name in (*names, value) if name in traced.nodes}
    # Torch's float32 values for each probe, by ONNX name.
    torch_values: list[dict[str, Array]] = [dict(probe.feed) for probe in probes]
    for node, twins in Twin(traced.program).values([probe.feed for probe in probes]):
        if node in value_of_node:
            for twin in twins:
                torch_values[twin.feed][value_of_node[node]] = array(twin.single)
    best: dict[str, Array] = {}
    greatest = -1.0
    for values in torch_values:
        if not values.keys() >= {*names, value}:
            continue  # the program can't run on this feed
        inputs = {name: values[name] for name in names}
        onnx_value = session.run(inputs)[value]
        error = diff_arrays(values[value], onnx_value)
        if error.rel_l2 + error.one_sided > greatest:
            greatest = error.rel_l2 + error.one_sided
            best = {f"inputs/{name}": array for name, array in inputs.items()}
            best |= {"expected": values[value], "seen": onnx_value}
    return {name: np.asarray(array, order="C") for name, array in best.items()}
