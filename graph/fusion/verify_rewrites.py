"""The numeric proof of every firing, in one run of the unfused model.

To the unfused model are added, for every firing, the nodes that replaced a value, reading the unfused model's own
values; the graph itself reduces each pair to two scalars. One session and one run per feed prove everything, no large
value leaves the runtime, and random operators give both sides the same draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.assembly import Assembly, in_order
from layerline.graph.analysis.ir_queries import LIMITS, copied, moving, names
from layerline.graph.fusion.firing import After, Firing
from layerline.pipeline.errors import StageError

MULTIPLE = 8.0
"""Rounding differs where operations are merged or reordered: a value may move by this many times its noise floor."""
LEAST = 4.0
"""No floor is taken to be lower than this many rounding steps of the value's type (relative L2)."""
_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
# The distance from 1 to the next number, by element type.
_STEP = {int(kind): epsilon for kind, (_, epsilon) in LIMITS.items()}


@dataclass(frozen=True)
class RewriteProof:
    """How far a replaced value is from the unfused model's, when computed from the same inputs.

    Attributes:
        error: relative L2 error, the worst over the feeds; inf for another shape and for one-sided NaN or Inf. 0
            without a run where the bytes are the same by construction.
        tolerance: the greatest error that is rounding.
        why: what was wrong where no error could be measured (the runtime refuses the model).
        equal: whether every value is the same, number by number: `error` is of one of them.
    """

    firing: Firing
    error: float
    tolerance: float
    feeds: int
    why: str = ""
    equal: bool = False

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class _Comparison:
    """One value of the unfused model beside what computes it now.

    Attributes:
        index: tells the names of one comparison from those of another: two firings may have made values of one name.
        type: element type of the value (onnx number); 0 where it is no tensor.
        whole: both values leave the runtime, for numpy to compare.
        equal: asks only whether the two are the same numbers, as a folded weight is: a sixth of the memory.
    """

    index: int
    name: str
    after: After
    type: int
    whole: bool
    equal: bool

    def key(self, what: str) -> str:
        """A name in the proof's model."""
        return f"proof {self.index} {what}"

    def made_names(self) -> dict[str, str]:
        """Names in the proof's model for what the firing made."""
        made = set(self.after.tensors)
        for node in self.after.nodes:
            made.update(names(node.outputs))
        return {name: self.key(f"of {name}") for name in made}

    def add_to(self, graph: Assembly) -> tuple[list[ir.Node], list[str]]:
        """Adds what computes the value now, and what reduces the pair; gives the nodes, and the outputs for `error`."""
        made = self.made_names()
        for name, tensor in self.after.tensors.items():
            graph.store(made[name], tensor)
        nodes: list[ir.Node] = []
        for node in self.after.nodes:
            copy = graph.copy(node, lambda name: made.get(name, name), lambda name: made.get(name, self.key(name)))
            # Node names must differ within a graph.
            copy.name = ""
            nodes.append(copy)
        a = self.name
        b = made.get(self.after.result, self.after.result)
        if self.type and not self.equal:
            for side, value in (("a", a), ("b", b)):
                if self.type in _STEP:
                    # Squares of float32 overflow and vanish long before the values do.
                    nodes.append(graph.node("Cast", [value], self.key(side), to=int(ir.DataType.DOUBLE)))
                else:
                    nodes.append(graph.node("Identity", [value], self.key(side)))
            a = self.key("a")
            b = self.key("b")
        if self.whole:
            return nodes, [a, b]
        difference = self.key("difference")
        nodes.append(graph.node("Sub", [a, b], difference))
        # Not the greatest where the two should be equal: onnxruntime's ReduceMax passes over a NaN.
        sums = [("ReduceSumSquare", difference), ("ReduceSumSquare", a)]
        if self.equal:
            sums = [("ReduceL1", difference)]
        outputs: list[str] = []
        for op, value in (("Shape", a), ("Shape", b), *sums):
            outputs.append(self.key(f"output {len(outputs)}"))
            nodes.append(graph.node(op, [value], outputs[-1]))
        return nodes, outputs

    def error(self, outputs: Sequence[Any]) -> float:
        """The error of the pair on one feed, from its outputs in order; NaN when its sums are not finite."""
        if self.whole:
            return _whole_error(*outputs)
        shape_before, shape_after, *sums = outputs
        if shape_before.tolist() != shape_after.tolist():
            return math.inf
        totals = [float(total.item()) for total in sums]
        if self.equal:
            return 0.0 if totals == [0.0] else math.nan
        difference, square = totals
        if not (math.isfinite(square) and math.isfinite(difference)):
            return math.nan
        # Relative to what it should be; of zeros the error is taken as it is.
        return math.sqrt(difference / (square or 1.0))


