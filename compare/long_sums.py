"""Long sums: what adding thousands of float32 numbers one after the other may cost, where torch adds them in pairs.

torch's own error is no measure for a runtime there: the order of a sum is free, and the errors of n terms added in turn
come to about sqrt(n) rounding steps (Higham, Accuracy and Stability of Numerical Algorithms, §4.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

LONG = 4096
"""Terms from which on a sum gets this allowance; below, torch's measured floor covers it."""
_STEP = 2.0**-24

_TO_FEWER = frozenset({"sum", "mean", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "var_mean", "std_mean"})
_ALONG = frozenset({"cumsum", "softmax", "_softmax", "log_softmax", "_log_softmax", "logcumsumexp"})


def allowances(program: ExportedProgram) -> dict[str, float]:
    """Relative error of each node that long sums before and in it explain; it does not fade on the way."""
    found: dict[str, float] = {}
    for node in program.graph.nodes:
        terms = _terms(node) if node.op == "call_function" else 0
        own = math.sqrt(terms) * _STEP if terms >= LONG else 0.0
        found[node.name] = max([own, *(found[n.name] for n in node.all_input_nodes)]) if _rounds(node) else 0.0
    return found


def _rounds(node: fx.Node) -> bool:
    """Whether any of its results is of floating point: integers add up exactly."""
    value = node.meta.get("val")
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in pytree.tree_leaves(value))


def _terms(node: fx.Node) -> float:
    """How many numbers are added for one of the results, at the example's size."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    given = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    shape = _shape(given.meta.get("val")) if given is not None else ()
    if name in _TO_FEWER:
        return math.prod(shape) / max(math.prod(_shape(node.meta["val"])), 1)
    if name in _ALONG and shape:
        axis = node.args[1]
        return shape[axis] if isinstance(axis, int) else 0
    if name == "layer_norm":
        sizes = node.args[1]
        return math.prod(s for s in sizes if isinstance(s, int)) if isinstance(sizes, list | tuple) else 0
    if name == "group_norm" and isinstance(node.args[1], int):
        return math.prod(shape[1:]) / node.args[1]
    return math.prod(shape[2:]) if name == "instance_norm" else 0


def _shape(value: Any) -> tuple[int, ...]:
    value = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(value, torch.Tensor):
        return ()
    hints = (s if isinstance(s, int) else s.node.hint for s in value.shape)
    return tuple(1 if h is None else int(h) for h in hints)
