"""Fusing a model: apply the rules, prove every firing on real data, undo what fails its proof, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from layerline.backends.light import Model, weightless
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import Array, copied, graph_values
from layerline.graph.fusion.firing import Firing, Site
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import FusionRule
from layerline.graph.fusion.rules import RULES
from layerline.graph.fusion.verify_rewrites import RewriteProof, prove
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.opset import OLDEST, opset_of
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

# A bound against rules that undo each other: the loop ends with the first round that fires nothing.
MAX_ROUNDS = 12
_COMPLAINTS = (onnx.checker.ValidationError, RuntimeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A model after the rules, the record of what they did, and their proofs.

    Attributes:
        model: the rewritten model.
        unfused: the model the rules started from: functions inlined, initializers that were inputs made constants.
        types: element type of every tensor of its main graph, where known.
        declines: why a rule matched and did not fire, by rule and place.
        proofs: one for each firing, where they were proved.
        undone: proofs that failed; their firings were taken back, as if never tried.
    """

    model: ir.Model
    unfused: ir.Model
    types: Mapping[str, int]
    firings: tuple[Firing, ...]
    declines: Mapping[Site, str]
    notes: tuple[str, ...]
    proofs: tuple[RewriteProof, ...] = ()
    undone: tuple[RewriteProof, ...] = ()


def select(switches: Mapping[str, bool]) -> tuple[FusionRule, ...]:
    """The rules that are on, in order. Raises ConfigError for a name that no rule has; it gives the nearest one."""
    names = [rule.name for rule in RULES]
    for name in switches:
        if name not in names:
            what = f"no fusion rule is called {name!r}; {did_you_mean(name, names, 0)}"
            raise ConfigError(what, where="fuse.rules", hint=f"rules: {', '.join(names)}")
    return tuple(rule for rule in RULES if switches.get(rule.name, True))


