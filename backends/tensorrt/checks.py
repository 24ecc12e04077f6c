"""What TensorRT can't build, or would build into something else, told before the build with the tensor's name.

Each rule was seen on TensorRT-RTX 1.7: some faults its parser names itself; those here it takes in silence, reports
without a name, or prints to the terminal. What a parser names well is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from layerline.backends.base import SOURCE, TRACED
from layerline.backends.light import Model
from layerline.backends.tensorrt.checks_qdq import quantizers
from layerline.backends.tensorrt.checks_types import TYPES, cast_away, edge
from layerline.backends.tensorrt.node_site import Refusal, Site, known, name, readable, sites
from layerline.graph.analysis import ir_queries
from layerline.graph.analysis.symbolic_shapes import Symbols, sizes
from layerline.graph.io import canonicalize
from layerline.graph.io.ir_convert import to_ir
from layerline.pipeline.errors import StageError

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
# Sizes that the graph computes on the way, and what onnx's shape inference calls those it can't tell.
_NAMELESS = re.compile(r"[#?]|^unk__\d+$")


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
    flat = _flat(model)
    found = []
    for site in sites(flat.graph):
        nested = site.node.op_type == "If" and any(n.op_type == "If" for n in site.inside)
        if nested or site.node.op_type in ("NonMaxSuppression", "Attention", "Loop", "Scan"):
            label = "If inside the branch of an If" if nested else site.node.op_type
            found.append(f"{label} ({site.refuse(None, '', '').where})")
    return tuple(found)


def _flat(model: Model) -> ir.Model:
    return to_ir(canonicalize.prepare(model)[0])


def _inferred(model: Model) -> ir.Graph:
    flat = _flat(model)
    # Data propagation would write out what a ConstantOfShape holds, however much that is.
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(flat)
    return flat.graph


def _refusals(graph: ir.Graph) -> tuple[Refusal, ...]:
    found = [r for v in (*graph.inputs, *graph.outputs) for r in edge(v)]
    found += [r for site in sites(graph) for check in _CHECKS for r in check(site)]
    # Q and DQ of one tensor share their fault.
    return tuple({(r.tensor, r.what): r for r in reversed(found)}.values())[::-1]


def refuse_training(model: Model) -> None:
    """Lets nothing pass that drops values, or takes its statistics from the batch, in every run.

    Raises:
        StageError: about the first such node; says which switch of the file to turn.
    """
    for site in sites(_inferred(model)):
        # What is computed from constants may still turn out false; fuse works it out.
        decided = site.node.op_type != "Dropout" or _switch(site.node)
        if decided and (found := next(_training(site), None)) is not None:
            raise StageError(found.what, where=found.where, hint=found.hint)


def _training(site: Site) -> Iterator[Refusal]:
    node, traced = site.node, _traced(site.node, site.inside)
    at_home = "call model.eval() before export"
    if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
        hint = "set the node's attribute training_mode to 0, or export again after model.eval()"
        what = "BatchNormalization is in training mode: it takes the batch's own statistics"
        yield site.refuse(node.outputs[0], what, at_home if traced else hint)
    if node.op_type == "Dropout" and ir_queries.trains(node):
        hint = _switch(node) or "make its third input, training_mode, false"
        what = "Dropout is in training mode: it drops values in every run"
        yield site.refuse(node.outputs[0], what, at_home if traced else f"{hint}, or export again after model.eval()")


def _switch(dropout: ir.Node) -> str:
    """How to switch a Dropout off: in pipe.yaml where that is an input, in the file where it is stored there."""
    mode = dropout.inputs[2] if len(dropout.inputs) > 2 else None
    if mode is not None and mode.is_graph_input() and not mode.is_initializer():
        return f"fix that input in pipe.yaml: import-onnx {{values: {{{mode.name}: 0}}}}"
    stored = ir_queries.constant(mode)
    return f"store false in {mode.name}, its third input" if mode is not None and stored is not None else ""


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
        on, hint = _settle(branch, site.inside[: site.inside.index(branch)])
        what = f"{site.node.op_type} lies in a branch of the If node {name(branch)}, and which is taken depends on {on}"
        yield site.refuse(site.node.outputs[-1], what, hint)


def _ranks(site: Site) -> Iterator[Refusal]:
    """Branches of different rank: one of them has to be gone when TensorRT builds."""
    node, symbols = site.node, Symbols()
    if node.op_type != "If" or known(node.inputs[0]):
        return
    if all(isinstance(x, int) for x in symbols.of(node.inputs[0]) or ("?",)):
        return
    for output, *ends in zip(node.outputs, *(body.outputs for body in ir_queries.subgraphs(node)), strict=True):
        ranks = {_rank(end) for end in ends}
        if None not in ranks and len(ranks) > 1:
            on, hint = _settle(node, site.inside)
            told = " and ".join(sorted(map(str, ranks)))
            what = f"its branches have {told} axes, and which is taken depends on {on}"
            yield site.refuse(output, what, hint)


def _rank(value: ir.Value | None) -> int | None:
    """Also behind a Squeeze or Unsqueeze whose axes lie outside of the branch, which shape inference gives up on."""
    if ir_queries.rank(value) is not None:
        return ir_queries.rank(value)
    node = ir_queries.parent(value, "Squeeze", "Unsqueeze", "Identity")
    if node is None or (before := _rank(node.inputs[0])) is None:
        return None
    axes = ir_queries.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    moved = 0 if node.op_type == "Identity" else None if axes is None else axes.size
    return None if moved is None else before - moved if node.op_type == "Squeeze" else before + moved


def _settle(choice: ir.Node, inside: tuple[ir.Node, ...]) -> tuple[str, str]:
    """What decides an If, and how to decide it before the build.

    Sizes that a branch was not made for leave an If in it open for good: what picks the branch is told as well.
    """
    dims, inputs = dict[str, None](), dict[str, None]()
    for each in (choice, *(n for n in inside if n.op_type == "If")):
        sized, held = _leaves(each.inputs[0], Symbols())
        dims, inputs = dims | dict.fromkeys(sized), inputs | dict.fromkeys(held)
    told = " and ".join([*(f"the size {d}" for d in dims), *(f"what {i} holds" for i in inputs)])
    if not told:
        return "constants alone", "no input and no size decides it: take the If out of the model"
    if _traced(choice, inside):
        ways = [f"leave {', '.join(dims)} out of export's `dynamic`"] * bool(dims)
        ways += [f"let example_inputs() give {', '.join(inputs)} as a plain number"] * bool(inputs)
        return told, f"fix that and fuse leaves one branch: {', and '.join(ways)}"
    fixed = [f"dims: {{{', '.join(f'{d}: <size>' for d in dims)}}}"] * bool(dims)
    fixed += [f"values: {{{', '.join(f'{i}: <number>' for i in inputs)}}}"] * bool(inputs)
    return told, f"fix that in pipe.yaml and fuse leaves one branch: import-onnx {{{', '.join(fixed)}}}"


def _traced(choice: ir.Node, inside: tuple[ir.Node, ...]) -> bool:
    """Whether the model was exported from the project's own module: its nodes say so."""
    graph = (*inside, choice)[0].graph
    return graph is not None and any(n.metadata_props.keys() & {SOURCE, TRACED} for n in graph)


