"""What TensorRT can't build, or would build into something else, told before the build with the tensor's name.

Each rule was seen on TensorRT-RTX 1.7: some faults its parser names itself; those here it takes in silence, reports
without a name, or prints to the terminal. What a parser names well is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from layerline.graph import facts, prepare
from layerline.graph.checks_qdq import quantizers
from layerline.graph.checks_types import TYPES, cast_away, edge
from layerline.graph.site import Refusal, Site, known, name, readable, sites
from layerline.pipeline.errors import StageError

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def examine(model: onnx.ModelProto) -> tuple[str, ...]:
    """Lets through what TensorRT can be asked to build.

    Returns:
        Names of the float64 values, which an engine takes, computes and gives in float32.

    Raises:
        StageError: about the first refusal; says how many more there are and where.
    """
    graph = _inferred(model)
    found = _refusals(graph)
    if found:
        first, rest = found[0], found[1:]
        more = f"; {len(rest)} more, at {rest[0].where}{' and others' if len(rest) > 1 else ''}" if rest else ""
        raise StageError(f"TensorRT can't build this: {first.what}{more}", where=first.where, hint=first.hint)
    values = (*graph.inputs, *(o for site in sites(graph) for o in site.node.outputs))
    return tuple(v.name for v in values if v.name and v.dtype == ir.DataType.DOUBLE and not cast_away(v))


def refusals(model: onnx.ModelProto) -> tuple[Refusal, ...]:
    """Everything in the way, in topological order."""
    return _refusals(_inferred(model))


def suspects(model: onnx.ModelProto) -> tuple[str, ...]:
    """Constructs that builders are known to fail on without naming them, to put beside such a failure."""
    flat = ir.from_proto(prepare.prepare(model)[0])
    found = []
    for site in sites(flat.graph):
        nested = site.node.op_type == "If" and any(n.op_type == "If" for n in site.inside)
        if nested or site.node.op_type in ("NonMaxSuppression", "Attention", "Loop", "Scan"):
            label = "If inside the branch of an If" if nested else site.node.op_type
            found.append(f"{label} ({site.refuse(None, '', '').where})")
    return tuple(found)


def _inferred(model: onnx.ModelProto) -> ir.Graph:
    flat: ir.Model = ir.from_proto(prepare.prepare(model)[0])
    ShapeInferencePass(check_type=False, strict_mode=False)(flat)
    return flat.graph


def _refusals(graph: ir.Graph) -> tuple[Refusal, ...]:
    found = [r for v in (*graph.inputs, *graph.outputs) for r in edge(v)]
    found += [r for site in sites(graph) for check in _CHECKS for r in check(site)]
    # Q and DQ of one tensor share their fault.
    return tuple({(r.tensor, r.what): r for r in reversed(found)}.values())[::-1]


def _training(site: Site) -> Iterator[Refusal]:
    node = site.node
    if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
        yield site.refuse(node.outputs[0], "BatchNormalization is in training mode", "call model.eval() before export")
    if node.op_type == "Dropout" and facts.trains(node):
        yield site.refuse(node.outputs[0], "Dropout is in training mode", "call model.eval() before export")


def _axes(site: Site) -> Iterator[Refusal]:
    """Axes of a reduction must be there when the network is read; its parser looks through Cast and Identity only."""
    node = site.node
    if node.op_type.startswith("Reduce") and len(node.inputs) > 1 and not readable(node.inputs[1]):
        axes = node.inputs[1]
        folds = "run fuse: constant folding makes them an initializer"
        what = "the reduction's axes are computed at run time; TensorRT needs them when it builds"
        yield site.refuse(axes, what, folds if known(axes) else "make the axes constants of the model")


def _recurrent(site: Site) -> Iterator[Refusal]:
    """A recurrent operator becomes a loop; the builder loses track of loops in a conditional's branches."""
    branch = next((n for n in site.inside if n.op_type == "If" and not readable(n.inputs[0])), None)
    if site.node.op_type in _RECURRENT and branch is not None:
        what = f"{site.node.op_type} lies in a branch of the If node {name(branch)}"
        hint = "take it out of the branch, or fix the condition and export without the If"
        yield site.refuse(site.node.outputs[-1], what, hint)


_CHECKS: tuple[Callable[[Site], Iterator[Refusal]], ...] = (*TYPES, quantizers, _training, _axes, _recurrent)
