"""The smallest ONNX model that shows a bad value: what to attach to a bug report, and to step through."""

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
from layerline.export.probe import Probe
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
    bad = next((r for r in rows if not r.passed), None)
    if bad is None:
        return None
    good = {r.name for r in rows if r.passed} | {i.name for i in traced.model.graph.input}
    session = OnnxRuntime(few_runs=True).open(traced.light, traced.taps())
    cut = region(traced.light, bad.name, good, types_of(session))
    folder.mkdir(parents=True, exist_ok=True)
    onnx_files.save(cut, folder)
    save_file(_worst(traced, probes, bad.name, cut), str(folder / TENSORS))
    return bad


def region(light: Light, value: str, known: set[str], types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> Light:
    """The part of a model that computes `value` from values in `known`, as a model of its own."""
    model = light.model
    makers = {o: n for n in model.graph.node for o in n.output}
    stored = {t.name: t for t in model.graph.initializer}
    pending, nodes, inputs, read = [value], set[int](), dict[str, None](), dict[str, None]()
    while pending:
        name = pending.pop()
        if name in stored or name in light.weights:
            read[name] = None
        elif name in known and name != value:
            inputs[name] = None
        elif name in makers and id(makers[name]) not in nodes:
            nodes.add(id(makers[name]))
            pending += reads(makers[name])
    out = onnx.ModelProto()
    out.CopyFrom(model)
    out.graph.Clear()
    out.graph.name = "region"
    out.graph.node.extend(n for n in model.graph.node if id(n) in nodes)
    out.graph.initializer.extend(stored[n] for n in sorted(read) if n in stored)
    out.graph.input.extend(_info(i, types) for i in sorted(inputs))
    out.graph.output.append(_info(value, types))
    return Light(out, {n: light.weights[n] for n in read if n in light.weights})


def _info(name: str, types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> onnx.ValueInfoProto:
    dtype, shape = types[name]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))


def _worst(traced: Traced, probes: Sequence[Probe], value: str, cut: Light) -> dict[str, Array]:
    """Inputs, expected and seen values on the probe that shows the difference best."""
    session, names = OnnxRuntime(few_runs=True).open(cut), [i.name for i in cut.model.graph.input]
    best, most = dict[str, Array](), -1.0
    for feed, torchs in zip(probes, _torch_values(traced, probes, {*names, value}), strict=True):
        known = dict(feed.feed) | torchs
        if not known.keys() >= {*names, value}:
            continue  # the program can't run on this feed
        given = {n: known[n] for n in names}
        seen, expected = session.run(given)[value], known[value]
        error = diff_arrays(expected, seen)
        if error.rel_l2 + error.one_sided > most:
            most = error.rel_l2 + error.one_sided
            best = {f"inputs/{n}": a for n, a in given.items()} | {"expected": expected, "seen": seen}
    return {k: np.asarray(a, order="C") for k, a in best.items()}


def _torch_values(traced: Traced, probes: Sequence[Probe], wanted: set[str]) -> list[dict[str, Array]]:
    values = {traced.nodes[v]: v for v in wanted if v in traced.nodes}
    found: list[dict[str, Array]] = [{} for _ in probes]
    for node, twins in Twin(traced.program).values([p.feed for p in probes]):
        for t in twins if node in values else ():
            found[t.feed][values[node]] = array(t.single)
    return found
