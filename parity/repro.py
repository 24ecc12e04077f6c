"""Cuts out the smallest ONNX model that shows where an export differs from the module, for a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.arrays import array
from layerline.compare.region import region, show
from layerline.compare.value_types import types_of
from layerline.export.probe_files import Probe
from layerline.export.torch_export import Traced
from layerline.graph.analysis.ir_queries import names as names_of
from layerline.parity.float64_reference import Twin
from layerline.pipeline.report import LayerDiff


def reproduce(traced: Traced, probes: Sequence[Probe], rows: Sequence[LayerDiff], folder: Path) -> LayerDiff | None:
    """Writes the region behind the first value that failed, fed with torch's own values, to `folder`.

    What is expected is torch's float32 value, of the probe on which the two differ most.

    Returns:
        The row of that value; None where every value passed.
    """
    failed = [row for row in rows if not row.passed]
    if not failed:
        return None
    bad = failed[0]
    # Values that passed, and inputs, are where the region begins.
    good = {row.name for row in rows if row.passed} | set(names_of(traced.model.graph.inputs))
    session = OnnxRuntime(few_runs=True).open(traced.model, traced.taps())
    cut = region(traced.model, bad.name, good, types_of(session))
    show(cut, _runs(traced, probes, bad.name, cut), folder, bad)
    return bad


def _runs(traced: Traced, probes: Sequence[Probe], value: str, cut: ir.Model) -> list[tuple[Feed, Array]]:
    """For each probe that the program can run on, torch's values for the inputs of a region, and for its output."""
    names = names_of(cut.graph.inputs)
    value_of_node = {traced.nodes[name]: name for name in (*names, value) if name in traced.nodes}
    # Torch's float32 values for each probe, by ONNX name.
    torch_values: list[dict[str, Array]] = [dict(probe.feed) for probe in probes]
    for node, twins in Twin(traced.program).values([probe.feed for probe in probes]):
        if node in value_of_node:
            for twin in twins:
                torch_values[twin.feed][value_of_node[node]] = array(twin.single)
    complete = [values for values in torch_values if values.keys() >= {*names, value}]
    runs: list[tuple[Feed, Array]] = []
    for values in complete:
        inputs = {name: values[name] for name in names}
        runs.append((inputs, values[value]))
    return runs
