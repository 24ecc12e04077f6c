"""Runs a quantised model in a default onnxruntime session, which rounds otherwise in places, and judges the outputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import names, stored
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.quantization.convert import Converted
from layerline.parity import default_session
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate, Report

_FP8 = {ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2}


def with_default_session(
    report: Report, converted: Converted, path: Path, probes: Sequence[Feed], samples: Callable[[], Iterable[Feed]]
) -> Report:
    """Adds gates and notes on running the artifact in a default onnxruntime session.

    Its int8 kernels round some ties to the other side. On a sample between two answers this can move an output further
    than quantisation did. So the session is then judged by its distance from the float model over all feeds.

    Args:
        samples: an iterator over samples of the task's data. It is read only if an output differs on the probes.
    """
    if _holds_fp8(converted.model):
        note = (
            "a default onnxruntime session is not tried: its optimisations make kernels of fp8 that do not exist, "
            "or drop a Relu; with graph_optimization_level = ORT_ENABLE_BASIC it computes what is reported here"
        )
        return dataclasses.replace(report, notes=(*report.notes, note))
    outputs = {*names(converted.model.graph.outputs), *counted(converted.model.graph).sources}
    allowed = {r.name: _default_limit(r.rel_l2 or 0.0) for r in report.records if r.name in outputs}
    gates, notes = default_session.check(path, probes, allowed=allowed)
    if gates:
        gates, more = _judged_by_float(gates, converted, path, itertools.chain(probes, samples()))
        notes += more
    return dataclasses.replace(report, gates=(*report.gates, *gates), notes=(*report.notes, *notes))


def _holds_fp8(model: ir.Model) -> bool:
    """Whether the model holds float8 numbers; a model may bring Q/DQ of its own, which no plan lists."""
    types: set[int] = {tensor.dtype for _, tensor in stored(model.graph)}
    for node in model.graph:
        types.update((node.attributes.get_int("to", 0), node.attributes.get_int("output_dtype", 0)))
    return bool(types & _FP8)


def _default_limit(quantisation_error: float) -> float:
    """Greatest relative L2 distance of an output in a default session."""
    # Its int8 kernels round differently in places, which moves an output no further than quantisation itself did. 1 %
    # passes in any case: single roundings show in an output that quantisation hardly moved.
    return max(default_session.LIMIT_QUANTIZED, 2 * quantisation_error)


def _judged_by_float(
    gates: list[Gate], converted: Converted, path: Path, feeds: Iterable[Feed]
) -> tuple[list[Gate], list[str]]:
    """A note in place of the gates if the session is about as near to the float model as the graph run as written."""
    by_numbers = counted(converted.reference.graph)
    reference = OnnxRuntime(few_runs=True).open(converted.reference, by_numbers.sources)
    written = OnnxRuntime(few_runs=True).open(converted.measured, by_numbers.sources)
    left_out = {*drawn(converted.reference), *by_numbers.outputs}
    by_default: defaultdict[str, Distance] = defaultdict(Distance)
    as_written: defaultdict[str, Distance] = defaultdict(Distance)
    count = 0
    try:
        default = OnnxRuntime(defaults=True).open(path, by_numbers.sources)
        for feed in feeds:
            count += 1
            exact = reference.run(feed)
            optimised = default.run(feed)
            plain = written.run(feed)
            # In the order of the outputs: a set's order differs from run to run, and so might the output named below.
            for name, right in exact.items():
                if name not in left_out:
                    by_default[name] += diff_arrays(right, optimised[name])
                    as_written[name] += diff_arrays(right, plain[name])
    except StageError:
        return gates, []
    for name, distance in by_default.items():
        # Written so that NaN fails too.
        if distance.mismatch or distance.one_sided or not distance.rel_l2 <= _default_limit(as_written[name].rel_l2):
            return gates, []
    if not by_default:
        return gates, []
    worst = max(by_default, key=lambda name: by_default[name].rel_l2)
    near = f"over {count} feeds {worst} has {by_default[worst].sqnr_db:.1f} dB in it"
    begin = f"a default onnxruntime session rounds otherwise in places: {gates[0].seen}"
    return [], [f"{begin}; {near}, and {as_written[worst].sqnr_db:.1f} dB as the graph is written, both against float"]
