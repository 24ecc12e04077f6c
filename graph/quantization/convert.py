"""Converts a float model to int8, fp16 or bf16: calibration, the plan, and the model that carries it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import int8_flag, int8_note
from layerline.calib.calibrators import Calibrator
from layerline.calib.collect import Ranges
from layerline.calib.plan import QuantPlan
from layerline.calib.samples import Batch, Samples
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import measured_plan, mixed_precision, own_qdq, qdq, qdq_placement, range_choice
from layerline.graph.quantization.calibration_data import CalibrationData


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A converted model and how it came about.

    Attributes:
        reference: the float model, at the opset of the result.
        model: the artifact.
        measured: the model to run on onnxruntime in its place: itself, or its emulation in float32.
        plan: what is quantised, and what stays float.
        ranges: the ranges that calibration collected; None where nothing was calibrated.
        halved: number of nodes that compute in half precision, by the type's name.
        notes: sentences for the report.
        vanished: by stored tensor, how many of its numbers became 0 in half precision, and its size.
    """

    reference: Light
    model: Light
    measured: Light
    plan: QuantPlan
    ranges: Ranges | None = None
    halved: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vanished: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def unchanged(model: Light) -> Converted:
    """The model as it is."""
    return Converted(reference=model, model=model, measured=model, plan=QuantPlan(values=(), kept=()))


def to_int8(
    model: Light,
    data: CalibrationData,
    rules: qdq_placement.Rules,
    *,
    calibrator: Literal["auto"] | Calibrator,
    percentile: float,
    nonfinite: Literal["stop", "skip"],
    bias_correction: bool,
) -> Converted:
    """Calibrates a float model and puts Q/DQ pairs in. A model that has Q/DQ pairs already stays as it is."""
    if own_qdq.present(model):
        note = "the model brings its own Q/DQ: they are kept with their scales, and nothing else is quantised"
        if rules.skip or rules.keep or rules.forced:
            note += "; skip and layers change nothing in it"
        return Converted(
            reference=own_qdq.without(model),
            model=model,
            measured=model,
            plan=own_qdq.read(model),
            notes=(note, int8_note(int8_flag())),
        )
    # Raised before anything else, so that the float and the quantised model have the same opset and graph.
    model = raise_opset(model, qdq.required_opset(model))
    placed = qdq_placement.place(model, rules)
    samples, hook_notes = data.calibration()
    activations = [w.name for w in placed.wanted if w.role == "activation"]
    ranges = data.ranges(model, activations, samples, nonfinite)
    rules, placed = range_choice.apart(model, rules, placed, ranges.histograms)
    feeds = [batch.feed for batch in data.survey.batches()]
    plan_notes: tuple[str, ...] = ()
    if calibrator == "auto":
        plan, plan_notes = measured_plan.tuned(model, rules, placed, ranges.histograms, feeds, percentile=percentile)
    else:
        plan = qdq.plan(model, placed, ranges.histograms, calibrator, percentile=percentile)
    quantized = qdq.apply(model, plan)
    if bias_correction:
        quantized, gain = measured_plan.corrected(model, plan, quantized, feeds)
        plan_notes = (*plan_notes, gain)
    notes = (*hook_notes, *ranges.notes, *plan_notes, int8_note(int8_flag()))
    return Converted(reference=model, model=quantized, measured=quantized, plan=plan, ranges=ranges, notes=notes)


def to_half(
    converted: Converted,
    data: CalibrationData,
    probes: Sequence[Feed],
    mode: str,
    *,
    skip: Sequence[str],
    single: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Converted:
    """Converts what is still float32 to half precision, wherever the values that were measured allow it.

    Args:
        converted: the model, after `to_int8` or `unchanged`.
        probes: inputs to measure values on where the task has no samples.
        mode: "fp16" or "bf16".
        skip: names of values or nodes, module paths, or globs that stay in float32.
        single: first outputs of nodes that stay in float32.
        only: first outputs of the nodes that may become half; None: any node.
    """
    opset = mixed_precision.required_opset(converted.model, mode)
    reference = raise_opset(converted.reference, opset)
    names = mixed_precision.float_values(converted.reference)
    batches: Samples | list[Batch] = [Batch(dict(feed), None, 1) for feed in probes]
    data_notes: tuple[str, ...] = (
        f"the task has no samples: overflow was looked for on {len(probes)} probe feeds alone",
    )
    if data.hook() is not None:
        batches, data_notes = data.calibration()
    ranges = data.ranges(converted.reference, names, batches, "skip")
    amax = {name: histogram.amax for name, histogram in ranges.histograms.items()}
    half = mixed_precision.to_half(converted.model, mode, amax=amax, skip=skip, single=single, only=only)
    notes = [*converted.notes, *(note for note in data_notes if note not in converted.notes)]
    if half.nodes:
        notes.append(
            f"{half.nodes} nodes compute in {mode}; measured in float32 with every {mode} value rounded, "
            "because onnxruntime's CPU kernels leave that rounding out"
        )
    else:
        notes.append(f"no node computes in {mode}: nothing was converted, and the result is no smaller and no faster")
    for name, (count, size) in half.vanished.items():
        notes.append(f"{name}: {count} of {size} numbers are too small for {mode} and became 0")
    return dataclasses.replace(
        converted,
        reference=reference,
        model=half.model,
        measured=mixed_precision.emulate(half.model),
        plan=QuantPlan(values=converted.plan.values, kept=(*converted.plan.kept, *half.kept)),
        halved={mode: half.nodes},
        notes=tuple(notes),
        vanished={**converted.vanished, **half.vanished},
    )
