"""Compares two ONNX models value by value: two files on samples (`pipe diff a.onnx b.onnx --data x.npz`), and what two
stages left on their probes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.subprocess_build import GB, Limits, OutputLog, bounded, machine_memory
from layerline.compare.channel_errors import channel_errors
from layerline.compare.compare_models import compare
from layerline.compare.output_effects import with_effects
from layerline.compare.region import reproduce
from layerline.compare.value_pairs import computed_values, sides_of_qdq, why_two_sessions
from layerline.export import probe_files
from layerline.export.signature import Value, signature
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import may_be_equal, names
from layerline.graph.io import module_identity, onnx_files
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.opset import opset_of, raise_opset
from layerline.graph.io.wellformed import refuse_broken
from layerline.graph.quantization import convert
from layerline.onnx_import import allocation_sizes, feed_sources, symbolic_dims
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.inputs import npz
from layerline.pipeline.nearest import did_you_mean
from layerline.pipeline.report import CHANNELS, LayerDiff, Order, Report
from layerline.pipeline.wording import quantity

_MOST_MEMORY = 8 * GB
_SECONDS = 1800
_COPIES = 8  # of what is stored: two models that are read, parsed, joined and run, and layers fed alone


@dataclass(frozen=True)
class Further:
    """What is done beside the comparison.

    `effect`: measure what each layer does to the outputs. `channels`: the layer, by its value or module, of which
    each channel is measured. `repro`: the folder that gets the smallest model that shows the first value of
    `order`.
    """

    effect: bool = False
    channels: str = ""
    repro: Path | None = None
    order: Order = "own"


def compare_files(reference: Path, candidate: Path, data: Path, log: OutputLog, further: Further) -> Report:
    """Compares two files in a process of its own, whose memory and time are bounded.

    Raises StageError for a file that can't be run or takes too much, ConfigError for inputs or samples that don't fit.
    """
    files = [reference, candidate, data]
    for path in (reference, candidate):
        weight_files = onnx_files.external_files(onnx_files.read(path), path)
        files += [path.parent / name for name in weight_files]
    stored = sum(path.stat().st_size for path in files)
    memory = int(min(_MOST_MEMORY, machine_memory() / 2)) + _COPIES * stored
    limits = Limits(
        memory=memory,
        seconds=_SECONDS,
        what=f"comparing {reference.name} with {candidate.name}",
        hint="give fewer samples, or smaller ones",
    )
    # The other process works in another folder. Links stay: external data lies beside them.
    paths = (reference.absolute(), candidate.absolute(), data.absolute())
    report: Report = bounded(compare_within, *paths, memory, further, limits=limits, log=log)
    # As the user wrote them: both files may have one name.
    return replace(report, reference=f"{reference} on onnxruntime", candidate=f"{candidate} on onnxruntime")


def compare_within(
    reference: Path, candidate: Path, data: Path, memory: int, further: Further, log: OutputLog
) -> Report:
    """The comparison itself, in this process; `memory` is what the values of a model may take, in bytes."""
    arrays = npz.read(data)
    models = [_read(path, arrays, memory) for path in (reference, candidate)]
    feeds, notes = _feeds(arrays, _joint_inputs(models[0], models[1], candidate.name), data.name)
    # Each alone first: the graph that joins them could not say which file is at fault.
    for path, model in zip((reference, candidate), models, strict=True):
        try:
            OnnxRuntime().open(model)
        except StageError as error:
            raise StageError(error.what, where=path.name, hint=error.hint) from error
    return _compared(models[0], models[1], feeds, notes, log, further)


def compare_stages(reference: Path, candidate: Path, log: OutputLog, further: Further) -> Report:
    """Compares the models in two artifacts on the probes of the first, in this process.

    Raises StageError for a model that onnxruntime can't run, ConfigError where the two take other inputs.
    """
    models: list[ir.Model] = []
    notes: list[str] = []
    operators: list[dict[str, str]] = []
    emulation: set[str] = set()
    for which, folder in (("first", reference), ("second", candidate)):
        stored = onnx_files.read_model(folder / onnx_files.FILE)
        reason = convert.not_emulated(stored)
        if reason:
            notes.append(f"{which} model: {reason}")
        operators.append(_operators(stored))
        # An emulation adds values, and gives those that it rounds under their names.
        runnable = convert.runnable(stored)
        emulation |= _operators(runnable).keys() - operators[-1].keys()
        models.append(runnable)
    # quantize may raise the opset, and models of one opset can be one graph.
    newest = max(opset_of(model) for model in models)
    with contextlib.suppress(StageError):
        models = [raise_opset(model, newest) for model in models]
    _joint_inputs(models[0], models[1], "the second stage")
    report = _compared(models[0], models[1], probe_files.load(reference), notes, log, further, emulation)
    # By the operator of the artifact, which an emulation may have written out.
    ops = operators[0]
    return replace(report, records=tuple(replace(row, op=ops.get(row.name, row.op)) for row in report.records))


def _operators(model: ir.Model) -> dict[str, str]:
    """The operator that computes each value of the main graph, by name."""
    operators: dict[str, str] = {}
    for node in model.graph:
        operators.update(dict.fromkeys(names(node.outputs), node.op_type))
    return operators


def _compared(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    notes: list[str],
    log: OutputLog,
    further: Further,
    emulation: Collection[str] = (),
) -> Report:
    """Compares the values that both have, but those that an emulation adds."""
    log.say(f"comparing every value on {quantity(len(feeds), 'feed')}")
    values = computed_values(reference.graph)
    # Rounding a value is an error of the layer that reads it, as in the report of quantize.
    sides = sides_of_qdq(candidate.graph, {*values, *candidate.graph.initializers}) | set(emulation)
    shared = set(computed_values(candidate.graph)) - sides
    pairs = {name: name for name in values if name in shared}
    records = compare(reference, candidate, feeds, isolated=True, pairs=pairs, sizes_differ=True)
    matched = sides.union(record.name for record in records)
    missing = [name for name in values if name not in matched]
    if missing:
        notes.append(
            f"{len(missing)} of {len(values)} values of the first model are not compared, since they are no tensors or "
            f"the second has none of that name; the first is {missing[0]}"
        )
    remarks = (why_two_sessions(reference, candidate), counted(reference.graph).note())
    notes += [remark for remark in remarks if remark]
    report = Report(stage="files", records=records, notes=tuple(notes))
    if further.effect:
        report = with_effects(report, reference, candidate, feeds, pairs)
    if further.channels:
        chosen = _layer(records, further.channels)
        rows = channel_errors(reference, candidate, feeds, chosen, pairs)
        if not rows:
            raise StageError(f"{further.channels} holds no floats with channels in both", where="--by-channel")
        report = replace(report, tables={CHANNELS: rows})
    if further.repro is not None:
        if not records:
            raise StageError("the two models have no value of one name: there is nothing to show", where="--repro")
        bad = report.sorted(further.order)[0]
        # These are as good as inputs: the cut out part may begin at them.
        equal = {record.name for record in records if record.passed and record.max_abs == 0}
        reproduce(reference, candidate, feeds, bad, equal, further.repro)
    return report


def _layer(records: Sequence[LayerDiff], layer: str) -> list[LayerDiff]:
    """The rows of a layer, by its value or module. Raises ConfigError where there are none."""
    chosen = [record for record in records if layer in (record.name, record.module)]
    if chosen:
        return chosen
    layers: list[str] = []
    for record in records:
        layers += [record.name, record.where]
    hint = did_you_mean(layer, layers) or "`pipe diff` without --by-channel lists the layers"
    raise ConfigError(f"no layer is called {layer!r}", where="--by-channel", hint=hint)


def _read(path: Path, arrays: Mapping[str, Array], memory: int) -> ir.Model:
    """A file's model, checked before anything of it is computed."""
    light = onnx_files.parts(path)
    refuse_broken(light)
    model = as_ir(light)
    symbolic_dims.name(model, arrays)
    # Paths of modules and files are words of whoever made the file.
    module_identity.distrust(model)
    allocation_sizes.refuse_unbounded(model, memory, "the memory of this machine sets the limit")
    return model


