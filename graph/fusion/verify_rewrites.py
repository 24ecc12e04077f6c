"""The numeric proof of every firing, in one run of the unfused model.

To the unfused model are added, for every firing, the nodes that replaced a value, reading the unfused model's own
values; the graph itself reduces each pair to two scalars. One session and one run per feed prove everything, no large
value leaves the runtime, and random operators give both sides the same draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from layerline.backends.base import Feed
from layerline.backends.light import Light, rename
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.ir_queries import LIMITS
from layerline.graph.analysis.toposort import in_order, moving
from layerline.graph.fusion.firing import After, Firing
from layerline.graph.fusion.stored_constants import constant_of, with_constants
from layerline.graph.io.ir_convert import store
from layerline.graph.io.opset import opset_of
from layerline.pipeline.errors import StageError

MULTIPLE = 8.0
"""Rounding differs where operations are merged or reordered: a value may move by this many times its noise floor."""
LEAST = 4.0
"""No floor is taken to be lower than this many rounding steps of the value's type (relative L2)."""
REDUCES = 8
"""The first opset for which onnxruntime has all the operators that reduce a pair."""
_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
_STEP = {int(kind): epsilon for kind, (_, epsilon) in LIMITS.items()}


@dataclass(frozen=True)
class Proof:
    """How far a replaced value is from the unfused model's, when computed from the same inputs.

    Attributes:
        error: relative L2 error, the worst over the feeds; inf for another shape and for one-sided NaN or Inf. 0
            without a run where the bytes are the same by construction.
        tolerance: the greatest error that is rounding.
        feeds: how many feeds it was measured on.
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
class _Pair:
    """One value of the unfused model and what computes it now.

    Attributes:
        whole: leaves both sides to numpy.
        equal: asks only whether the two are the same numbers, as a folded weight is: a third of the work.
    """

    name: str
    after: After
    type: int
    whole: bool
    equal: bool


def prove(
    unfused: Light,
    types: Mapping[str, int],
    firings: Sequence[Firing],
    feeds: Sequence[Feed],
    floors: Mapping[str, float],
) -> list[Proof]:
    """One proof per firing, in order.

    Args:
        types: element type of the unfused model's values (onnx numbers).
        floors: noise floor (relative L2) of values by name, where known; see `tolerance`.

    Raises:
        StageError: onnxruntime refuses the unfused model, or can't run it on a feed.
    """
    opset = opset_of(unfused.model)
    # Firings inside one body share the node around it: it is proved once.
    wanted = {(name, id(after)): (name, after) for firing in firings for name, after in firing.after.items()}
    changing = moving(unfused.model.graph)
    pairs = {
        key: _pair(name, after, types.get(name, 0), opset, constant=name not in changing)
        for key, (name, after) in wanted.items()
    }
    # What is computed from constants alone is the same on every feed.
    fixed = {key: pair for key, pair in pairs.items() if pair.name not in changing}
    errors = dict(zip(fixed, _errors(unfused, list(fixed.values()), feeds[:1]), strict=True))
    others = {key: pair for key, pair in pairs.items() if key not in fixed}
    light = with_constants(unfused, _constants(wanted[key] for key, error in errors.items() if error == 0.0))
    errors |= zip(others, _errors(light, list(others.values()), feeds), strict=True)
    return [_proof(firing, errors, types, floors, len(feeds)) for firing in firings]


def reference(unfused: Light, proofs: Iterable[Proof]) -> Light:
    """The unfused model with every constant stored that was proved to be equal: the same values, sooner."""
    return with_constants(unfused, _constants(pair for p in proofs if p.equal for pair in p.firing.after.items()))


def _constants(equal: Iterable[tuple[str, After]]) -> dict[str, ir.TensorProtocol]:
    """Those among values that were proved to be equal; none with a zero, whose sign no proof looks at."""
    found = ((name, constant_of(after)) for name, after in equal)
    return {name: tensor for name, tensor in found if tensor is not None and tensor.numpy().all()}


def _pair(name: str, after: After, kind: int, opset: int, *, constant: bool) -> _Pair:
    whole = kind not in _STEP or opset < REDUCES
    return _Pair(name, after, kind, whole, equal=constant and not whole and kind in _WIDE)


def _proof(
    firing: Firing,
    errors: Mapping[tuple[str, int], float],
    types: Mapping[str, int],
    floors: Mapping[str, float],
    feeds: int,
) -> Proof:
    """The value that is furthest beyond its tolerance speaks for the firing."""
    found = [(errors[name, id(after)], tolerance(name, types, floors)) for name, after in firing.after.items()]
    error, allowed = max(found, key=lambda pair: pair[0] - pair[1], default=(0.0, 0.0))
    return Proof(firing, error, allowed, feeds if found else 0, equal=all(e == 0.0 for e, _ in found))


def tolerance(name: str, types: Mapping[str, int], floors: Mapping[str, float]) -> float:
    """The greatest relative L2 error of a value that counts as rounding; 0 for integers without a floor."""
    return MULTIPLE * max(floors.get(name, 0.0), LEAST * _STEP.get(types.get(name, 0), 0.0))


def _errors(unfused: Light, pairs: list[_Pair], feeds: Sequence[Feed]) -> list[float]:
    """The worst error of each pair over the feeds; inf for one that the runtime can't run or whose shapes clash."""
    if not pairs:
        return []
    try:
        errors = _run(unfused, pairs, feeds)
    except StageError:
        _run(unfused, [], feeds)  # when the unfused model is what can't run, this says so
        if len(pairs) == 1:
            return [math.inf]
        half = len(pairs) // 2
        return _errors(unfused, pairs[:half], feeds) + _errors(unfused, pairs[half:], feeds)
    # Sums that are not finite say nothing about which side has the NaN, and a difference nothing about its size; those
    # few values are looked at whole.
    unclear = [i for i, e in enumerate(errors) if math.isnan(e)]
    again = _errors(unfused, [replace(pairs[i], whole=True, equal=False) for i in unclear], feeds)
    for index, error in zip(unclear, again, strict=True):
        errors[index] = error
    return errors