def _leaves(condition: ir.Value | None, symbols: Symbols) -> tuple[list[str], list[str]]:
    """Sizes of inputs, and inputs by whose values, a value is decided; an inner size by all that lies before it."""
    dims, inputs = dict[str, None](), dict[str, None]()
    pending, seen = [(condition, False)], set[tuple[ir.Value, bool]]()
    while pending:
        value, of_shape = pending.pop()
        if value is None or (value, of_shape) in seen or (not of_shape and readable(value)):
            continue
        seen.add((value, of_shape))
        items = (sizes(value) if of_shape else symbols.of(value)) or ()
        names = {n for item in items if isinstance(item, str) for n in re.findall(r"[^*/()\s\d][^*/()\s]*", item)}
        node = value.producer()
        if node is None and of_shape:
            # Sizes without a name are called so when the file is imported.
            dims |= dict.fromkeys(sorted(n.replace("#", "_dim") for n in names))
        elif node is None:
            inputs |= {value.name or "": None}
        elif names and not any(_NAMELESS.search(n) for n in names):
            dims |= dict.fromkeys(sorted(names))
        else:
            of_shape = of_shape or node.op_type in ("Shape", "Size")
            pending += [(v, of_shape) for v in node.inputs if v is not None and v.const_value is None]
    return list(dims), list(inputs)


_CHECKS: tuple[Callable[[Site], Iterator[Refusal]], ...] = (*TYPES, quantizers, _training, _axes, _recurrent, _ranks)
