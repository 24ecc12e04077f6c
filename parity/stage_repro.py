"""The smallest model that shows what a stage of a run did to a value: `pipe why --repro`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.compare_models import compare
from layerline.compare.region import region, reproduce, show
from layerline.compare.value_pairs import computed_values
from layerline.compare.value_types import infer
from layerline.export import probe_files
from layerline.graph.analysis.ir_queries import names as names_of
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import opset_of, raise_opset
from layerline.graph.quantization import convert
from layerline.parity.nonfinite_outputs import first_nonfinite
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff


def write(stage: str, value: str, folders: Mapping[str, Path], feeds: Sequence[Feed], folder: Path) -> LayerDiff:
    """Writes the part of a stage's model that computes a value otherwise than the model of the stage before does.

    Where there is no model before, it is the part that makes NaN or Inf from finite numbers.

    Args:
        value: the value. If neither it nor a layer that reads it has an error of its own, the layer with the lowest own
            SQNR takes its place.
        folders: the artifact of each stage, in order.
        feeds: what is run beside the probes.

    Raises:
        StageError: the stage left no ONNX model, or computes all values as the one before.
    """
    stages = list(folders)
    with_model = [name for name in stages if (folders[name] / onnx_files.FILE).is_file()]
    # What torch makes NaN or Inf the first ONNX model makes so as well.
    later = [name for name in with_model if stage in stages and stages.index(name) >= stages.index(stage)]
    if not later:
        raise StageError("it left no ONNX model that could show it", where=stage, hint=f"see: pipe diff {stage}")
    candidate = convert.runnable(onnx_files.read_model(folders[later[0]] / onnx_files.FILE))
    feeds = [*feeds, *probe_files.load(folders[later[0]])]
    before = with_model[: with_model.index(later[0])]
    if not before:
        return _first_nonfinite(stage, candidate, feeds, folder)
    reference = onnx_files.read_model(folders[before[-1]] / onnx_files.FILE)
    # Quantising raises the opset; both models need one to share a graph.
    newest = max(opset_of(reference), opset_of(candidate))
    with contextlib.suppress(StageError):
        reference, candidate = raise_opset(reference, newest), raise_opset(candidate, newest)
    records = compare(reference, candidate, feeds, isolated=True, sizes_differ=True)
    wrong = [record for record in records if not record.passed or record.max_abs != 0]
    if not wrong:
        raise StageError(f"it computes every value as {before[-1]} does: there is nothing to show", where=stage)
    by_own = sorted(wrong, key=lambda record: record.severity_by("own"))
    # Rounding and clipping a value is an error of the layers that read it.
    named = _readers(candidate, value)
    places = [record for record in by_own if record.name in named and record.own_db is not None]
    bad = (places or by_own)[0]
    # The region begins where both models still agree.
    equal = {record.name for record in records} - {record.name for record in wrong}
    reproduce(reference, candidate, feeds, bad, equal, folder)
    return bad


def _readers(model: ir.Model, value: str) -> set[str]:
    """The value, and what the nodes compute that read it as it is or behind Q/DQ."""
    names, same = {value}, {value}
    for node in model.graph:
        if not same.isdisjoint(names_of(node.inputs)):
            names.update(names_of(node.outputs))
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                same.update(names_of(node.outputs))
    return names


def _first_nonfinite(stage: str, model: ir.Model, feeds: Sequence[Feed], folder: Path) -> LayerDiff:
    """Writes the part of a model that makes the first NaN or Inf."""
    names = computed_values(model.graph)
    session = OnnxRuntime(few_runs=True).open(model, names)
    for feed in feeds:
        values = {**feed, **session.run(feed)}
        value = first_nonfinite(names, values)
        if not value:
            continue
        ops = {output: node.op_type for node in model.graph for output in names_of(node.outputs)}
        row = LayerDiff(name=value, op=ops[value])
        # All that is computed before it is finite.
        finite = {*feed, *names[: names.index(value)]}
        cut = region(model, value, finite, infer(model, list(values)))
        show(cut, [({name: values[name] for name in names_of(cut.graph.inputs)}, None)], folder, row)
        return row
    raise StageError("the loss shows only in torch, before there is an ONNX model", where=stage, hint="see: pipe why")
