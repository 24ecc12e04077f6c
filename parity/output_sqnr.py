"""SQNR of a quantised model's outputs, over all feeds and by size, and the gates on it and on calibration data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.compare_models import compare
from layerline.compare.topk_indices import CARRIERS, pointers
from layerline.export.signature import Signature
from layerline.graph.analysis.counted_values import counted
from layerline.graph.analysis.ir_queries import names, stored_tensor
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.pipeline import wording
from layerline.pipeline.report import LOST_OUTPUT, Gate, Scalar, decibels

# An output below this is worth a warning: its error is more than a tenth of its size.
CLEAR_DB = 20.0
# How many times larger inputs may be in calibration than in evaluation: four of the eight bits.
FAR = 16.0


# They give truth values, which have no distance either.
_TRUTH = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Xor", "Not"}
# What makes one class index of another: a table of labels, an offset, a join. A decoder has other operators as well.
_LOOK_UPS = CARRIERS | {"Gather", "GatherElements", "GatherND", "Add", "Sub", "Concat", "Transpose", "Where"}


@dataclass(frozen=True)
class Output:
    """How near an output is to the reference."""

    sqnr_db: float
    cosine: float
    # what the two figures count where they are no distance: "4 of 200 elements differ" of class indices
    differing: str = ""


Outputs = Mapping[str, Output]


@dataclass(frozen=True)
class Bounds:
    """What every output must have: SQNR in dB, and a cosine where one is asked for."""

    min_db: float
    min_cosine: float | None = None


def samples(data: CalibrationData, probes: Sequence[Feed]) -> Sequence[Feed]:
    """What outputs are compared on: samples that nothing was fitted on, as far as there are any.

    Samples of eval_data() where it was read and is not what was calibrated on, else of calibration, those held out
    first, else the probes.
    """
    fitting, held_out = data.parts()
    evaluated = data.evaluated_feeds()
    if data.hook() == "eval_data":
        return held_out or evaluated or fitting or probes
    return evaluated or held_out or fitting or probes


def outputs(reference: ir.Model, measured: ir.Model, feeds: Sequence[Feed]) -> dict[str, Output]:
    """Each output over all feeds, without outputs that are random, or 0 in the reference.

    Where the size of an output depends on numbers, the values that it is chosen from stand for it. Class indices and
    truth values have no distance: of these, the elements that differ are counted.
    """
    by_numbers = counted(reference.graph)
    pairs = {name: name for name in by_numbers.sources}
    indices = pointers(reference.graph)
    classes = _class_indices(reference.graph)
    distances: dict[str, Output] = {}
    by_equality: list[str] = []
    for record in compare(reference, measured, feeds, pairs=pairs, sizes_differ=True):
        if record.name in by_numbers.outputs:
            continue
        # A look-up may give numbers of any meaning; of integers it gives another name of the class.
        is_class = record.name in indices or (record.name in classes and record.dtype.startswith(("int", "uint")))
        if (is_class or record.dtype == "bool") and "mismatch" not in record.extra and record.sqnr_db is not None:
            by_equality.append(record.name)
            continue
        # A size that no operator is known to choose, as where two branches claim the same, is lost as well.
        lost = bool(record.one_sided) or "mismatch" in record.extra
        # -inf otherwise: the reference is 0, and no ratio says how far off a result is.
        db = -math.inf if lost else record.sqnr_db
        if db is not None and (lost or db != -math.inf):
            differing = str(record.extra.get("mismatch", ""))
            if record.one_sided:
                elements = wording.quantity(record.one_sided, "element is", "elements are")
                differing = f"{elements} NaN or Inf in one of the two models alone"
            distances[record.name] = Output(db, 0.0 if record.cosine is None else record.cosine, differing)
    if by_equality:
        distances |= _by_equality(reference, measured, feeds, by_equality)
    return distances


def _by_equality(
    reference: ir.Model, measured: ir.Model, feeds: Sequence[Feed], outputs: Sequence[str]
) -> dict[str, Output]:
    """The share of equal elements as a cosine, and that of differing ones, a noise power, in dB."""
    exact = OnnxRuntime(few_runs=True).open(reference, outputs)
    converted = OnnxRuntime(few_runs=True).open(measured, outputs)
    indices = pointers(reference.graph)
    total = dict.fromkeys(outputs, 0)
    differing = dict.fromkeys(outputs, 0)
    for feed in feeds:
        expected = exact.run(feed)
        actual = converted.run({name: array for name, array in feed.items() if name in converted.inputs})
        for name in outputs:
            sides = [expected[name], actual[name]]
            pointer = indices.get(name)
            # TopK with sorted=0 may give its indices in any order.
            if pointer is not None and not pointer.ordered and pointer.axis < sides[0].ndim:
                sides = [np.sort(side, axis=pointer.axis) for side in sides]
            total[name] += expected[name].size
            differing[name] += int(np.count_nonzero(sides[0] != sides[1]))
    distances: dict[str, Output] = {}
    for name in outputs:
        if total[name]:
            share = differing[name] / total[name]
            text = f"{differing[name]} of {total[name]} elements differ"
            # The cosine that the classes have as one-hot vectors.
            distances[name] = Output(decibels(1.0, share), 1.0 - share, text)
    return distances


def _class_indices(graph: ir.Graph) -> set[str]:
    """Values that are computed from class indices, truth values and stored tensors alone, by look-ups."""
    classes = set(pointers(graph))
    for node in graph:
        if node.op_type in _TRUTH:
            classes.update(names(node.outputs))
        if node.op_type not in _LOOK_UPS:
            continue
        read = [value.name for value in node.inputs if value is not None and stored_tensor(value) is None]
        if read and classes.issuperset(read):
            classes.update(names(node.outputs))
    return classes


def least(distances: Outputs) -> tuple[str, Output] | None:
    """The output with the lowest SQNR; None if none was measured."""
    if not distances:
        return None
    name = min(distances, key=lambda output: distances[output].sqnr_db)
    return name, distances[name]


def gates(distances: Outputs, bounds: Bounds) -> tuple[Gate, ...]:
    """The gates on the lowest SQNR and, where it is bounded, the lowest cosine of an output."""
    worst = least(distances)
    if worst is None:
        return ()
    name, output = worst
    hint = (
        "the layers with the lowest `own dB` in `pipe diff quantize` cause it: `pipe tune` finds those to keep float; "
        "or try another calibrator or mode: fp16; quantize.min_db sets the bound"
    )
    db = output.sqnr_db
    passed = db >= bounds.min_db
    actual = f"{name} has {wording.in_db(db)}"
    if db == math.inf:
        actual = f"{name} is equal"
    if output.differing:
        actual += f": {output.differing}"
    result = [Gate("output SQNR", passed, actual, f"at least {bounds.min_db:g} dB", "" if passed else hint)]
    if bounds.min_cosine is not None:
        name = min(distances, key=lambda each: distances[each].cosine)
        cosine = distances[name].cosine
        passed = cosine >= bounds.min_cosine
        expected = f"at least {bounds.min_cosine:g}"
        result.append(Gate("output cosine", passed, f"{name} has {cosine:.6f}", expected, "" if passed else hint))
    return tuple(result)


def warning(distances: Outputs) -> tuple[str, ...]:
    """A warning if an output lost more than a good quantisation loses."""
    worst = least(distances)
    if worst is None or worst[1].sqnr_db >= CLEAR_DB:
        return ()
    name, db = worst[0], worst[1].sqnr_db
    if worst[1].differing:
        return (f"{LOST_OUTPUT} {name} has {wording.in_db(db)}: {worst[1].differing}",)
    if db == -math.inf:
        return (f"{LOST_OUTPUT} {name} has {wording.in_db(db)}",)
    # SQNR is of powers; the share is of amplitudes.
    share = 100 * 10 ** (-db / 20)
    return (f"{LOST_OUTPUT} {name} has {db:.1f} dB: its error is {share:.0f} % of its size",)


def by_size(
    reference: ir.Model, measured: ir.Model, feeds: Sequence[Feed], signature: Signature
) -> list[dict[str, Scalar]]:
    """A row for the feed with the smallest and for that with the greatest size of each dynamic dimension."""
    rows: list[dict[str, Scalar]] = []
    for index in _extreme(feeds, signature):
        sizes = _sizes(feeds[index], signature)
        label = ", ".join(f"{name}={size}" for name, size in sizes.items())
        for name, output in outputs(reference, measured, [feeds[index]]).items():
            rows.append({"sizes": label, "output": name, "sqnr_db": output.sqnr_db})
    return rows


def unseen(shapes: Mapping[str, Collection[Sequence[int]]], signature: Signature) -> tuple[str, ...]:
    """Sizes that the model admits and calibration did not cover, a note for each dimension except the batch.

    Args:
        shapes: all shapes of each input in the calibration data.
    """
    covered: dict[str, set[int]] = {}
    for value in signature.inputs:
        for shape in shapes.get(value.name, ()):
            for dim_name, size in zip(value.shape, shape, strict=False):
                covered.setdefault(str(dim_name), set()).add(size)
    notes = []
    batch_axes = _batch_axes(signature)
    for name, dim in signature.dims.items():
        if name in batch_axes or name not in covered:
            continue
        low, high = min(covered[name]), max(covered[name])
        if low <= dim.min and dim.max <= high:
            continue
        span = f"only {low}" if low == high else f"{low} to {high}"
        notes.append(
            f"{name} may be {dim.min} to {dim.max}, and calibration met {span}: ranges at other sizes were not observed"
        )
    return tuple(notes)


def data_gate(calibration: Mapping[str, float], evaluation: Mapping[str, float]) -> tuple[Gate, ...]:
    """Failed gates: inputs are all 0 in calibration, or of another magnitude than where the model is evaluated.

    Args:
        calibration: greatest |x| of each floating-point input in the calibration data.
        evaluation: the same in eval_data(); empty where there is none.
    """
    problem = ""
    if calibration and not any(calibration.values()):
        verb = "holds" if len(calibration) == 1 else "hold"
        problem = f"{' and '.join(calibration)} {verb} only zeros"
    for name, calibrated in calibration.items():
        evaluated = evaluation.get(name, calibrated)
        if not problem and (calibrated > evaluated * FAR or evaluated > calibrated * FAR):
            problem = f"{name} reaches {calibrated:.4g} in the calibration data and {evaluated:.4g} in eval_data()"
    if not problem:
        return ()
    hint = "calibrate on data that is prepared as the model's inputs are: the same scaling and the same kind of samples"
    expected = f"inputs of a like size, at most {FAR:g} times apart"
    return (Gate("calibration data", False, problem, expected, hint),)


def _sizes(feed: Feed, signature: Signature) -> dict[str, int]:
    """The size of each symbolic dimension in a feed."""
    sizes: dict[str, int] = {}
    for value in signature.inputs:
        shape = np.shape(feed[value.name])
        sizes |= {dim: size for dim, size in zip(value.shape, shape, strict=False) if isinstance(dim, str)}
    return sizes


def _batch_axes(signature: Signature) -> set[str]:
    """Dimensions that only ever stand first: a sample's numbers don't depend on how many others are there."""
    first: set[str] = set()
    inner: set[str] = set()
    for value in signature.inputs:
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, str):
                (inner if axis else first).add(dim)
    return first - inner


def _extreme(feeds: Sequence[Feed], signature: Signature) -> list[int]:
    """Indices of the feeds with the smallest and the greatest size of each dimension that varies."""
    sizes_by_feed = [_sizes(feed, signature) for feed in feeds]
    chosen: set[int] = set()
    for name in signature.dims:
        sizes = {index: sizes[name] for index, sizes in enumerate(sizes_by_feed) if name in sizes}
        if len(set(sizes.values())) > 1:
            chosen.add(min(sizes, key=lambda index: sizes[index]))
            chosen.add(max(sizes, key=lambda index: sizes[index]))
    return sorted(chosen)
