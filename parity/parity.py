"""torch against ONNX: every value against the float64 program, every output against the module itself.

DESIGN §6: the exported program in float64 is the truth, and torch's own float32 error against it the noise floor; a
value passes when the ONNX's error is within a stated multiple of that. The program shares what tracing baked in with
the ONNX, so each probe's outputs are also compared with what the module itself gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare import noise_floor
from layerline.compare.value_types import types_of
from layerline.export.declared_shapes import Shapes, shapes, watching, without_shapes
from layerline.export.export_errors import refused
from layerline.export.probe import Probe
from layerline.export.torch_export import Traced
from layerline.graph.analysis import rounding_noise
from layerline.graph.io import module_identity
from layerline.parity.value_verdicts import Apart, Tally, Within
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate, LayerDiff


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What was found.

    Attributes:
        rows: one per value that is a node of the program, in the ONNX's topological order.
        gates: one per probe: the module's own outputs against the ONNX's.
        floors: noise floor (relative L2) by value.
        notes: what was not compared, and why.
        shapes: the feeds that ran, each with the sizes of every value on it.
        outputs: what the ONNX gave for each feed; None for one that it can't run on.
        random: outputs that are drawn at random.
    """

    rows: tuple[LayerDiff, ...]
    gates: tuple[Gate, ...]
    floors: Mapping[str, float]
    notes: tuple[str, ...]
    shapes: Sequence[tuple[Feed, Shapes]] = ()
    outputs: Sequence[Mapping[str, Array] | None] = ()
    random: frozenset[str] = frozenset()


def parity(traced: Traced, probes: Sequence[Probe], rule: Within | None = None) -> Parity:
    """Runs the ONNX, the program and the module on every probe.

    Args:
        rule: what values are judged by; None for the measured floor (`tolerance: auto`).
    """
    try:
        taps = traced.taps()
        session = OnnxRuntime(few_runs=True).open(watching(traced.light, taps), taps)
    except StageError as error:
        raise refused(traced.model, error) from error
    tally = Tally(traced, rule)
    seen: list[tuple[Probe, dict[str, Apart] | StageError]] = []
    ran: list[tuple[Probe, dict[str, Array]]] = []
    sizes: list[tuple[Feed, Shapes]] = []
    outputs: list[Mapping[str, Array] | None] = []
    names = [o.name for o in traced.model.graph.output]
    for probe in probes:
        try:
            everything = session.run(probe.feed)
        except StageError as error:
            seen.append((probe, refused(traced.model, error)))
            outputs.append(None)
            continue
        found = without_shapes(everything)
        sizes.append((probe.feed, shapes(everything)))
        outputs.append({n: found[n] for n in names})
        seen.append((probe, {k: tally.apart(k, a, found, len(ran)) for k, a in probe.outputs.items()}))
        ran.append((probe, found))
    tally.measure([p.feed for p, _ in ran], [f for _, f in ran])
    floors = tally.floors()
    notes = [
        f"{ran[i][0].label}: inner values not compared from {error.where} on; {error.what}"
        for i, error in tally.twin.refused.items()
    ]
    notes += [f"{node} has no float64 form; run in float32 there: {why}" for node, why in tally.twin.notes.items()]
    rows = tally.rows(types_of(session))
    return Parity(
        rows=rows,
        gates=(*(_gate(probe, what, tally, floors) for probe, what in seen), *_folded(traced, tally.random)),
        floors=floors,
        notes=(*notes, *_random(traced, tally.random), *_nonfinite(rows)),
        shapes=sizes,
        outputs=outputs,
        random=frozenset(n for n in names if n in tally.random),
    )


def _gate(probe: Probe, seen: dict[str, Apart] | StageError, tally: Tally, floors: Mapping[str, float]) -> Gate:
    """Whether the ONNX does on this probe what the module itself does."""
    hint = "a size or value was fixed while tracing: take it from the input's shape, or declare min, max or multiple"
    name = probe.gate
    if isinstance(seen, StageError):
        return Gate(name, False, f"the ONNX can't run: {seen.where}: {seen.what}", "runs", hint)
    # Both sides are float32 here, each off the truth by about the floor.
    judged = [k for k in seen if k not in tally.random]
    allowed = {k: 1.0 if tally.rule else 2.0 * noise_floor.tolerance(floors.get(k, 0.0)) for k in judged}
    share = {k: (seen[k].used if tally.rule else seen[k].distance.rel_l2) / allowed[k] for k in allowed}
    worst = max(share, key=lambda k: (seen[k].distance.one_sided > 0, share[k]), default=None)
    if worst is None:
        return Gate(name, True, "only non-deterministic outputs", "not compared")
    d = seen[worst].distance
    told = d.mismatch or f"relative L2 {d.rel_l2:.1e}, {d.one_sided} one-sided NaN or Inf"
    expected = "within rtol and atol" if tally.rule else f"at most {allowed[worst]:.1e}"
    passed = share[worst] <= 1.0 and not d.one_sided
    return Gate(name, passed, f"{worst}: {told}", expected, "" if passed else hint)


def _random(traced: Traced, random: Mapping[str, str]) -> list[str]:
    first = next((v for n in traced.model.graph.node for v in n.output if v in random), None)
    if first is None:
        return []
    where = module_identity.modules(traced.model).get(first, first)
    return [f"non-deterministic op {random[first]} at {where}: {len(random)} values that depend on it are not compared"]


def _nonfinite(rows: Sequence[LayerDiff]) -> list[str]:
    both = [r for r in rows if r.nonfinite_a and not r.one_sided]
    told = f"{len(both)} values hold NaN or Inf in torch and in the ONNX alike, first {both[0].where}" if both else ""
    return [told] if told else []


def _folded(traced: Traced, random: Mapping[str, str]) -> list[Gate]:
    """A random operator that the exporter turned into one draw."""
    kept = rounding_noise.drawn(traced.model)
    return [
        Gate(f"non-deterministic op {op}", False, f"{value} is one draw, stored as a constant", "a random operator")
        for value, op in random.items()
        if value not in kept
    ][:1]