def _joint_inputs(reference: ir.Model, candidate: ir.Model, name: str) -> list[Value]:
    """The inputs of both models: those of the reference, with the sizes that either of the two fixes."""
    by_name = {value.name: value for value in signature(reference).inputs}
    for value in signature(candidate).inputs:
        where = f"{name}: input {value.name}"
        if value.name not in by_name:
            takes = ", ".join(by_name) or "no inputs"
            raise ConfigError("the first model has no such input", where=where, hint=f"it takes {takes}; rename one")
        other = by_name[value.name]
        if value.dtype != other.dtype:
            raise ConfigError(f"it is {value.dtype}, and {other.dtype} in the first model", where=where)
        if not may_be_equal(value.shape, other.shape):
            raise ConfigError(f"its shape is {value.shape}, and {other.shape} in the first model", where=where)
        # What one of the two leaves open has the size that the other fixes.
        sizes = list(other.shape)
        for axis, size in enumerate(value.shape):
            if isinstance(size, int):
                sizes[axis] = size
        by_name[value.name] = replace(other, shape=tuple(sizes))
    return list(by_name.values())


def _feeds(arrays: Mapping[str, Array], inputs: Sequence[Value], where: str) -> tuple[list[Feed], list[str]]:
    """The feeds that the arrays are, and what to say about them.

    Arrays of the shapes that the models take are one feed. Where a model fixes the first axis to another size, or a
    sample is a whole input, the first axis is cut into feeds.
    """
    samples = feed_sources.samples(arrays, inputs, where)
    # First axes that count samples and are fixed: a feed has just as many.
    fixed = {int(v.shape[0]) for v in inputs if samples.stacked(v) and isinstance(v.shape[0], int)}
    step = next(iter(fixed), samples.count)
    if samples.whole:
        step = 1
    elif len(fixed) > 1:
        what = f"the models fix the first axes of inputs to {sorted(fixed)}, so samples can't be cut along them"
        raise ConfigError(what, where=where, hint="give whole inputs with one axis more in front")
    feeds = [samples.feed(samples.sizes(step), turn) for turn in range(0, samples.count, step)]
    rest = samples.count % step
    if rest:
        return feeds, [f"the models take {step} samples at once: the last {rest} are filled up with the first ones"]
    return feeds, []
