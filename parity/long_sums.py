"""What the order of long sums costs: runtimes add in another order than torch, and all of them are right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from layerline.export.program_queries import example_size

# Terms from which on a sum gets this allowance; below, torch's measured floor covers it.
LONG = 4096
_STEP = 2.0**-24

_TO_FEWER = frozenset({"sum", "mean", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "var_mean", "std_mean"})
_ALONG = frozenset({"cumsum", "softmax", "_softmax", "log_softmax", "_log_softmax", "logcumsumexp"})


def long_sums(program: ExportedProgram) -> dict[str, float]:
    """Relative error of each node that long sums in it and before it explain. It does not shrink on the way.

    torch adds in pairs, so its error is too small a measure for runtimes that add in turn. The order of a sum is free,
    and the errors of n terms added in turn come to about sqrt(n) rounding steps (Higham, Accuracy and Stability of
    Numerical Algorithms, §4.2).
    """
    errors: dict[str, float] = {}
    for node in program.graph.nodes:
        errors[node.name] = 0.0
        leaves = pytree.tree_leaves(node.meta.get("val"))
        # Integers add up exactly.
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
            continue
        # An error does not shrink on the way: what is computed from a long sum has its error as well.
        inherited = max((errors[n.name] for n in node.all_input_nodes), default=0.0)
        errors[node.name] = inherited
        if node.op == "call_function":
            terms = _terms(node)
            if terms >= LONG:
                errors[node.name] = max(math.sqrt(terms) * _STEP, inherited)
    return errors


def _terms(node: fx.Node) -> float:
    """How many numbers are added for one element of the result, at the example's size."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    shape: tuple[int, ...] = ()
    if node.args and isinstance(node.args[0], fx.Node):
        shape = _shape(node.args[0].meta.get("val"))
    # Reductions to fewer elements, whatever the axes: all that goes in, over all that comes out.
    if name in _TO_FEWER:
        return math.prod(shape) / max(math.prod(_shape(node.meta["val"])), 1)
    if name in _ALONG and shape:
        axis = node.args[1]
        if isinstance(axis, int):
            return shape[axis]
    if name == "layer_norm":
        sizes = node.args[1]
        if not isinstance(sizes, list | tuple):
            return 0
        return math.prod(s for s in sizes if isinstance(s, int))
    if name == "group_norm" and isinstance(node.args[1], int):
        return math.prod(shape[1:]) / node.args[1]
    if name == "instance_norm":
        return math.prod(shape[2:])
    return 0


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of the first of several, at the example's size."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(example_size(size) for size in value.shape)
