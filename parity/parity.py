"""Compares the ONNX with torch: every value with the float64 program, every output with the module itself.

The exported program in float64 is the truth, and torch's own float32 error against it the noise floor; a
value passes when the ONNX's error is within a stated multiple of that. The program shares what tracing baked in with
the ONNX, so each probe's outputs are also compared with what the module itself gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare import noise_floor
from layerline.compare.tensor_distance import Distance
from layerline.compare.value_types import types_of
from layerline.export.declared_shapes import Shapes, declared, shapes, watching
from layerline.export.export_errors import refused
from layerline.export.probe_files import Probe
from layerline.export.torch_export import Traced
from layerline.graph.analysis import rounding_noise
from layerline.graph.analysis.ir_queries import names as names_of
from layerline.graph.io import module_identity
from layerline.parity.value_verdicts import Tally, Within
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate, LayerDiff

_FIXED = "a size or value was fixed while tracing: take it from the input's shape, or declare min, max or multiple"
_OPERATOR = (
    "the example differs too, so no size is at fault: the exporter writes an operator otherwise than torch; "
    "`pipe debug export` shows the first, write it with others"
)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The result of a comparison."""

    rows: tuple[LayerDiff, ...]  # one per value that is a node of the program, in the ONNX's topological order
    gates: tuple[Gate, ...]  # one per probe, for the module's own outputs against the ONNX's
    floors: Mapping[str, float]  # noise floor (relative L2) by value
    notes: tuple[str, ...]  # what was not compared, and why
    shapes: Sequence[tuple[Feed, Shapes]] = ()  # the feeds that ran, each with the sizes of every value on it
    # Outputs of the ONNX for each feed; None for a feed that it can't run on.
    outputs: Sequence[Mapping[str, Array] | None] = ()


def parity(traced: Traced, probes: Sequence[Probe], rule: Within | None = None) -> Parity:
    """Runs the ONNX, the program and the module on every probe.

    Args:
        rule: the rule for values; None for the measured floor (`tolerance: auto`).
    """
    try:
        # Inner values are outputs of the session; the sizes of those that are not come from Shape nodes.
        taps = traced.taps()
        watched, value_of = watching(traced.model, declared(traced.model, taps))
        session = OnnxRuntime(few_runs=True).open(watched, taps)
    except StageError as error:
        raise refused(traced.model, error) from error
    tally = Tally(traced, rule)
    refusals: dict[int, StageError] = {}
    ran: list[Probe] = []
    inner_values: list[dict[str, Array]] = []
    kept: list[dict[str, Array]] = []
    sizes: list[tuple[Feed, Shapes]] = []
    outputs: list[Mapping[str, Array] | None] = []
    names = names_of(traced.model.graph.outputs)
    for index, probe in enumerate(probes):
        try:
            everything = session.run(probe.feed)
        except StageError as error:
            refusals[index] = refused(traced.model, error)
            outputs.append(None)
            continue
        values = {name: array for name, array in everything.items() if name not in value_of}
        sizes.append((probe.feed, shapes(everything, value_of)))
        outputs.append({name: values[name] for name in names})
        ran.append(probe)
        inner_values.append(values)
        # `measure` removes values to free their memory.
        kept.append(tally.kept_for_outputs(probe.outputs, values))
    tally.measure([probe.feed for probe in ran], inner_values)
    floors = tally.floors()
    rows = tally.rows(types_of(session))
    notes = []
    for index, refusal in tally.twin.refused.items():
        notes.append(f"{ran[index].label}: inner values not compared from {refusal.where} on; {refusal.what}")
    for node, why in tally.twin.notes.items():
        notes.append(f"{node} has no float64 form; run in float32 there: {why}")
    notes += [*_random(traced, tally.random), *_nonfinite(rows)]
    gates: list[Gate] = []
    feed = 0
    for index, probe in enumerate(probes):
        if index in refusals:
            actual = f"the ONNX can't run: {refusals[index].where}: {refusals[index].what}"
            gates.append(Gate(probe.gate, False, actual, "runs", _FIXED))
        else:
            gates.append(_gate(probe, kept[feed], feed, tally, floors))
            feed += 1
    if not any(gate.passed for gate in gates):
        gates = [replace(gate, hint=_OPERATOR) for gate in gates]
    return Parity(
        rows=rows,
        gates=(*gates, *_folded(traced, tally.random)),
        floors=floors,
        notes=tuple(notes),
        shapes=sizes,
        outputs=outputs,
    )


def _gate(probe: Probe, onnx_values: Mapping[str, Array], feed: int, tally: Tally, floors: Mapping[str, float]) -> Gate:
    """Whether the ONNX gives on this probe what the module itself gives."""
    distances: dict[str, Distance] = {}
    allowed: dict[str, float] = {}
    share: dict[str, float] = {}
    for name, output in probe.outputs.items():
        if name in tally.random:
            continue
        distances[name], used = tally.apart(name, output, onnx_values, feed)
        if tally.rule:
            allowed[name] = 1.0
            share[name] = used
        else:
            # Both sides are float32 here, each off the truth by about the floor.
            allowed[name] = 2.0 * noise_floor.tolerance(floors.get(name, 0.0))
            share[name] = distances[name].rel_l2 / allowed[name]
    if not share:
        return Gate(probe.gate, True, "only non-deterministic outputs", "not compared")
    worst = max(share, key=lambda name: (distances[name].one_sided > 0, share[name]))
    distance = distances[worst]
    actual = distance.mismatch or f"relative L2 {distance.rel_l2:.1e}, {distance.one_sided} one-sided NaN or Inf"
    expected = f"at most {allowed[worst]:.1e}"
    if tally.rule:
        expected = "within rtol and atol"
    if share[worst] <= 1.0 and not distance.one_sided:
        return Gate(probe.gate, True, f"{worst}: {actual}", expected)
    return Gate(probe.gate, False, f"{worst}: {actual}", expected, _FIXED)


def _random(traced: Traced, random: Mapping[str, str]) -> list[str]:
    for node in traced.model.graph:
        for value in names_of(node.outputs):
            if value in random:
                where = module_identity.modules(traced.model).get(value, value)
                count = f"{len(random)} values that depend on it are not compared"
                return [f"non-deterministic op {random[value]} at {where}: {count}"]
    return []


def _nonfinite(rows: Sequence[LayerDiff]) -> list[str]:
    both = [row for row in rows if row.nonfinite_a and not row.one_sided]
    if not both:
        return []
    return [f"{len(both)} values hold NaN or Inf in torch and in the ONNX alike, first {both[0].where}"]


def _folded(traced: Traced, random: Mapping[str, str]) -> list[Gate]:
    """A failed gate for the first random operator that the exporter folded into a constant."""
    # The operator is random in the program, and no longer in the ONNX.
    kept = rounding_noise.drawn(traced.model)
    for value, op in random.items():
        if value not in kept:
            actual = f"{value} is one draw, stored as a constant"
            return [Gate(f"non-deterministic op {op}", False, actual, "a random operator")]
    return []