def _run(unfused: Light, pairs: list[_Pair], feeds: Sequence[Feed]) -> list[float]:
    session = OnnxRuntime(few_runs=True).open(_proof_model(unfused, pairs))
    errors = [0.0] * len(pairs)
    for feed in feeds:
        found = session.run(feed)
        for index, pair in enumerate(pairs):
            error_here = _error(found, index, pair)
            errors[index] = error_here if math.isnan(error_here) else max(errors[index], error_here)
    return errors


def _error(found: Mapping[str, Any], index: int, pair: _Pair) -> float:
    """The error of one pair on one feed; NaN when its sums are not finite."""
    if pair.whole:
        return _whole_error(*(found[side] for side in _sides(index, pair)))
    if found[_key(index, "sa")].tolist() != found[_key(index, "sb")].tolist():
        return math.inf
    if pair.equal:
        return 0.0 if found[_key(index, "l1")] == 0 else math.nan
    square, difference = float(found[_key(index, "aa")]), float(found[_key(index, "ee")])
    if not (math.isfinite(square) and math.isfinite(difference)):
        return math.nan
    return math.sqrt(difference / square) if square > 0 else math.sqrt(difference)


def _whole_error(a: Any, b: Any) -> float:
    if isinstance(a, list):
        same = isinstance(b, list) and len(a) == len(b)
        return max((_whole_error(x, y) for x, y in zip(a, b, strict=True)), default=0.0) if same else math.inf
    if a is None or b is None or np.shape(a) != np.shape(b):
        return 0.0 if a is b else math.inf
    if np.asarray(a).dtype.kind != "f":
        return 0.0 if np.array_equal(a, b) else math.inf
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return math.inf
    norm = float(np.linalg.norm(x[finite]))
    return float(np.linalg.norm(x[finite] - y[finite])) / (norm or 1.0)


def _proof_model(unfused: Light, pairs: Sequence[_Pair]) -> Light:
    light = unfused.copy()
    graph, added, outputs = light.model.graph, list[onnx.NodeProto](), dict[str, None]()
    for index, pair in enumerate(pairs):
        names = _own_names(pair.after, index)
        added += _renamed(pair.after.nodes, names)
        for name, tensor in pair.after.tensors.items():
            store(light, names[name], tensor)
        nodes, ends = _ends(index, pair)
        added += nodes
        outputs |= dict.fromkeys(ends)
    if pairs:
        # Of a pair that is read whole the old side is an output that nothing added reads.
        nodes = unfused.model.graph.node
        added += (n for n in nodes if not outputs.keys().isdisjoint(n.output))
        ordered = in_order(added, nodes)
        del graph.node[:], graph.output[:]
        graph.node.extend(ordered)
        graph.output.extend(helper.make_empty_tensor_value_info(o) for o in outputs)
    return light


def _sides(index: int, pair: _Pair) -> tuple[str, str]:
    """Where both values are read: where they are copied or widened to, or directly."""
    return (_key(index, "a"), _key(index, "b")) if pair.type and not pair.equal else _given(index, pair)


def _given(index: int, pair: _Pair) -> tuple[str, str]:
    return pair.name, _own_names(pair.after, index).get(pair.after.result, pair.after.result)


def _ends(index: int, pair: _Pair) -> tuple[list[onnx.NodeProto], list[str]]:
    """The nodes that turn a pair into what Python reads, and the outputs they fill."""
    key, nodes = partial(_key, index), []
    a, b = _sides(index, pair)
    if pair.equal:
        # Not the greatest: onnxruntime's ReduceMax passes over a NaN.
        nodes = [helper.make_node("Sub", [a, b], [key("e")]),
                 helper.make_node("ReduceL1", [key("e")], [key("l1")], keepdims=0)]  # fmt: skip
        return nodes + _shapes(key, a, b), [key(k) for k in ("l1", "sa", "sb")]
    if pair.type:
        # Squares of float32 overflow and vanish long before the values do.
        op, to = ("Cast", {"to": TensorProto.DOUBLE}) if pair.type in _STEP else ("Identity", {})
        both = zip(_given(index, pair), (a, b), strict=True)
        nodes = [helper.make_node(op, [value], [side], **to) for value, side in both]
    if pair.whole:
        return nodes, [a, b]
    nodes.append(helper.make_node("Sub", [a, b], [key("e")]))
    nodes.append(helper.make_node("ReduceSumSquare", [key("e")], [key("ee")], keepdims=0))
    nodes.append(helper.make_node("ReduceSumSquare", [a], [key("aa")], keepdims=0))
    return nodes + _shapes(key, a, b), [key(k) for k in ("ee", "aa", "sa", "sb")]


def _shapes(key: Callable[[str], str], a: str, b: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Shape", [value], [key(f"s{side}")]) for side, value in (("a", a), ("b", b))]


def _own_names(after: After, index: int) -> dict[str, str]:
    made = {o for n in after.nodes for o in n.output if o} | set(after.tensors)
    return {name: _key(index, f"of {name}") for name in made}


def _renamed(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    copies = onnx.GraphProto(node=nodes)
    rename(copies, names)
    for node in copies.node:
        node.name = ""
    return list(copies.node)


def _key(index: int, what: str) -> str:
    return f"proof {index} {what}"
