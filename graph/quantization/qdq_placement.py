"""Where Q/DQ belongs in one graph: the rules of the operators (`placement_rules.py`), applied step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from layerline.calib.plan import Kept, Wanted, readers_of
from layerline.graph.analysis.ir_queries import copied, first_output, names, values_by_name
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.quantization import placement_rules
from layerline.graph.quantization.kept_reasons import listed
from layerline.graph.quantization.placement_rules import Context, NodeOutcome, Rules
from layerline.graph.quantization.targets import OPS, POOLS, WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

__all__ = ["Placement", "Rules", "check_ops", "place", "products"]

_RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class Placement:
    """The values to quantise, in topological order, and the nodes with weights or a rule that stay float."""

    wanted: tuple[Wanted, ...]
    kept: tuple[Kept, ...]

    @property
    def activations(self) -> list[str]:
        """Names of the values whose ranges calibration has to observe."""
        return list(dict.fromkeys(item.name for item in self.wanted if item.role == "activation"))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A rule, and the operators that it is asked about. It reads what all steps before want, and adds to it."""

    rule: Callable[[Context, ir.Node, Sequence[Wanted]], NodeOutcome]
    ops: Sequence[str]
    follows_choices: bool = True  # the user's choices leave nodes out
    backwards: bool = False  # from the last node to the first


_STEPS = (
    _Step(rule=placement_rules.layer_with_weights, ops=WEIGHTED),
    # An Add fuses with a Conv that is quantised, so the layers with weights come first.
    _Step(rule=placement_rules.residual_add, ops=("Add",)),
    _Step(rule=placement_rules.pool, ops=POOLS),
    # An output is quantised for the sake of what the node itself reads.
    _Step(rule=placement_rules.output, ops=OPS, follows_choices=False),
    # A Concat is quantised for the sake of what reads it, another Concat among that.
    _Step(rule=placement_rules.concat, ops=("Concat",), backwards=True),
)


def place(model: ir.Model, rules: Rules | None = None) -> Placement:
    """Applies the rules to a float model.

    Raises:
        ConfigError: an operator without a rule, or a skip pattern that matches nothing.
        StageError: the model has quantisation nodes already.
    """
    if rules is None:
        rules = Rules()
    check_ops(rules.ops)
    typed = copied(model)
    infer_types(typed)
    context = Context(typed, rules)
    for node in context.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            raise StageError(
                "the model already has quantisation nodes", where=first_output(node), hint="use mode: none"
            )
    wanted: list[Wanted] = []
    kept: dict[ir.Node, str] = {}
    for step in _STEPS:
        nodes = [node for node in context.nodes if node.op_type in step.ops and node.domain == ""]
        for node in reversed(nodes) if step.backwards else nodes:
            reason = context.reason_to_leave(node) if step.follows_choices else ""
            if not reason:
                added, reason = step.rule(context, node, wanted)
                wanted += added
            if reason:
                kept[node] = reason
    tensors = _tensors(wanted)
    _add_tied_readers(context, tensors)
    lines = listed(context.nodes, kept, readers_of(tensors), context.target, rules.format)
    positions = _positions(context)
    return Placement(tuple(sorted(tensors, key=lambda item: positions[item.name])), tuple(lines))


def products(model: ir.Model) -> list[str]:
    """First outputs of all nodes that multiply matrices, subgraphs included: the nodes that int8 speeds up."""
    multiplying = (*WEIGHTED, *_RECURRENT)
    return [first_output(node) for node in model.graph.all_nodes() if node.op_type in multiplying and node.domain == ""]


def check_ops(ops: Sequence[str]) -> None:
    """Raises ConfigError for an operator that has no rule, with the nearest one that has."""
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        hint = did_you_mean(unknown[0], OPS)
        raise ConfigError(
            f"{unknown[0]!r} has no int8 rule; the operators with one are {', '.join(OPS)}", where="ops", hint=hint
        )


def _tensors(wanted: Sequence[Wanted]) -> list[Wanted]:
    """One entry for all readers of a value in one type."""
    tensors: dict[tuple[str, str, int | None], Wanted] = {}
    # By name and type: all values with the same scale. Concats that have a value in common share one.
    groups: dict[tuple[str, str], set[str]] = {}
    for item in wanted:
        group = set(item.shared).union(*(groups.get((name, item.dtype), ()) for name in item.shared))
        groups.update(dict.fromkeys(((name, item.dtype) for name in group), group))
        # A weight is stored once, unless its blocks lie along another axis.
        key = item.name, item.dtype, item.axis if item.block else None
        tensors[key] = _joined(tensors[key], item) if key in tensors else item
    shared: list[Wanted] = []
    for item in tensors.values():
        others = groups.get((item.name, item.dtype), set()) - {item.name}
        shared.append(dataclasses.replace(item, shared=tuple(sorted(others))))
    return shared


def _joined(first: Wanted, other: Wanted) -> Wanted:
    """The entry of a value with further readers. Its scales run along an axis only if all of them agree."""
    axis, reason = first.axis, other.why
    if other.axis != axis:
        axis = None
        reason += ", read along several axes: one scale"
    why = first.why
    if reason not in why.split("; "):
        why = f"{why}; {reason}"
    return dataclasses.replace(first, axis=axis, readers=(*first.readers, *other.readers), why=why)


def _add_tied_readers(context: Context, tensors: list[Wanted]) -> None:
    """Lets all other readers of a quantised weight read its numbers too, so that no float copy remains."""
    values = values_by_name(context.graph)
    quantized = {reader for item in tensors for reader in item.readers}
    for index, item in enumerate(tensors):
        # Four bits are too few for a table that is looked up as well.
        if item.role != "weight" or item.block:
            continue
        tied: list[tuple[str, int]] = []
        for use in values[item.name].uses():
            folds_away = weight_of(use.node.outputs[0]) is not None
            if not folds_away and not context.stays_float(use.node):
                tied.append((first_output(use.node), use.idx))
        tied = [reader for reader in tied if reader not in quantized]
        quantized.update(tied)
        tensors[index] = dataclasses.replace(item, readers=(*item.readers, *tied))


def _positions(context: Context) -> dict[str, int]:
    """The topological order of all values by name: inputs of the graph, and then what each node reads and computes."""
    positions: dict[str, int] = {}
    for name in names(context.graph.inputs):
        positions.setdefault(name, len(positions))
    for node in context.nodes:
        for name in names([*node.inputs, *node.outputs]):
            positions.setdefault(name, len(positions))
    return positions
