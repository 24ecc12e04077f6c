"""What quantisation did to a model as a whole: the SQNR of its outputs, by size, and whether that may pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.compare.compare_models import compare
from layerline.export.signature import Signature
from layerline.pipeline.report import Gate, LayerDiff, Scalar

CLEAR_DB = 20.0
"""An output below this is worth a warning: its error is more than a tenth of its size."""
FAR = 16.0
"""How many times larger inputs may be in calibration than in evaluation: four of the eight bits."""


def outputs(reference: Light, measured: Light, feeds: Sequence[Feed]) -> dict[str, float]:
    """SQNR of each output in dB over all feeds; of none that is drawn at random, or 0 in the reference."""
    found = {r.name: _decibels(r) for r in compare(reference, measured, feeds, pairs={})}
    return {name: db for name, db in found.items() if db is not None}


def least(found: Mapping[str, float]) -> tuple[str, float] | None:
    """The output that lost most; None where none was measured."""
    name = min(found, key=lambda n: found[n], default=None)
    return None if name is None else (name, found[name])


def gate(found: Mapping[str, float], required: float) -> tuple[Gate, ...]:
    """The least SQNR of an output that passes."""
    worst = least(found)
    if worst is None:
        return ()
    name, db = worst
    hint = (
        "the layers with the lowest `own dB` in `pipe diff quantize` cause it: keep them float with quantize.skip, try "
        "another calibrator or mode: fp16; quantize.min_db sets the bound"
    )
    passed = db >= required
    return (
        Gate("output SQNR", passed, f"{name} has {db:.1f} dB", f"at least {required:g} dB", "" if passed else hint),
    )


def warning(found: Mapping[str, float]) -> tuple[str, ...]:
    """A sentence where an output lost more than a good quantisation loses."""
    worst = least(found)
    if worst is None or worst[1] >= CLEAR_DB:
        return ()
    name, db = worst
    share = 100 * 10 ** (-db / 20)
    return (f"WARNING: output {name} has {db:.1f} dB: its error is {share:.0f} % of its size",)


def by_size(reference: Light, measured: Light, feeds: Sequence[Feed], signature: Signature) -> list[dict[str, Scalar]]:
    """A row for the feed with the smallest and for that with the greatest size of each dynamic dimension."""
    rows: list[dict[str, Scalar]] = []
    for index in _extreme(feeds, signature):
        sizes = _sizes(feeds[index], signature)
        told = ", ".join(f"{k}={v}" for k, v in sizes.items())
        for name, db in outputs(reference, measured, [feeds[index]]).items():
            rows.append({"sizes": told, "output": name, "sqnr_db": db})
    return rows


def unseen(shapes: Mapping[str, Collection[Sequence[int]]], signature: Signature) -> tuple[str, ...]:
    """Sizes that the model admits and calibration did not meet, a sentence for each dimension; not of the batch.

    Args:
        shapes: all shapes of each input in the calibration data.
    """
    met: dict[str, set[int]] = {}
    for value in signature.inputs:
        for shape in shapes.get(value.name, ()):
            for name, size in zip(value.shape, shape, strict=False):
                met.setdefault(str(name), set()).add(size)
    notes = []
    for name, dim in signature.dims.items():
        if name in _batch_axes(signature) or name not in met:
            continue
        low, high = min(met[name]), max(met[name])
        if dim.min < low or dim.max > high:
            span = f"{low} alone" if low == high else f"{low} to {high}"
            notes.append(
                f"{name} may be {dim.min} to {dim.max}, and calibration met {span}: "
                "what ranges are at other sizes was not observed"
            )
    return tuple(notes)


def data_gate(calibration: Mapping[str, float], evaluation: Mapping[str, float]) -> tuple[Gate, ...]:
    """Whether inputs are as large in calibration as where the model is evaluated, and not all 0.

    Args:
        calibration: greatest |x| of each floating-point input in the calibration data.
        evaluation: the same in eval_data(); empty where there is none.
    """
    wrong = []
    if calibration and not any(calibration.values()):
        wrong.append(f"{' and '.join(calibration)} hold{'s' * (len(calibration) == 1)} zeros alone")
    for name in calibration.keys() & evaluation.keys():
        here, there = calibration[name], evaluation[name]
        if not wrong and (here > there * FAR or there > here * FAR):
            wrong.append(f"{name} reaches {here:.4g} in the calibration data and {there:.4g} in eval_data()")
    hint = "calibrate on data that is prepared as the model's inputs are: the same scaling and the same kind of samples"
    expected = f"inputs of a like size, at most {FAR:g} times apart"
    return tuple(Gate("calibration data", False, text, expected, hint) for text in wrong)


def _sizes(feed: Feed, signature: Signature) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in signature.inputs:
        shape = np.shape(feed[value.name])
        found |= {d: shape[i] for i, d in enumerate(value.shape) if isinstance(d, str) and i < len(shape)}
    return found


def _batch_axes(signature: Signature) -> set[str]:
    """Dimensions that only ever stand first: a sample's numbers don't depend on how many others are there."""
    first = {v.shape[0] for v in signature.inputs if v.shape}
    inner = {d for v in signature.inputs for d in v.shape[1:]}
    return {d for d in first - inner if isinstance(d, str)}


def _extreme(feeds: Sequence[Feed], signature: Signature) -> list[int]:
    each = [_sizes(f, signature) for f in feeds]
    chosen = set[int]()
    for name in signature.dims:
        have = [i for i, s in enumerate(each) if name in s]
        if have and len({each[i][name] for i in have}) > 1:
            chosen.add(min(have, key=lambda i: each[i][name]))
            chosen.add(max(have, key=lambda i: each[i][name]))
    return sorted(chosen)


def _decibels(record: LayerDiff) -> float | None:
    if record.one_sided:
        return -math.inf
    # -inf without a one-sided element: the reference is 0, and no ratio says how far off a result is.
    return None if record.sqnr_db is None or record.sqnr_db == -math.inf else record.sqnr_db
