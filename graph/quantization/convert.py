"""Converts a float model to a smaller format: calibration, the plan, and the model that carries it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import int8_flag, int8_note
from layerline.calib.calibrators import Calibrator
from layerline.calib.collect import Ranges
from layerline.calib.hold_out import TOO_FEW
from layerline.calib.plan import QuantPlan, readers_of
from layerline.calib.samples import Batch, Samples
from layerline.calib.scales import Stored
from layerline.graph.analysis.ir_queries import first_output, graph_values, node_label, stored, subgraphs
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import (
    bias_correction,
    integer_bias,
    mean_errors,
    measured_plan,
    mixed_precision,
    own_qdq,
    qdq,
    qdq_placement,
    rounding,
)
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.targets import FORMATS, OF_TYPE, OPS, TARGETS


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A converted model and how it came about."""

    reference: ir.Model  # the float model, at the opset of the result
    model: ir.Model  # the artifact
    measured: ir.Model  # the model to run on onnxruntime in its place: itself, or its emulation in float32
    plan: QuantPlan  # what is quantised, and what stays float
    ranges: Ranges | None = None  # the ranges that calibration collected; None where nothing was calibrated.
    # number of nodes that compute in half precision, by the type's name
    halved: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences for the report
    # by stored tensor, how many of its numbers became 0 in half precision, and its size
    vanished: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()  # names of values whose channels a repair scaled
    rounded: Mapping[str, Array | Stored] = field(default_factory=dict)  # weights whose steps a repair chose
    # the float model with the weights that training with fake quantisation left, where these are quantised
    trained: ir.Model | None = None


_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def runnable(model: ir.Model) -> ir.Model:
    """The model, or what is measured in its place: onnxruntime's CPU kernels lack float4 and bfloat16, and leave out
    the rounding to float16, overflow included."""
    model = own_qdq.emulate(model)
    if not_emulated(model):
        return model
    for node in model.graph:
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) in _HALF:
            return mixed_precision.emulate(model)
    return model


def not_emulated(model: ir.Model) -> str:
    """Why `runnable` leaves half precision to onnxruntime's own kernels, in words; empty where it does not.

    The emulation is made for models that quantize leaves: float32 outside, and no half values in branches and loops.
    """
    graph = model.graph
    reason = ""
    if any(value.dtype in _HALF for value in (*graph.inputs, *graph.outputs)):
        reason = "its inputs or outputs are half"
    for node in graph:
        if any(_computes_in_half(body) for body in subgraphs(node)):
            reason = f"the body of {node_label(node)} computes in half"
    if not reason:
        return ""
    return f"{reason}: onnxruntime's own half kernels run it, which leave roundings and overflow out"


def _computes_in_half(body: ir.Graph) -> bool:
    """Whether a value of a body, or of one in it, is half."""
    for graph in (body, *body.subgraphs()):
        if any(value.dtype in _HALF for value in graph_values(graph)):
            return True
        if any(tensor.dtype in _HALF for _, tensor in stored(graph)):
            return True
        if any(node.op_type == "Cast" and node.attributes.get_int("to", 0) in _HALF for node in graph):
            return True
    return False


