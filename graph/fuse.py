"""Fusing a model: apply the rules, prove every firing on real data, undo what fails its proof, repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph import io
from layerline.graph.apply import Rewritten, rewrite
from layerline.graph.bisect import guilty
from layerline.graph.facts import Array
from layerline.graph.prove import Proof, prove
from layerline.graph.rewrite import Rule, Site
from layerline.graph.rules import RULES
from layerline.pipeline.errors import StageError

# onnx's checker takes serialised models, which end at 2 GiB.
CHECKABLE = 1_900_000_000


@dataclass(frozen=True, kw_only=True)
class Fused(Rewritten):
    """A model after proved rewriting.

    Attributes:
        proofs: one per firing that stands, in order.
        undone: firings whose proof failed; the model is as if they had never been tried.
    """

    proofs: tuple[Proof, ...]
    undone: tuple[Proof, ...]


def fuse(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    scratch: Path,
    *,
    rules: Sequence[Rule] = RULES,
    floors: Mapping[str, float] | None = None,
    fold_limit: int = 1 << 20,
) -> Fused:
    """Applies the rules and keeps what is proved on `feeds`; `model` is left as it was.

    Args:
        feeds: real inputs, at other sizes too where axes are dynamic.
        scratch: a folder for files too large for one message.
        floors: relative L2 noise floor of values by name; see `prove`.

    Raises:
        StageError: the model can't be run, or the result is not a valid model.
    """
    denied: frozenset[Site] = frozenset()
    undone: list[Proof] = []
    while True:
        done = rewrite(model, rules, denied=denied, fold_limit=fold_limit)
        proofs = prove(done.unfused, done.types, done.firings, feeds, floors or {}, scratch)
        # A later firing can fail through an earlier one it builds on, so only the first of each round is blamed.
        spoilt = next((p for p in proofs if not p.passed), None) or _spoils(
            model, done, rules, denied, fold_limit, scratch
        )
        if spoilt is None:
            notes = (*done.notes, *_told(done.model, model))
            return Fused(**vars(replace(done, notes=notes)), proofs=tuple(proofs), undone=tuple(undone))
        undone.append(spoilt)
        denied |= {spoilt.firing.site}


def _spoils(
    model: onnx.ModelProto,
    done: Rewritten,
    rules: Sequence[Rule],
    denied: frozenset[Site],
    fold_limit: int,
    scratch: Path,
) -> Proof | None:
    """The firing after which the model is no longer one that loads; None where the result is valid.

    Raises:
        StageError: the model is not valid even before the first firing.
    """
    why = _fault(done.model, model, scratch)
    if why is None:
        return None

    def good(candidate: onnx.ModelProto) -> bool:
        return _fault(candidate, model, scratch) is None

    firing = guilty(model, good, rules, denied=denied, fold_limit=fold_limit) if good(done.unfused) else None
    if firing is None:
        raise StageError(why, where="fuse")
    return Proof(firing, math.inf, 0.0, 0, why)


def _fault(model: onnx.ModelProto, original: onnx.ModelProto, scratch: Path) -> str | None:
    """Why onnxruntime doesn't load a model, or onnx's plain check refuses it where the original passes."""
    large = sum(len(t.raw_data) for t in model.graph.initializer) > CHECKABLE
    try:
        OnnxRuntime().open(io.save(model, scratch) if large else model.SerializeToString())
    except StageError as error:
        return error.what
    complaint = None if large else _complaint(model, full=False)
    return complaint if complaint and not _complaint(original, full=False) else None


def _told(model: onnx.ModelProto, original: onnx.ModelProto) -> list[str]:
    """What onnx's shape check finds in the result and not in the original.

    A file may hide a fault from that check behind shapes that can't be inferred; folding makes them known. Runtimes
    take the model as before.
    """
    if sum(len(t.raw_data) for t in model.graph.initializer) > CHECKABLE:
        return []
    complaint = _complaint(model, full=True)
    if complaint is None or _complaint(original, full=True):
        return []
    return [f"onnx's shape check, which onnxruntime doesn't share, finds fault with the model: {complaint}"]


def _complaint(model: onnx.ModelProto, full: bool) -> str | None:
    try:
        onnx.checker.check_model(model, full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return str(error).strip()
    return None
