"""Applying rules to a model, without proof: which rules, in what form the model goes in and comes out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx_ir as ir

from layerline.backends.light import Light, Model, split
from layerline.graph.fusion.rewriter import Rewriting, run, values
from layerline.graph.fusion.rule import Decline, Firing, Rule, Site
from layerline.graph.fusion.rules import RULES
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.pipeline.errors import ConfigError


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
    names = [r.name for r in RULES]
    for name in switches:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0)
            raise ConfigError(
                f"no fusion rule is called {name!r}; did you mean {near[0]!r}?",
                where="fuse.rules",
                hint=f"rules: {', '.join(names)}",
            )
    return tuple(r for r in RULES if switches.get(r.name, True))


def rewrite(
    model: Model,
    rules: Sequence[Rule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    limit: int | None = None,
    fold_limit: int = 1 << 20,
) -> Rewritten:
    """Applies the rules without proof or check; `model` is left as it was."""
    given = split(model)
    prepared, notes = prepare(given)
    graph = to_ir(prepared)
    work = Rewriting(graph, denied=denied, limit=limit, fold_limit=fold_limit)
    work.infer()
    types = {
        v.name: v.dtype.value for v in values(graph.graph) if v.name and v.dtype and isinstance(v.type, ir.TensorType)
    }
    run(work, rules)
    firings = work.record()
    work.finish()
    light = from_ir(graph)
    declared = {i.name: i for i in given.model.graph.input}
    for taken in light.model.graph.input:
        taken.CopyFrom(declared[taken.name])
    for own, said in zip(light.model.graph.output, given.model.graph.output, strict=True):
        # Inference knows less of an output than whoever declared it: the symbolic names of its sizes, above all.
        if said.type.tensor_type.HasField("shape") or not said.type.HasField("tensor_type"):
            own.CopyFrom(said)
    declines = tuple(work.declines.values())
    return Rewritten(light=light, unfused=prepared, types=types, firings=firings, declines=declines, notes=tuple(notes))