def prove(
    unfused: ir.Model,
    types: Mapping[str, int],
    firings: Sequence[Firing],
    feeds: Sequence[Feed],
    floors: Mapping[str, float],
) -> list[RewriteProof]:
    """One proof per firing, in order.

    `types` are the element types of the unfused model's values (onnx numbers), `floors` their noise floors
    (relative L2), where known. Raises StageError: onnxruntime refuses the unfused model, or can't run it on a feed.
    """
    changing = moving(unfused.graph)
    # Keyed by the object too: firings inside one body share what came of the node around it, which is proved once.
    constants: dict[tuple[str, int], _Comparison] = {}
    computed: dict[tuple[str, int], _Comparison] = {}
    for firing in firings:
        for name, after in firing.after.items():
            kind = types.get(name, 0)
            equal = name not in changing and kind in _WIDE
            pair = _Comparison(len(constants) + len(computed), name, after, kind, kind not in _STEP, equal)
            pairs = computed
            if name not in changing:
                pairs = constants
            pairs.setdefault((name, id(after)), pair)
    # What is computed from constants alone is the same on every feed.
    errors = dict(zip(constants, _errors(unfused, list(constants.values()), feeds[:1]), strict=True))
    proved = [(pair.name, pair.after) for key, pair in constants.items() if errors[key] == 0.0]
    settled = with_constants(unfused, _proved_constants(proved))
    errors |= zip(computed, _errors(settled, list(computed.values()), feeds), strict=True)
    proofs: list[RewriteProof] = []
    for firing in firings:
        # Without any the bytes are the same by construction.
        proof = RewriteProof(firing, 0.0, 0.0, 0, equal=True)
        for name, after in firing.after.items():
            error = errors[name, id(after)]
            allowed = tolerance(name, types, floors)
            equal = proof.equal and error == 0.0
            # The value that is furthest beyond its tolerance speaks for the firing.
            if proof.feeds and error - allowed <= proof.error - proof.tolerance:
                proof = replace(proof, equal=equal)
            else:
                proof = RewriteProof(firing, error, allowed, len(feeds), equal=equal)
        proofs.append(proof)
    return proofs


def reference(unfused: ir.Model, proofs: Iterable[RewriteProof]) -> ir.Model:
    """The unfused model with every constant stored that was proved to be equal: the same values, sooner."""
    equal: list[tuple[str, After]] = []
    for proof in proofs:
        if proof.equal:
            equal += proof.firing.after.items()
    return with_constants(unfused, _proved_constants(equal))


def _proved_constants(equal: Iterable[tuple[str, After]]) -> dict[str, ir.TensorProtocol]:
    """The constants among values that were proved to be equal; none with a zero, whose sign no proof looks at."""
    constants: dict[str, ir.TensorProtocol] = {}
    for name, after in equal:
        # Without nodes the value has become a stored tensor.
        tensor = after.tensors.get(after.result)
        if not after.nodes and tensor is not None and tensor.numpy().all():
            constants[name] = tensor
    return constants


def with_constants(model: ir.Model, constants: Mapping[str, ir.TensorProtocol]) -> ir.Model:
    """The model with these values stored in place of the nodes that compute them from nothing but constants.

    A proof or a comparison runs the unfused model on many feeds. To transpose every weight again on each of them, as
    exporters write it, would take as long as all the rest.
    """
    # What depends on an input stays computed, even where a rule made it a constant.
    replaceable = constants.keys() - moving(model.graph)
    if not replaceable:
        return model
    out = copied(model)
    graph = out.graph
    for node in list(graph):
        outputs = names(node.outputs)
        if not outputs or not replaceable.issuperset(outputs):
            continue
        for value in node.outputs:
            if value.name:
                stored = ir.Value(
                    name=value.name, type=value.type, shape=value.shape, const_value=constants[value.name]
                )
                value.replace_all_uses_with(stored, replace_graph_outputs=True)
                value.name = None
                graph.register_initializer(stored)
        graph.remove(node, safe=True)
    return out


