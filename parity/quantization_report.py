"""The report of quantize: the loss of each layer and of the outputs, and whether the artifact runs as measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import Histogram
from layerline.compare.channel_errors import channel_errors
from layerline.compare.compare_models import compare
from layerline.compare.output_effects import with_effects
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.threshold_flips import blamed
from layerline.export.signature import Signature, signature
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.rounding_noise import drawn, unjudged
from layerline.graph.quantization import qdq
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.graph.quantization.qdq_placement import products
from layerline.graph.quantization.targets import FORMATS, OF_TYPE
from layerline.parity import output_sqnr, plan_rounding
from layerline.pipeline.report import (
    CHANNELS,
    CLIPPED,
    HISTOGRAMS,
    OWN,
    ROUNDING,
    WEIGHT,
    Gate,
    LayerDiff,
    Report,
    Row,
    Scalar,
)

_LAST_STEP = 127.5 / 127  # what is less than half a step beyond the range is rounded into it
_BY_CHANNEL = 8  # layers, those with the lowest own SQNR
_CHANNELS = 32  # of a layer
_ROUNDED = 2  # feeds on which activations are rounded by numpy


def layer_report(stage: str, converted: Converted, probes: Sequence[Feed], *, mode: str) -> Report:
    """Compares every layer with the float model, and lists what is quantised and what stays float."""
    if mode == "none":
        return Report(stage=stage, notes=("mode none: the model is passed on as it is",))
    reference, plan = converted.reference, converted.plan
    rows = _quantized_rows(converted, qdq.weight_sqnr(reference, plan, converted.rounded))
    layers = compare(reference, converted.measured, probes, isolated=True, sizes_differ=True)
    columns = _columns(converted, rows)
    explained = plan_rounding.own_errors(converted, probes)
    records: list[LayerDiff] = []
    # Inputs of the graph come first: what they lose, the layers behind them never see.
    for record in (*_input_rows(converted, probes), *blamed(layers, reference.graph)):
        extra = dict(record.extra)
        if record.name in explained:
            extra[ROUNDING] = explained[record.name]
        extra |= columns.get(record.name, {})
        records.append(dataclasses.replace(record, extra=extra))
    gates = list(_conversion_gate(converted, mode))
    if runs_on_onnxruntime(converted):
        # Where onnxruntime cannot run the artifact, its emulation is all that was measured.
        gates += _emulation_gate(converted, probes)
    return Report(
        stage=stage,
        reference="float onnx on onnxruntime",
        candidate=f"{mode} onnx on onnxruntime",
        records=tuple(records),
        metrics=unjudged(reference.graph, drawn(reference)) | _counts(converted, mode),
        gates=tuple(gates),
        notes=converted.notes,
        tables={
            "quantized": list(rows.values()),
            "stays float": [dataclasses.asdict(kept) for kept in plan.kept],
            HISTOGRAMS: _histograms(converted),
        },
    )


def runs_on_onnxruntime(converted: Converted) -> bool:
    """Whether onnxruntime can run the artifact as it is: its CPU provider has neither bfloat16 nor float4."""
    return "bf16" not in converted.halved and all(v.dtype != "float4e2m1" for v in converted.plan.values)


def with_outputs(
    report: Report,
    converted: Converted,
    data: CalibrationData,
    probes: Sequence[Feed],
    signature: Signature,
    *,
    bounds: output_sqnr.Bounds | None,
) -> Report:
    """Adds the SQNR of the outputs on samples, or on the probes where there are none, and by input size.

    Args:
        bounds: what an output must have; None where a metric was measured instead.
    """
    feeds = output_sqnr.samples(data, probes)
    outputs = output_sqnr.outputs(converted.reference, converted.measured, feeds)
    warnings = output_sqnr.warning(outputs)
    for text in warnings:
        data.work.log.say(text)
    metrics: Row = {}
    worst = output_sqnr.least(outputs)
    if worst is not None:
        metrics["output_sqnr_db"] = worst[1].sqnr_db
    gates = list(report.gates)
    # Where a metric was measured, that one judges.
    if bounds is not None:
        gates += output_sqnr.gates(outputs, bounds)
    if data.hook() is not None:
        # Samples that calibration left out of eval_data() itself do not make it other data.
        evaluated = {} if data.hook() == "eval_data" else data.evaluated.peaks
        # Data of another scale gives ranges that fit nothing, whatever the calibrator is.
        gates += output_sqnr.data_gate(data.survey.peaks, evaluated)
    tables = dict(report.tables)
    sizes = output_sqnr.by_size(converted.reference, converted.measured, probes, signature)
    if sizes:
        tables["outputs by size"] = sizes
    notes = [*warnings, *report.notes, *output_sqnr.unseen(data.survey.shapes, signature)]
    by_numbers = counted(converted.reference.graph).note()
    if by_numbers:
        notes.insert(0, by_numbers)
    return dataclasses.replace(
        report, metrics={**metrics, **report.metrics}, gates=tuple(gates), notes=tuple(notes), tables=tables
    )


def _counts(converted: Converted, mode: str) -> dict[str, Scalar]:
    """How many nodes and values were converted, and to what."""
    counts: dict[str, Scalar] = {}
    if mode in FORMATS:
        formats = _product_formats(converted)
        total = len(products(converted.reference))
        for name in (mode, *sorted(set(formats.values()) - {mode})):
            counts[f"{name}_products"] = f"{list(formats.values()).count(name)} of {total}"
        for role in ("activation", "weight"):
            # A value that is quantised to two types counts twice.
            counts[f"quantized_{role}s"] = sum(value.role == role for value in converted.plan.values)
    for half_type, nodes in converted.halved.items():
        counts[f"{half_type}_nodes"] = nodes
    return counts


def _product_formats(converted: Converted) -> dict[str, str]:
    """The format of each matrix product that is quantised, by its first output."""
    formats: dict[str, str] = {}
    for value in converted.plan.values:
        for reader, _ in value.readers:
            # The format of a layer is that of its weights and activations: a model may mix them.
            formats[reader] = OF_TYPE.get(value.dtype, value.dtype)
    return {name: formats[name] for name in products(converted.reference) if name in formats}


def _conversion_gate(converted: Converted, mode: str) -> tuple[Gate, ...]:
    """Fails where nothing was converted although the model has matrix products."""
    all_products = set(products(converted.reference))
    total = len(all_products)
    # The two most frequent reasons say what to change.
    reasons = Counter(entry.reason for entry in converted.plan.kept)
    if mode in FORMATS:
        count = len(_product_formats(converted))
        name, summary = "quantisation", f"{count} of {total} matrix products are quantised"
        reasons = Counter(entry.reason for entry in converted.plan.kept if entry.name in all_products)
    else:
        count = converted.halved[mode]
        name, summary = "conversion", f"{count} nodes compute in {mode}, of a model with {total} matrix products"
    if count or not total:
        return ()
    hint = "`stays float` in the report lists every reason"
    for reason, times in reasons.most_common(2):
        hint += f"; {times} because {reason}"
    hint += "; mode: none passes the model on as it is"
    return (Gate(name, False, summary, f"at least one in {mode}", hint),)


def _histogram(converted: Converted, name: str) -> Histogram | None:
    if converted.ranges is None:
        return None
    return converted.ranges.histograms.get(name)


def _quantized_rows(
    converted: Converted, losses: Mapping[tuple[str, str], qdq.WeightLoss]
) -> dict[tuple[str, str], Row]:
    """One row a quantised value, by its name and type."""
    rows: dict[tuple[str, str], Row] = {}
    for value in converted.plan.values:
        row: Row = {
            "value": value.name,
            "role": value.role,
            "type": value.dtype,
            "module": value.module,
            "axis": value.axis,
            "least_scale": min(value.scales, default=None),
            "greatest_scale": max(value.scales, default=None),
            "calibrator": value.calibrator,
            "range_used": None,
            "clipped": None,
            "sqnr_db": None,
            "worst_channel_db": None,
            "why": value.why,
        }
        histogram = _histogram(converted, value.name)
        if histogram is not None:
            # The share of the activation's elements beyond its range.
            row["clipped"] = histogram.beyond(value.amax * _LAST_STEP)
            if value.amax:
                # The greatest |x| that calibration saw, in units of the range's end.
                row["range_used"] = histogram.amax / value.amax
        loss = losses.get((value.name, value.dtype))
        if loss is not None:
            row |= {"sqnr_db": loss.sqnr_db, "worst_channel_db": loss.worst_channel_db}
        rows[value.name, value.dtype] = row
    return rows


def _histograms(converted: Converted) -> list[Row]:
    """The shape of each calibrated activation's magnitudes, from 0 to `end`, beside the end of its range."""
    rows: list[Row] = []
    for value in converted.plan.values:
        histogram = _histogram(converted, value.name)
        if histogram is not None and histogram.amax:
            rows.append({"value": value.name, "module": value.module, **histogram.drawn(value.amax)})
    return rows


