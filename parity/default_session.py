"""Runs a saved model in a default onnxruntime session, as users do, with its optimisations and memory re-use.

Comparisons elsewhere run a graph unoptimised, to judge the graph and not the runtime. Some models pass there, and fail
or give other numbers in a default session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime, int8_flag
from layerline.backends.subprocess_build import ProcessDied
from layerline.compare import noise_floor
from layerline.compare.region import region
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointers, resolved
from layerline.compare.value_pairs import computed_values
from layerline.compare.value_types import CODES, types_of
from layerline.export import declared_shapes
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import fed, first_output, names
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate

GATE = "default onnxruntime session"
# Relative L2 error of an output that covers other kernels and another order of sums.
LIMIT = 1e-4
# The same of a model with Q/DQ: integer kernels round some values to the next step, and those for weights in 8 bits
# also quantise the activations.
LIMIT_QUANTIZED = 0.01
_EXPECTED = "runs every probe, and gives what the graph gives as it is written"
# Elements of a step that may jump because of rounding: at most so many, or this share of all.
FLIPS = 2
FLIPPED_SHARE = 0.01
# Operators whose result jumps where a float crosses a threshold or a tie.
_STEPS = frozenset("Round Floor Ceil Sign Greater GreaterOrEqual Less LessOrEqual Equal ArgMax ArgMin TopK".split())  # noqa: SIM905
_NUMBERS = frozenset(CODES) - {"bfloat16"}
_NO_INT8 = {"session.disable_quant_qdq": "1"}


@dataclass(frozen=True)
class _Fault:
    """The first thing that went wrong: on which feed, where, and what."""

    feed: int
    what: str
    where: str = ""
    raised: bool = False
    died: bool = False


def limits(model: ir.Model, floors: Mapping[str, float], outputs: Collection[str]) -> dict[str, float]:
    """Greatest relative L2 error of each output: twice what parity allows one side, and at least LIMIT.

    At least LIMIT_QUANTIZED where the model brings Q/DQ: a default session then computes with integers.
    """
    least = LIMIT
    if any(node.op_type == "DequantizeLinear" for node in model.graph):
        least = LIMIT_QUANTIZED
    return {name: max(least, 2.0 * noise_floor.tolerance(floors.get(name, 0.0))) for name in outputs}


def check(
    path: Path,
    feeds: Sequence[Feed],
    *,
    allowed: Mapping[str, float],
    expected: Sequence[Mapping[str, Array]] | None = None,
) -> tuple[list[Gate], list[str]]:
    """Opens a saved model in a default session and runs it on every feed.

    If it fails because shapes of inner values are declared wrong, they are corrected in the file.

    Args:
        allowed: greatest relative L2 error by output; LIMIT for those left out.
        expected: outputs of the unoptimised graph for each feed; computed here if left out.

    Returns:
        A gate if it failed, and notes: how far apart the outputs were, what was corrected or excused.
    """
    if expected is None:
        session = OnnxRuntime(few_runs=True).open(path)
        expected = [session.run(feed) for feed in feeds]
    fault, worst = _run(path, feeds, expected, allowed)
    notes: list[str] = []
    if fault is not None and fault.died:
        # A fault of onnxruntime that other optimisations leave out is no fault of the model: it is told.
        crash = fault.what
        fault, worst = _run(path, feeds, expected, allowed, extended=True)
        if fault is None:
            level = "with graph_optimization_level = ORT_ENABLE_EXTENDED it computes what is reported here"
            return [], [f"in a default session {crash}; {level}, on all {len(feeds)} feeds, within {worst:.1e}"]
    if fault is not None:
        model = onnx_files.read_model(path)
        corrected = declared_shapes.correct(model, declared_shapes.measured(model, feeds))
        if corrected:
            onnx_files.save(model, path.parent)
            count = f"{len(corrected)} inner values"
            notes.append(f"the declared shape of {count} was wrong, first {corrected[0]}: it was corrected")
            fault, worst = _run(path, feeds, expected, allowed)
    if fault is not None and not fault.raised and int8_flag() == "":
        # Without VNNI, kernels that multiply u8 by s8 saturate: a property of this CPU, not of the model.
        float_fault, _ = _run(path, feeds, expected, allowed, _NO_INT8)
        if float_fault is None:
            notes.append(f"int8 kernels of a default session saturate on this CPU, which has no VNNI: {fault.what}")
            return [], notes
    if fault is None:
        notes.append(f"a default onnxruntime session gives the same on all {len(feeds)} feeds, within {worst:.1e}")
        return [], notes
    # A difference next to a threshold is no error where it begins at a step and is small.
    where, flipped = _locate(path, feeds, fault)
    if flipped and not fault.raised:
        begin = f"a default onnxruntime session differs from {where} on, where values lie next to a threshold"
        return [], [*notes, f"{begin}: {fault.what}"]
    shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in feeds[fault.feed].items())
    actual = f"feed {fault.feed} ({shapes}): {where}: {fault.what}"
    hint = (
        "users who open the file with onnxruntime's defaults get this; leave the operator out, or report it to "
        "onnxruntime"
    )
    return [Gate(GATE, False, actual, _EXPECTED, hint)], notes


def _run(
    path: Path,
    feeds: Sequence[Feed],
    expected: Sequence[Mapping[str, Array]],
    allowed: Mapping[str, float],
    config: Mapping[str, str] | None = None,
    *,
    extended: bool = False,
) -> tuple[_Fault | None, float]:
    """The first fault, and the greatest distance of an output."""
    worst = 0.0
    model = onnx_files.read_model(path)
    indices = pointers(model.graph)
    random = drawn(model)  # outputs that depend on a random operator are not judged
    by_numbers = counted(model.graph)
    try:
        session = OnnxRuntime(defaults=True, extended=extended, config=config).open(path)
    except StageError as error:
        return _Fault(0, error.what, raised=True, died=isinstance(error, ProcessDied)), worst
    for index, (feed, right) in enumerate(zip(feeds, expected, strict=True)):
        try:
            outputs = session.run(feed)
        except StageError as error:
            return _Fault(index, error.what, raised=True), worst
        for name in right:
            if name not in outputs or name in random:
                continue
            sides = (right[name], outputs[name])
            distance = diff_arrays(*sides)
            if name in indices and distance.max_abs > 0 and not distance.mismatch:
                # Near ties may fall either way, so the values that the indices point at are compared.
                source = indices[name].data
                values = {**feed, **OnnxRuntime(few_runs=True).open(path, [source]).run(feed)}
                distance = diff_arrays(*resolved(indices[name], values, sides))
            if not _within(distance, allowed.get(name, LIMIT)):
                if name in by_numbers.outputs and _sources_agree(path, feed, by_numbers.sources, allowed):
                    continue
                error_text = f"relative L2 {distance.rel_l2:.1e}, {distance.one_sided} one-sided NaN or Inf"
                return _Fault(index, f"output {name} is off by {distance.mismatch or error_text}", name), worst
            worst = max(worst, distance.rel_l2)
    return None, worst


def _within(distance: Distance, limit: float) -> bool:
    return not distance.mismatch and not distance.one_sided and distance.rel_l2 <= limit


def _sources_agree(path: Path, feed: Feed, sources: Sequence[str], allowed: Mapping[str, float]) -> bool:
    """Whether the values agree from which an output is chosen: then only a number near a threshold fell otherwise."""
    if not sources:
        return False
    right = OnnxRuntime(few_runs=True).open(path, sources).run(feed)
    default = OnnxRuntime(defaults=True).open(path, sources).run(feed)
    return all(_within(diff_arrays(right[name], default[name]), allowed.get(name, LIMIT)) for name in sources)


def _locate(path: Path, feeds: Sequence[Feed], fault: _Fault) -> tuple[str, bool]:
    """The node that the runtime names, otherwise the first bad one; and whether its values only flipped."""
    model = onnx_files.read_model(path)
    # onnxruntime names the node in most of its errors.
    named = [node for node in model.graph if node.name and f"node {node.name}:" in fault.what]
    flips = 0
    if named:
        value = first_output(named[0])
    else:
        value, flips = _first_bad(model, feeds[fault.feed], fault)
    for node in model.graph:
        if value and value in names(node.outputs):
            module = modules(model).get(value, "")
            where = f"{node.op_type} {node.name or value}"
            if module:
                where += f", module {module}"
            return where, node.op_type in _STEPS and flips > 0
    return value or "the model", False


def _first_bad(model: ir.Model, feed: Feed, fault: _Fault) -> tuple[str, int]:
    """The first value that a default session computes wrong, by bisection.

    Also the number of elements that differ if it is small enough for flips; otherwise 0.
    """
    values = computed_values(model.graph)
    try:
        session = OnnxRuntime(few_runs=True).open(model, values)
    except StageError:
        return fault.where, 0
    types = types_of(session)
    right = session.run(feed)
    # Sequences, text and bfloat16 have no distance.
    values = [value for value in values if types[value][0] in _NUMBERS]

    def default(value: str) -> Array | None:
        """The value in a default session of the part of the model up to it; None if that fails."""
        # The declared shapes decide which buffers a default session shares, so they must be there.
        part = region(model, value, names(fed(model)), types, declared=True)
        try:
            return OnnxRuntime(defaults=True).open(part).run({name: feed[name] for name in names(fed(part))})[value]
        except StageError:
            return None

    def is_bad(value: str) -> bool:
        array = default(value)
        if array is None:
            return True
        distance = diff_arrays(right[value], array)
        return bool(distance.mismatch or distance.one_sided or distance.rel_l2 > LIMIT)

    if not values or not is_bad(values[-1]):
        return fault.where, 0
    # Whatever is behind a wrong value is most likely wrong as well, so the first one can be bisected.
    first = bisect_left(range(len(values) - 1), True, key=lambda index: is_bad(values[index]))
    value = values[first]
    array = default(value)
    if array is None or array.shape != right[value].shape:
        return value, 0
    # A few elements that jump are a tie; many are a wrong kernel.
    changed = int((array != right[value]).sum())
    if changed > max(FLIPS, FLIPPED_SHARE * array.size):
        return value, 0
    return value, changed
