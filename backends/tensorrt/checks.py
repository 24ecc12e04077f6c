"""Refuses, before the build, what TensorRT can't build or would build into something else, and names the tensor.

Each rule was observed on TensorRT-RTX 1.7. Its parser names many faults itself; the faults here it accepts silently,
reports without a name, or prints to the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx_ir as ir

from layerline.backends.light import Model
from layerline.backends.tensorrt.node_checks import NODE_CHECKS, cast_away, edge, is_foldable
from layerline.graph.analysis import ir_queries
from layerline.graph.analysis.refusals import NodeSite, Refusal, is_traced, name, sites, training_mode
from layerline.graph.analysis.shape_inference import ShapeSymbols, infer_types
from layerline.graph.analysis.symbolic_sizes import sizes
from layerline.graph.io.canonicalize import prepare
from layerline.graph.quantization.targets import lacking
from layerline.pipeline.errors import StageError

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
# Names of sizes and numbers that shape inference can't tell.
_NAMELESS = re.compile(r"#|\b(unk|num)__\d+\b")


def examine(model: Model, targets: Sequence[str] = ()) -> tuple[str, ...]:
    """Refuses, by a StageError about the first reason, a model that TensorRT can't build for compute capabilities.

    Returns the names of the float64 values: the engine takes, computes and returns them in float32.
    """
    # With functions inlined: the parser sees their nodes, not their calls.
    graph = inferred(model)
    refused = (*_refusals(graph), *_unsupported(graph, targets))
    if refused:
        first = refused[0]
        what = f"TensorRT can't build this: {first.what}"
        if len(refused) > 1:
            what += f"; {len(refused) - 1} more, at {refused[1].where}"
        raise StageError(what, where=first.where, hint=first.hint)
    values = [*graph.inputs]
    for site in sites(graph):
        values.extend(site.node.outputs)
    return tuple(v.name for v in values if v.name and v.dtype == ir.DataType.DOUBLE and not cast_away(v))


def inferred(model: Model) -> ir.Graph:
    """The main graph with functions inlined and types inferred."""
    prepared, _ = prepare(model)
    infer_types(prepared)
    return prepared.graph


def suspects(model: Model) -> tuple[str, ...]:
    """Constructs that builders are known to fail on without naming them; a hint for such a failure."""
    labels: list[str] = []
    for site in sites(inferred(model)):
        label = ""
        if site.node.op_type == "If" and any(n.op_type == "If" for n in site.inside):
            label = "If inside the branch of an If"
        elif site.node.op_type == "If" and _sizes_differ(site.node):
            label = "If whose branches give outputs of different sizes"
        elif site.node.op_type in ("NonMaxSuppression", "Attention", "Loop", "Scan"):
            label = site.node.op_type
        if label:
            labels.append(f"{label} ({site.refuse(None, '', '').where})")
    return tuple(labels)


def _refusals(graph: ir.Graph) -> tuple[Refusal, ...]:
    refused: list[Refusal] = []
    for value in (*graph.inputs, *graph.outputs):
        refused.extend(edge(value))
    for site in sites(graph):
        for check in _CHECKS:
            refused.extend(check(site))
    # The Q and the DQ of one tensor both report its fault: the first report stays.
    distinct: dict[tuple[str, str], Refusal] = {}
    for refusal in reversed(refused):
        distinct[refusal.tensor, refusal.what] = refusal
    return tuple(reversed(distinct.values()))


def _unsupported(graph: ir.Graph, targets: Sequence[str]) -> Iterator[Refusal]:
    """Types that a compute capability lacks: the builder refuses them without naming a tensor."""
    for site in sites(graph):
        for value in site.node.inputs:
            if value is None or value.dtype is None:
                continue
            reason = lacking(targets, value.dtype.name.lower())
            if reason:
                yield site.refuse(value, reason, "change engine.targets, or the format in quantize")
                return


def _readable(value: ir.Value | None) -> bool:
    """Whether the parser can read the value: absent, stored, a Constant, or one of these after Identity or Cast."""
    passed: set[ir.Value] = set()
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in ("Identity", "Cast") or value in passed:
            return node is not None and node.op_type == "Constant"
        passed.add(value)
        value = node.inputs[0]
    return True


def _axes(site: NodeSite) -> Iterator[Refusal]:
    """The parser needs the axes of a reduction; it looks through Cast and Identity only."""
    node = site.node
    if not node.op_type.startswith("Reduce") or len(node.inputs) < 2 or _readable(node.inputs[1]):
        return
    axes = node.inputs[1]
    hint = "make the axes constants of the model"
    if is_foldable(axes):
        hint = "run fuse: constant folding makes them an initializer"
    yield site.refuse(axes, "the reduction's axes are computed at run time; TensorRT needs them when it builds", hint)


def _recurrent(site: NodeSite) -> Iterator[Refusal]:
    """A recurrent operator becomes a loop; the builder loses track of loops in a conditional's branches."""
    if site.node.op_type not in _RECURRENT:
        return
    # From the outermost: deciding that one may take the whole branch away.
    for index, outer in enumerate(site.inside):
        if outer.op_type == "If" and not _readable(outer.inputs[0]):
            decided_by, hint = _settle(outer, site.inside[:index])
            what = (
                f"{site.node.op_type} lies in a branch of the If node {name(outer)}, "
                f"and which is taken depends on {decided_by}"
            )
            yield site.refuse(site.node.outputs[-1], what, hint)
            return