def _input_rows(converted: Converted, probes: Sequence[Feed]) -> list[LayerDiff]:
    """What rounding and clipping do to each quantised input of the graph, which no layer computes."""
    records = []
    inputs = {value.name: value for value in signature(converted.reference).inputs}
    for value in qdq.activations(converted.plan):
        if value.name not in inputs:
            continue
        total = Distance()
        for feed in probes:
            total += diff_arrays(feed[value.name], qdq.fake_quantized(feed[value.name], value)[0])
        row = LayerDiff(name=value.name, op="Input", shape=inputs[value.name].shape, dtype="float32")
        records.append(dataclasses.replace(row, extra={OWN: total.sqnr_db}, **total.measures()))
    return records


def with_samples(report: Report, converted: Converted, feeds: Sequence[Feed]) -> Report:
    """Adds what is measured on samples: the effect of each layer at the outputs, the channels of the worst layers, and
    of each quantised activation its SQNR and the share beyond its range."""
    report = with_effects(report, converted.reference, converted.measured, feeds)
    if not converted.plan.values:
        return report
    few = feeds[:_ROUNDED]
    values = {value.name: value for value in qdq.activations(converted.plan)}
    losses = {name: Distance() for name in values}
    beyond = dict.fromkeys(values, 0)
    # Rounded by numpy as the plan says, from the exact values: the model's own Q/DQ is not asked.
    session = OnnxRuntime(few_runs=True).open(converted.reference, list(values))
    for feed in few:
        arrays = {**feed, **session.run(feed)}
        for name, value in values.items():
            rounded, count = qdq.fake_quantized(arrays[name], value)
            losses[name] += diff_arrays(arrays[name], rounded)
            beyond[name] += count
    rows: dict[tuple[str, str], Row] = {}
    for row in report.tables.get("quantized", ()):
        name, dtype = str(row["value"]), str(row["type"])
        rows[name, dtype] = dict(row)
        # Of a value that is quantised to two types, only one was measured.
        if name in losses and losses[name].count and dtype == values[name].dtype:
            share = beyond[name] / losses[name].count
            rows[name, dtype] |= {"sqnr_db": losses[name].sqnr_db, "clipped_there": share}
    # Channels are measured of few layers: a row a channel of all would fill the report.
    worst = [record for record in report.sorted("own") if record.own_db is not None][:_BY_CHANNEL]
    in_order = [record for record in report.records if record in worst]
    channels = channel_errors(converted.reference, converted.measured, few, in_order, most=_CHANNELS)
    tables = {**report.tables, "quantized": list(rows.values()), CHANNELS: channels}
    return dataclasses.replace(report, tables=tables)