def unchanged(model: ir.Model) -> Converted:
    """The model as it is."""
    return Converted(reference=model, model=model, measured=model, plan=QuantPlan(values=(), kept=()))


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A calibrated float model, from which quantised models are made that keep some layers float."""

    model: ir.Model  # the float model, at an opset that has Q/DQ
    rules: qdq_placement.Rules  # with the layers that stay float in any case
    plan: QuantPlan  # of the model in which all other layers are quantised
    ranges: Ranges  # what calibration collected
    feeds: Sequence[Feed]  # a few calibration samples, on which choices are fitted
    held_out: Sequence[Feed]  # others, on which these are judged; empty where calibration has too few samples.
    # what bias correction takes off each layer's bias; empty where it is off.
    shifts: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    # weights whose ranges and steps a repair chose
    rounded: rounding.RoundedWeights = field(default_factory=rounding.RoundedWeights)
    scaled: frozenset[str] = frozenset()  # names of values whose channels a repair scaled
    repairs: tuple[str, ...] = ()  # those that were made
    notes: tuple[str, ...] = ()  # sentences for the report

    def layers(self) -> dict[str, str]:
        """The format of the layers that are quantised in `plan` and could stay float, in topological order."""
        formats: dict[str, str] = {}
        for value in self.plan.values:
            for reader, _ in value.readers:
                formats[reader] = OF_TYPE[value.dtype]
        return {
            first_output(node): formats[first_output(node)]
            for node in self.model.graph
            # A Concat is quantised for the sake of the layer that reads it.
            if first_output(node) in formats and node.op_type in set(OPS) - {"Concat"}
        }

    def converted(self, keep: Mapping[str, str], fp8: Collection[str] = ()) -> Converted:
        """The quantised model in which these layers stay float; the reason by the layer's first output.

        Args:
            fp8: layers that are fp8 instead.
        """
        plan = self.plan
        if keep or fp8:
            formats = {**self.rules.formats, **dict.fromkeys(fp8, "fp8")}
            rules = dataclasses.replace(self.rules, keep={**self.rules.keep, **keep}, formats=formats)
            chosen = {(v.name, v.dtype): (v.calibrator, v.amax) for v in plan.values if v.role == "activation"}
            placed = qdq_placement.place(self.model, rules)
            # Ranges stay as they were chosen; a value in a type that it did not have gets its range here.
            plan = qdq.make_plan(self.model, placed, self.ranges.histograms, "mse", chosen=chosen)
            plan = rounding.with_scales(plan, self.rounded.entries)
        # Steps and mean errors of int8 mean nothing to a layer in fp8.
        in_fp8 = {value.name for value in plan.values if value.name in self.rounded.entries and "float8" in value.dtype}
        rounded = {name: array for name, array in self.rounded.arrays.items() if name not in in_fp8}
        quantized = qdq.apply(self.model, plan, rounded)
        corrected = readers_of(plan.values) - set(fp8)
        shifts = {layer: shift for layer, shift in self.shifts.items() if layer in corrected}
        if shifts:
            quantized, _ = bias_correction.correct(quantized, shifts)
        if TARGETS[self.rules.target].integer_bias:
            quantized = integer_bias.store(quantized)
        notes = self.notes
        if any(value.dtype in ("int8", "uint8") for value in plan.values):
            notes += (int8_note(int8_flag()),)
        reference = self.model
        if fp8:
            reference = raise_opset(reference, FORMATS["fp8"].opset)
        return Converted(
            reference=reference,
            model=quantized,
            measured=own_qdq.emulate(quantized),
            plan=plan,
            ranges=self.ranges,
            scaled=self.scaled,
            rounded=rounded,
            notes=notes,
        )

    def corrected(self) -> Calibrated:
        """The same model with corrected biases, if the outputs gain by it; a note says how much."""
        if not self.held_out:
            note = f"bias correction was not tried: {TOO_FEW}"
            return dataclasses.replace(self, shifts={}, notes=(*self.notes, note))
        quantized = qdq.apply(self.model, self.plan, self.rounded.arrays)
        axes = bias_correction.axes(self.model, self.plan)
        shifts = mean_errors.measure(self.model, own_qdq.emulate(quantized), axes, self.feeds)
        kept, gain = measured_plan.corrected(self.model, quantized, shifts, self.feeds, self.held_out)
        if not kept:
            shifts = {}
        return dataclasses.replace(self, shifts=shifts, notes=(*self.notes, gain))


def with_own_qdq(model: ir.Model, rules: qdq_placement.Rules) -> Converted:
    """A model that brings its own Q/DQ, as it is."""
    note = "the model brings its own Q/DQ: they are kept with their scales, and nothing else is quantised"
    if rules.skip or rules.keep or rules.forced:
        note += "; skip and layers change nothing in it"
    return Converted(
        reference=own_qdq.without(model),
        model=model,
        measured=own_qdq.emulate(model),
        plan=own_qdq.read(model),
        notes=(note, int8_note(int8_flag())),
    )


def calibrate(
    model: ir.Model,
    data: CalibrationData,
    rules: qdq_placement.Rules,
    *,
    calibrator: Literal["auto"] | Calibrator,
    percentile: float,
    nonfinite: Literal["stop", "skip"],
) -> Calibrated:
    """Collects the ranges of a float model, and chooses how each value is quantised."""
    # Raised before anything else, so that the float and the quantised model have the same opset and graph.
    model = raise_opset(model, qdq.required_opset(model, rules.opset))
    placed = qdq_placement.place(model, rules)
    hook_notes: tuple[str, ...] = ("only weights are quantised, so no sample was read",)
    ranges = Ranges(histograms={}, samples=0)
    if placed.activations or data.hook() is not None:
        data.choose_samples(model, placed.activations)
        samples, hook_notes = data.calibration()
        ranges = data.ranges(model, placed.activations, samples, nonfinite)
    feeds, held_out = data.parts()
    tuned = measured_plan.tuned(
        model, rules, placed, ranges.histograms, feeds, held_out, calibrator=calibrator, percentile=percentile
    )
    notes = (*hook_notes, *ranges.notes, *tuned.notes)
    return Calibrated(
        model=model,
        rules=tuned.rules,
        plan=tuned.plan,
        ranges=ranges,
        feeds=feeds,
        held_out=held_out,
        notes=notes,
    )


# The greatest |x| of every float32 value, and notes about the samples that it was measured on.
Greatest = tuple[Mapping[str, float], tuple[str, ...]]


def greatest_values(reference: ir.Model, data: CalibrationData, probes: Sequence[Feed]) -> Greatest:
    """Measures the values of a float model on calibration samples, or on the probes where the task has none."""
    batches: Samples | list[Batch] = [Batch(dict(feed), None, 1) for feed in probes]
    notes: tuple[str, ...] = (f"the task has no samples: overflow was looked for on {len(probes)} probe feeds alone",)
    # What overflows on any sample has to be seen, so held-out ones are read too.
    if data.hook() is not None:
        batches, notes = data.calibration()
    ranges = data.ranges(reference, mixed_precision.float_values(reference), batches, "skip", screened=False)
    return {name: histogram.amax for name, histogram in ranges.histograms.items()}, notes


def to_half(
    converted: Converted,
    greatest: Greatest,
    mode: str,
    *,
    skip: Sequence[str],
    single: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Converted:
    """Converts what is still float32 to half precision, wherever the values that were measured allow it.

    Args:
        converted: the model, after `Calibrated.converted` or `unchanged`.
        greatest: of the float model's values.
        skip: names of values or nodes, module paths, or globs that stay in float32.
        single: first outputs of nodes that stay in float32.
        only: first outputs of the nodes that may become half; None: any node.
    """
    opset = mixed_precision.required_opset(converted.model, mode)
    reference = raise_opset(converted.reference, opset)
    amax, sample_notes = greatest
    half = mixed_precision.to_half(converted.model, mode, amax=amax, skip=skip, single=single, only=only)
    notes = [*converted.notes, *(note for note in sample_notes if note not in converted.notes)]
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
        measured=mixed_precision.emulate(own_qdq.emulate(half.model)),
        plan=QuantPlan(values=converted.plan.values, kept=(*converted.plan.kept, *half.kept)),
        halved={mode: half.nodes},
        notes=tuple(notes),
        vanished={**converted.vanished, **half.vanished},
    )