def rewrite(
    model: Model,
    rules: Sequence[FusionRule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    limit: int | None = None,
    fold_limit: int = 1 << 20,
) -> Rewritten:
    """Applies the rules without proof or check; `model` is left as it was. Raises StageError below opset 11."""
    original = as_ir(model)
    # As for import-onnx: older operators keep in attributes what the rules read from inputs.
    if opset_of(original) < OLDEST:
        what = f"the model is at opset {opset_of(original)}; {OLDEST} is the oldest that can be fused"
        raise StageError(what, where="opset")
    prepared, notes = prepare(original)
    rewritten = copied(prepared)
    work = Rewriting(rewritten, denied=denied, limit=limit, fold_limit=fold_limit)
    work.infer()
    # Of the unfused values: the proof compares with those.
    types: dict[str, int] = {}
    for value in graph_values(rewritten.graph):
        if value.name and value.dtype and isinstance(value.type, ir.TensorType):
            types[value.name] = value.dtype.value
    for _ in range(MAX_ROUNDS):
        before = len(work.firings)
        # Only the declines of the last round are reported: an earlier one may have fired since.
        work.declines.clear()
        work.infer()
        for rule in rules:
            rule.run(work)
        if len(work.firings) == before:
            break
    firings = work.record()
    work.finish()
    _keep_declarations(original.graph, rewritten.graph)
    return Rewritten(
        model=rewritten, unfused=prepared, types=types, firings=firings, declines=work.declines, notes=tuple(notes)
    )


def _keep_declarations(original: ir.Graph, rewritten: ir.Graph) -> None:
    """Gives inputs and outputs the types and shapes that the original declares."""
    declared_inputs = {value.name: value for value in original.inputs}
    for value in rewritten.inputs:
        value.type = declared_inputs[value.name].type
        value.shape = declared_inputs[value.name].shape
    for value, declared in zip(rewritten.outputs, original.outputs, strict=True):
        # Inference knows less of an output than whoever declared it: the symbolic names of its sizes, above all.
        if declared.shape is not None or not isinstance(declared.type, ir.TensorType):
            value.type = declared.type
            value.shape = declared.shape


def fuse(
    model: Model,
    feeds: Sequence[Mapping[str, Array]],
    *,
    rules: Sequence[FusionRule] = RULES,
    floors: Mapping[str, float] | None = None,
    fold_limit: int = 1 << 20,
) -> Rewritten:
    """Applies the rules and keeps what is proved on `feeds`, of several sizes where axes are dynamic; see `prove`.

    Raises StageError: the model can't be run, no feed is given, or the model is not valid before any rule fires.
    """
    if not feeds:
        raise StageError("there is no feed to prove rewrites on", where="feeds")
    original = as_ir(model)

    def proved(some: Rewritten) -> Rewritten:
        return replace(some, proofs=tuple(prove(some.unfused, some.types, some.firings, feeds, floors or {})))

    # Rewriting begins anew without the sites that failed, because later firings may rest on them.
    undone: list[RewriteProof] = []
    while True:
        denied = frozenset(proof.firing.site for proof in undone)
        done = proved(rewrite(original, rules, denied=denied, fold_limit=fold_limit))
        failed = _first_failed(done)
        fault = None
        if failed is None:
            fault = _refusal(done.model, original)
            if fault is None:
                return replace(done, undone=tuple(undone))
        # Firings inside the body of one node stand or fall with the same values.
        sharing = [p for p in done.proofs if failed is not None and p.firing.after == failed.firing.after]
        if failed is None or len(sharing) > 1:
            # One of many: the first k firings are right, the next one isn't.
            def good(some: Rewritten) -> bool:
                return _first_failed(proved(some)) is None and _refusal(some.model, original) is None

            firing = guilty(original, good, rules, denied=denied, fold_limit=fold_limit)
            if firing is None:
                raise StageError(fault or "no single rewrite is to blame", where="fuse")
            if failed is None:
                failed = RewriteProof(firing, math.inf, 0.0, 0, fault or "")
            else:
                failed = replace(failed, firing=firing)
        # A later firing can fail through an earlier one it builds on, so only the first of each round is undone.
        undone.append(failed)


def guilty(
    model: Model,
    good: Callable[[Rewritten], bool],
    rules: Sequence[FusionRule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    fold_limit: int = 1 << 20,
) -> Firing | None:
    """The firing after which `good` no longer holds of the model; None when it still does after all of them.

    Rewriting is deterministic, so the model after the first k firings is well defined for every k. The search assumes
    that a spoilt model stays spoilt, and takes the model before the first firing for good.
    """

    def after(count: int | None) -> Rewritten:
        return rewrite(model, rules, denied=denied, limit=count, fold_limit=fold_limit)

    whole = after(None)
    if good(whole):
        return None
    # Then the model is spoilt by its own, and no rewrite is to blame.
    if not whole.firings:
        return None
    # Good after `low` firings, no longer good after `high`.
    low = 0
    high = len(whole.firings)
    while high - low > 1:
        middle = (low + high) // 2
        if good(after(middle)):
            low = middle
        else:
            high = middle
    return whole.firings[high - 1]


def _first_failed(done: Rewritten) -> RewriteProof | None:
    return next((proof for proof in done.proofs if not proof.passed), None)


def _refusal(model: ir.Model, original: ir.Model) -> str | None:
    """Why a result can't be used; None where it can."""
    try:
        # Loading is the check that counts: every later stage runs the model.
        OnnxRuntime(few_runs=True).open(model)
    except StageError as error:
        return error.what
    try:
        onnx.checker.check_model(weightless(model).SerializeToString())
    except _COMPLAINTS as complaint:
        try:
            onnx.checker.check_model(weightless(original).SerializeToString())
        except _COMPLAINTS:
            # A fault that the original has as well says nothing about the rewriting.
            return None
        return str(complaint).strip()
    return None