def _columns(converted: Converted, rows: Mapping[tuple[str, str], Row]) -> dict[str, Row]:
    """By value: the share of it that is clipped, and the SQNR of the weights of the layer that computes it."""
    columns: dict[str, Row] = {}
    for value in converted.plan.values:
        row = rows[value.name, value.dtype]
        columns.setdefault(value.name, {})[CLIPPED] = row["clipped"]
        if value.role == "weight":
            for reader, _ in value.readers:
                columns.setdefault(reader, {})[WEIGHT] = row["sqnr_db"]
    return columns


def _emulation_gate(converted: Converted, probes: Sequence[Feed]) -> tuple[Gate, ...]:
    """Whether the artifact, run as it is, gives the results of its emulation."""
    if converted.measured is converted.model:
        return ()
    by_numbers = counted(converted.reference.graph)
    pairs = {name: name for name in by_numbers.sources}

    def compared(reference: ir.Model, candidate: ir.Model) -> list[LayerDiff]:
        records = compare(reference, candidate, probes, pairs=pairs, sizes_differ=True)
        return [record for record in records if record.name not in by_numbers.outputs]

    differences = compared(converted.measured, converted.model)
    judged = {record.name: record.rel_l2 for record in differences if record.rel_l2 is not None}
    if not judged:  # every output is drawn at random
        return ()
    worst = max(judged, key=lambda name: judged[name])
    # Roundings that are left out move a result no further than the roundings did. More than that is another result.
    losses = [record.rel_l2 or 0.0 for record in compared(converted.reference, converted.measured)]
    allowed = max(0.01, 4 * max(losses))
    passed = all(record.passed for record in differences) and judged[worst] <= allowed
    difference = f"{worst} differs by {judged[worst]:.2e} (relative L2)"
    return (Gate("onnxruntime runs it alike", passed, difference, f"at most {allowed:.2e}"),)
