"""Applying rules to a model, without proof: which rules, in what form the model goes in and comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx_ir as ir

from layerline.backends.light import Light, Model, split
from layerline.graph.analysis.ir_queries import graph_values
from layerline.graph.fusion.firing import Decline, Firing, Site
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule
from layerline.graph.fusion.rules import RULES
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import did_you_mean

# A bound against rules that undo each other: the loop ends with the first round that fires nothing.
MAX_ROUNDS = 12


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A model after the rules, and the record of what they did.

    Attributes:
        light: the model, its weights apart.
        unfused: the model the rules started from: functions inlined, initializers that were inputs made constants.
        types: element type of every tensor of its main graph, where known.
    """

    light: Light
    unfused: Light
    types: Mapping[str, int]
    firings: tuple[Firing, ...]
    declines: tuple[Decline, ...]
    notes: tuple[str, ...]

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The whole model in one message."""
        return self.light.whole()


def select(switches: Mapping[str, bool]) -> tuple[Rule, ...]:
    """The rules that are on, in order.

    Raises:
        ConfigError: a name that no rule has; the message gives the nearest one.
    """
    names = [rule.name for rule in RULES]
    for name in switches:
        if name not in names:
            raise ConfigError(
                f"no fusion rule is called {name!r}; {did_you_mean(name, names, 0)}",
                where="fuse.rules",
                hint=f"rules: {', '.join(names)}",
            )
    return tuple(rule for rule in RULES if switches.get(rule.name, True))


def rewrite(
    model: Model,
    rules: Sequence[Rule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    limit: int | None = None,
    fold_limit: int = 1 << 20,
) -> Rewritten:
    """Applies the rules without proof or check; `model` is left as it was."""
    original = split(model)
    prepared, notes = prepare(original)
    graph = to_ir(prepared)
    work = Rewriting(graph, denied=denied, limit=limit, fold_limit=fold_limit)
    work.infer()
    # Of the unfused values: the proof compares with those.
    types: dict[str, int] = {}
    for value in graph_values(graph.graph):
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
    light = from_ir(graph)
    _keep_declarations(original.model.graph, light.model.graph)
    return Rewritten(
        light=light,
        unfused=prepared,
        types=types,
        firings=firings,
        declines=tuple(work.declines.values()),
        notes=tuple(notes),
    )


def _keep_declarations(original: onnx.GraphProto, rewritten: onnx.GraphProto) -> None:
    """Gives inputs and outputs the types and shapes that the original declares."""
    declared_inputs = {item.name: item for item in original.input}
    for item in rewritten.input:
        item.CopyFrom(declared_inputs[item.name])
    for item, declared in zip(rewritten.output, original.output, strict=True):
        # Inference knows less of an output than whoever declared it: the symbolic names of its sizes, above all.
        if declared.type.tensor_type.HasField("shape") or not declared.type.HasField("tensor_type"):
            item.CopyFrom(declared)