def tolerance(name: str, types: Mapping[str, int], floors: Mapping[str, float]) -> float:
    """The greatest relative L2 error of a value that counts as rounding; 0 for integers without a floor."""
    return MULTIPLE * max(floors.get(name, 0.0), LEAST * _STEP.get(types.get(name, 0), 0.0))


def _errors(unfused: ir.Model, pairs: list[_Comparison], feeds: Sequence[Feed]) -> list[float]:
    """The worst error of each pair over the feeds; inf for one that the runtime can't run or whose shapes clash."""
    if not pairs:
        return []
    try:
        errors = _run(unfused, pairs, feeds)
    except StageError:
        # When the unfused model is what can't run, this says so.
        _run(unfused, [], feeds)
        # Otherwise one of the comparisons can't: halving finds it.
        if len(pairs) == 1:
            return [math.inf]
        half = len(pairs) // 2
        return _errors(unfused, pairs[:half], feeds) + _errors(unfused, pairs[half:], feeds)
    # Sums that are not finite say nothing about which side has the NaN, and a difference nothing about its size; those
    # few values are looked at whole.
    unclear = [index for index, error in enumerate(errors) if math.isnan(error)]
    again = _errors(unfused, [replace(pairs[index], whole=True, equal=False) for index in unclear], feeds)
    for index, error in zip(unclear, again, strict=True):
        errors[index] = error
    return errors


def _run(unfused: ir.Model, pairs: list[_Comparison], feeds: Sequence[Feed]) -> list[float]:
    model, outputs_of_pairs = _proof_model(unfused, pairs)
    session = OnnxRuntime(few_runs=True).open(model)
    errors = [0.0] * len(pairs)
    for feed in feeds:
        outputs = session.run(feed)
        for index, pair in enumerate(pairs):
            error = pair.error([outputs[name] for name in outputs_of_pairs[index]])
            # max() would pass over a NaN.
            if math.isnan(error) or error > errors[index]:
                errors[index] = error
    return errors


def _whole_error(a: Any, b: Any) -> float:
    """The error of two values of any type: exact for what is not floating point, the worst element of a sequence."""
    if isinstance(a, list):
        if not isinstance(b, list) or len(a) != len(b):
            return math.inf
        return max(map(_whole_error, a, b), default=0.0)
    if a is None or b is None or np.shape(a) != np.shape(b) or np.asarray(a).dtype.kind != "f":
        same = a is b or (b is not None and np.array_equal(a, b))
        return 0.0 if same else math.inf
    x = np.asarray(a, np.float64)
    y = np.asarray(b, np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return math.inf
    norm = float(np.linalg.norm(x[finite]))
    return float(np.linalg.norm(x[finite] - y[finite])) / (norm or 1.0)


def _proof_model(unfused: ir.Model, pairs: Sequence[_Comparison]) -> tuple[ir.Model, list[list[str]]]:
    """The unfused model with what computes each value now beside it; and the outputs of each comparison."""
    if not pairs:
        return unfused, []
    graph = Assembly()
    for name, value in unfused.graph.initializers.items():
        if value.const_value is not None:
            graph.store(name, value.const_value)
    unfused_nodes = [graph.copy(node) for node in unfused.graph]
    added: list[ir.Node] = []
    outputs_of_pairs: list[list[str]] = []
    outputs: dict[str, None] = {}
    for pair in pairs:
        nodes, names_of_pair = pair.add_to(graph)
        added += nodes
        outputs_of_pairs.append(names_of_pair)
        outputs |= dict.fromkeys(names_of_pair)
    # Of a pair that is read whole the old side is an output that nothing added reads.
    added += [node for node in unfused_nodes if not outputs.keys().isdisjoint(names(node.outputs))]
    # Each comparison comes as early as it can: the runtime lets a value go once nothing needs it.
    model = graph.model(
        in_order(added),
        unfused.graph.inputs,
        outputs,
        opsets=unfused.opset_imports,
        ir_version=unfused.ir_version,
        functions=unfused.functions.values(),
    )
    return model, outputs_of_pairs
