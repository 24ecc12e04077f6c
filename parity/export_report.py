"""The report of an export: what was compared, how it is judged, and what a user should know about the ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from layerline.compare.noise_floor import LEAST, MULTIPLE
from layerline.compare.threshold_flips import blamed
from layerline.export.example_call import Call
from layerline.export.signature import bounds
from layerline.graph.analysis.rounding_noise import unjudged
from layerline.parity.parity import Parity
from layerline.parity.probe_inputs import Prober
from layerline.pipeline.report import Gate, LayerDiff, Report, Scalar

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def report(stage: str, opset: int, prober: Prober, result: Parity, gates: Sequence[Gate], *, auto: bool) -> Report:
    """Builds the report.

    Args:
        auto: whether values are judged by the measured noise floor, and not by rtol and atol.
    """
    # The first failure may follow from a value that only jumped.
    rows = blamed(result.rows, prober.traced.model.graph)
    reference = "torch float32"
    judged = "a value passes where every element is within rtol and atol of torch float32"
    if auto:
        reference = "torch float64"
        judged = (
            f"a value passes within {MULTIPLE:g} times its noise floor: torch's own float32 error against float64 "
            f"(at least {LEAST:.0e})"
        )
    notes = [
        judged,
        *start_of_difference(rows),
        *flip_notes(rows),
        *_constant_or_complex(prober.call),
        *_batch_statistics(prober.call.module),
        *_fixed_sizes(prober),
        *prober.notes,
        *result.notes,
    ]
    return Report(
        stage=stage,
        reference=reference,
        candidate="onnx on onnxruntime",
        records=rows,
        gates=(*gates, *result.gates),
        notes=tuple(notes),
        metrics=_metrics(prober, rows, opset),
    )


def batch_size(call: Call) -> int:
    """Size of the first axis of the first input that has axes; 1 if none has."""
    for array in call.feed.values():
        if array.ndim:
            return len(array)
    return 1


def _metrics(prober: Prober, rows: Sequence[LayerDiff], opset: int) -> dict[str, Scalar]:
    graph = prober.traced.model.graph
    # They have a row without measures.
    random = {row.name: str(row.extra["nondeterministic"]) for row in rows if row.extra.get("nondeterministic")}
    # The sizes that the model can be deployed at are a headline of the report.
    sizes: Mapping[str, str] = {"batch": f"fixed at {batch_size(prober.call)}"}
    if prober.axes.names:
        sizes = bounds(prober.dims)
    return {
        **unjudged(graph, random),
        "nodes": len(graph),
        "values_compared": sum("nondeterministic" not in row.extra for row in rows),
        **sizes,
        "opset": opset,
    }


def _fixed_sizes(prober: Prober) -> list[str]:
    """A note if no size can change, which is rarely meant."""
    names = [name for name, array in prober.call.feed.items() if array.ndim]
    if prober.axes.names or not names:
        return []
    note = f"no axis is dynamic: the batch is fixed at {batch_size(prober.call)}, the example's; "
    return [note + f"`dynamic: {{{names[0]}: {{0: batch}}}}` makes it dynamic"]


def _constant_or_complex(call: Call) -> list[str]:
    """Arguments and results that the ONNX lacks, or has in another form."""
    notes = [f"input {n} is no tensor: its value {value!r} is part of the graph" for n, value in call.fixed.items()]
    # A graph returns tensors alone.
    for name, value in call.left_out.items():
        notes.append(f"output {name} is no tensor ({value!r} for the example): the ONNX does not give it")
    complex_note = "is complex: the ONNX takes (real, imaginary) on a last axis"
    return notes + [f"input {name} {complex_note}" for name in call.complex_inputs]


def _batch_statistics(module: nn.Module) -> list[str]:
    """Notes on BatchNorms that normalise by the batch at hand, which is rarely meant."""
    notes = []
    for path, inner in module.named_modules():
        # In eval mode it normalises by the batch all the same.
        if isinstance(inner, _BATCH_NORMS) and inner.running_mean is None:
            notes.append(
                f"module {path} ({type(inner).__name__}) keeps no running statistics (track_running_stats=False): it "
                "normalises by the batch, so a sample's outputs depend on the other samples and on the batch size"
            )
    return notes


def flip_notes(rows: Sequence[LayerDiff]) -> list[str]:
    """A note for each value with elements on the other side of a threshold."""
    notes = []
    for row in rows:
        if row.extra.get("flips"):
            flipped = f"{row.extra['flips']} elements of {row.where} lie on the other side of a threshold than in torch"
            notes.append(f"{flipped}: their operands lie within their own noise of it")
    return notes


def start_of_difference(rows: Sequence[LayerDiff]) -> list[str]:
    """Where the difference starts, and the jump that caused it, if there is one."""
    # In the order of the graph: what is behind the first failure may follow from it.
    failed = [row for row in rows if not row.passed]
    if not failed:
        return []
    row = failed[0]
    places = [row.module, str(row.extra.get("source") or "")]
    where = ", ".join(place for place in places if place)
    if row.extra.get("mismatch"):
        why = str(row.extra["mismatch"])
    elif row.one_sided:
        why = f"{row.one_sided} one-sided NaN or Inf"
    else:
        allowance = "what rtol and atol allow"
        if row.judged == "rel_l2":
            allowance = "its floor"
        why = f"relative L2 {row.rel_l2:.1e} is {row.extra['ratio']:.1f} times {allowance}"
    notes = [f"it starts at {row.name} ({where}): {why}; `pipe debug export` writes the smallest model that shows it"]
    if row.extra.get("cause"):
        notes.append(str(row.extra["cause"]))
    return notes
