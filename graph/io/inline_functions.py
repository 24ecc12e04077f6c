"""Inlining a model's own functions, also where they are written in another version of ONNX's operators."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import onnx
import onnx_ir as ir
from onnx_ir.passes import PassError, common

from layerline.backends.light import all_nodes
from layerline.graph.analysis.ir_queries import copied
from layerline.graph.io.proto_queries import graphs
from layerline.pipeline.errors import StageError

MOST_NODES = 1_000_000
"""Nodes that a model may come to when its functions are written out in place of each call, as every runtime does."""
# Read otherwise in later versions under an unchanged signature.
_CHANGED = frozenset({"GroupNormalization", "Softmax", "LogSoftmax", "Hardmax", "BatchNormalization", "Split"})


def inline(model: ir.Model) -> tuple[ir.Model, str]:
    """The model with its functions' nodes in place of calls to them, and what was done; else as it was, and why."""
    function_names = ", ".join(sorted({function.name for function in model.functions.values()}))
    # The pass works in place, and may fail in the middle of it.
    inlined = copied(model)
    try:
        for function in inlined.functions.values():
            _raise_version(function, inlined)
        common.InlinePass()(inlined)
    except (ValueError, PassError) as error:
        return model, f"functions {function_names} are left as they are: they can't be inlined ({error})"
    common.RemoveUnusedFunctionsPass()(inlined)  # type: ignore[no-untyped-call]
    return inlined, f"inlined the model's functions: {function_names}"


def _raise_version(function: ir.Function, model: ir.Model) -> None:
    """Reads a function in the model's versions of the operators; raises ValueError where one would mean another."""
    # The pass would give the caller's value the name of the result.
    if not set(function.inputs).isdisjoint(function.outputs):
        raise ValueError(f"{function.name} returns its input")
    for node in function.all_nodes():
        own = function.opset_imports.get(node.domain)
        other = model.opset_imports.get(node.domain, own)
        is_call = node.op_identifier() in model.functions
        if own != other and not is_call and not (own and other and _means_the_same(node, own, other)):
            raise ValueError(f"{node.op_type} of version {own} in {function.name}, which is {other} in the model")
    for domain in function.opset_imports.keys() & model.opset_imports.keys():
        function.opset_imports[domain] = model.opset_imports[domain]


def _means_the_same(node: ir.Node, own_version: int, other_version: int) -> bool:
    """Whether a node written in one version of its domain means the same in another, as far as schemas say it."""
    try:
        own = onnx.defs.get_schema(node.op_type, own_version, node.domain)
        other = onnx.defs.get_schema(node.op_type, other_version, node.domain)
    except onnx.defs.SchemaError:
        return False
    if own.since_version == other.since_version:
        return True
    # An attribute that only one version has is neutral by default, so only one that is written out is in the way.
    shared = own.attributes.keys() & other.attributes.keys()
    if node.op_type in _CHANGED or not node.attributes.keys() <= shared:
        return False
    for name in shared - node.attributes.keys():
        if own.attributes[name].default_value != other.attributes[name].default_value:
            return False
    takes_inputs: bool = other.min_input <= len(node.inputs) <= other.max_input
    takes_outputs: bool = other.min_output <= len(node.outputs) <= other.max_output
    return takes_inputs and takes_outputs


def check_functions(model: onnx.ModelProto) -> None:
    """Refuses functions that call themselves, and functions that would be too large to inline.

    Nodes are counted without inlining: forty functions that each call the next one twice come to 2^40 nodes.

    Raises StageError: names the function.
    """
    operators: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for function in model.functions:
        nodes = all_nodes(function.node)
        operators[function.domain, function.name] = [(node.domain, node.op_type) for node in nodes]
    try:
        # A function comes after all that it calls.
        order = list(TopologicalSorter(operators).static_order())
    except CycleError as error:
        raise StageError("not valid ONNX: it calls itself", where=f"function {error.args[1][1][1]}") from error
    sizes: dict[tuple[str, str], int] = {}
    for operator in order:
        # What is no function holds no nodes.
        inner = operators.get(operator, [])
        sizes[operator] = len(inner) + sum(map(sizes.__getitem__, inner))
    total = 0
    largest = ("", "")
    for graph in graphs(model):
        for node in graph.node:
            call = (node.domain, node.op_type)
            if call in operators:
                total += sizes[call]
                largest = max(largest, call, key=lambda name: sizes.get(name, 0))
    if total > MOST_NODES:
        what = f"written out in place of its calls, it comes to {sizes[largest]} nodes; the model may have {MOST_NODES}"
        raise StageError(what, where=f"function {largest[1]}")