def _ranks(site: NodeSite) -> Iterator[Refusal]:
    """Branches of different rank: TensorRT can build only one of them."""
    node = site.node
    if node.op_type != "If" or is_foldable(node.inputs[0]):
        return
    condition = ShapeSymbols().of(node.inputs[0])
    # Its value follows from the sizes: fuse or the parser leaves one branch.
    if condition and all(isinstance(x, int) for x in condition):
        return
    branch_outputs = [body.outputs for body in ir_queries.subgraphs(node)]
    for output, *ends in zip(node.outputs, *branch_outputs, strict=True):
        ranks = {_rank(end) for end in ends}
        if None not in ranks and len(ranks) > 1:
            decided_by, hint = _settle(node, site.inside)
            rank_list = " and ".join(sorted(map(str, ranks)))
            what = f"its branches have {rank_list} axes, and which is taken depends on {decided_by}"
            yield site.refuse(output, what, hint)


def _sizes_differ(node: ir.Node) -> bool:
    """Whether the branches of an If surely give outputs of different sizes."""
    first, second = ir_queries.subgraphs(node)
    pairs = zip(first.outputs, second.outputs, strict=True)
    return not all(ir_queries.may_be_equal(one.shape, other.shape) for one, other in pairs)


def _rank(value: ir.Value | None) -> int | None:
    """The rank of a value, also after a Squeeze or Unsqueeze with axes from outside of the branch.

    Shape inference gives up on those.
    """
    if ir_queries.rank(value) is not None:
        return ir_queries.rank(value)
    node = ir_queries.parent(value, "Squeeze", "Unsqueeze", "Identity")
    if node is None:
        return None
    rank = _rank(node.inputs[0])
    if rank is None or node.op_type == "Identity":
        return rank
    axes = ir_queries.constant(ir_queries.optional_input(node, 1))
    if axes is None:
        return None
    return rank - int(axes.size) if node.op_type == "Squeeze" else rank + int(axes.size)


def _settle(choice: ir.Node, inside: tuple[ir.Node, ...]) -> tuple[str, str]:
    """Says what decides an If, and how to decide it before the build.

    The Ifs around it count as well: in a branch that sizes never reach, an inner If can't be decided.
    """
    dims: dict[str, None] = {}
    inputs: dict[str, ir.Value] = {}
    for node in (choice, *inside):
        if node.op_type == "If":
            # Kept in the order in which they are met, each once.
            deciding_dims, deciding_inputs = _deciding(node.inputs[0], ShapeSymbols())
            dims.update(dict.fromkeys(deciding_dims))
            inputs.update(deciding_inputs)
    if not dims and not inputs:
        return "constants alone", "no input and no size decides it: take the If out of the model"
    decided_by = " and ".join([*(f"the size {d}" for d in dims), *(f"what {i} holds" for i in inputs)])
    if any(value.shape is not None and value.shape.rank() > 1 for value in inputs.values()):
        return decided_by, "samples decide it, so no setting can: give the branches outputs of the same form"
    ways: list[str] = []
    if is_traced(choice, inside):
        if dims:
            ways.append(f"leave {', '.join(dims)} out of export's `dynamic`")
        if inputs:
            ways.append(f"let example_inputs() give {', '.join(inputs)} as a plain number")
        return decided_by, f"fix that and fuse leaves one branch: {', and '.join(ways)}"
    for field, names, kind in (("dims", dims, "size"), ("values", inputs, "number")):
        if names:
            entries = ", ".join(f"{name}: <{kind}>" for name in names)
            ways.append(f"{field}: {{{entries}}}")
    return decided_by, f"fix that in pipe.yaml and fuse leaves one branch: import-onnx {{{', '.join(ways)}}}"


def _deciding(condition: ir.Value | None, symbols: ShapeSymbols) -> tuple[list[str], dict[str, ir.Value]]:
    """The sizes of inputs, and the inputs by name, that a condition is computed from.

    Where the size of an inner value matters, everything that this value is computed from counts.
    """
    dims: dict[str, None] = {}
    inputs: dict[str, ir.Value] = {}
    pending: list[tuple[ir.Value | None, bool]] = [(condition, False)]  # the flag: only the shape matters
    visited = set[tuple[ir.Value, bool]]()
    while pending:
        value, of_shape = pending.pop()
        if value is None or (value, of_shape) in visited or (not of_shape and _readable(value)):
            continue
        visited.add((value, of_shape))
        items = sizes(value) if of_shape else symbols.of(value)
        names = _symbol_names(items or ())
        node = value.producer()
        if node is None and of_shape:
            # import-onnx names sizes without a name so.
            dims.update(dict.fromkeys(sorted(n.replace("#", "_dim") for n in names)))
        elif node is None:
            inputs[value.name or ""] = value
        elif names and not any(_NAMELESS.search(n) for n in names):
            dims.update(dict.fromkeys(sorted(names)))
        else:
            of_shape = of_shape or node.op_type in ("Shape", "Size")
            pending += [(v, of_shape) for v in node.inputs if v is not None and v.const_value is None]
    return list(dims), inputs


def _symbol_names(items: Iterable[int | str]) -> set[str]:
    """The names in symbolic expressions such as `batch*(seq + 1)`."""
    names = set[str]()
    for item in items:
        if isinstance(item, str):
            names.update(re.findall(r"[^*/()\s\d][^*/()\s]*", item))
    return names


_CHECKS: tuple[Callable[[NodeSite], Iterator[Refusal]], ...] = (*NODE_CHECKS, training_mode, _axes, _recurrent, _ranks)
