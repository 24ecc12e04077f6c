"""Inlining a model's own functions, also where they are written in another version of ONNX's operators.

onnx converts such a function while inlining it, but has to be told the type of everything a call reads, which it finds
out for the main graph alone, and it may double a Constant on the way. So its result is checked, and where it can't be
used, a function whose operators mean the same in both versions is taken to be written in the model's.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.inliner
from onnx import helper

from layerline.backends.light import all_nodes, bodies
from layerline.graph.io.proto_queries import graphs
from layerline.pipeline.errors import StageError

MOST_NODES = 1_000_000
"""Nodes that a model may come to when its functions are written out in place of each call, as every runtime does."""
# Read otherwise in later versions under an unchanged signature.
_CHANGED = frozenset({"GroupNormalization", "Softmax", "LogSoftmax", "Hardmax", "BatchNormalization", "Split"})
_INLINER_ERRORS = (RuntimeError, ValueError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError)


def inline(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model with its functions' nodes in place of calls to them, and what was done; else as it was, and why."""
    names = _function_names(model)
    versions = _versions(model.opset_import)
    # The inliner converts nothing then, and needs no types.
    is_one_version = all(_versions(function.opset_import).items() <= versions.items() for function in model.functions)
    source = model
    if not is_one_version:
        source = _typed(model)
    inlined = model
    refusal = ""
    try:
        inlined = _sound(onnx.inliner.inline_local_functions(source, convert_version=True))
        # What `_typed` said was for the inliner alone.
        del inlined.graph.value_info[:]
        inlined.graph.value_info.extend({item.name: item for item in model.graph.value_info}.values())
    except _INLINER_ERRORS as error:
        refusal = str(error)
    # Without conversion, where the operators mean the same anyway.
    if refusal and not is_one_version and all(_means_the_same(function, versions) for function in model.functions):
        try:
            inlined = _sound(onnx.inliner.inline_local_functions(_retagged(model), convert_version=False))
            refusal = ""
        except _INLINER_ERRORS as error:
            refusal = str(error)
    if refusal:
        return model, f"functions {names} are left as they are: onnx can't inline them ({refusal})"
    note = f"inlined the model's functions: {names}"
    if inlined.functions:
        note += f"; left as they are: {_function_names(inlined)}"
    return inlined, note


def _function_names(model: onnx.ModelProto) -> str:
    return ", ".join(sorted({function.name for function in model.functions}))


def refuse_endless(model: onnx.ModelProto) -> None:
    """Refuses functions that call themselves, and functions that would be too large to inline.

    Nodes are counted without inlining: forty functions that each call the next one twice come to 2^40 nodes.

    Raises:
        StageError: names the function.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    # Depth first without recursion: a function stays on the stack until all that it calls is counted.
    sizes: dict[tuple[str, str], int] = {}
    for start in functions:
        pending = [start]
        while pending:
            key = pending[-1]
            nodes = list(all_nodes(functions[key].node))
            calls = [(node.domain, node.op_type) for node in nodes if (node.domain, node.op_type) in functions]
            uncounted = [call for call in calls if call not in sizes]
            if uncounted:
                if any(call in pending for call in uncounted):
                    raise StageError("not valid ONNX: it calls itself", where=f"function {key[1]}")
                pending.append(uncounted[0])
                continue
            sizes[key] = len(nodes) + sum(sizes[call] for call in calls)
            pending.pop()
    operators = [(node.domain, node.op_type) for graph in graphs(model) for node in graph.node]
    calls = [operator for operator in operators if operator in functions]
    total = sum(sizes[call] for call in calls)
    if total > MOST_NODES:
        largest = max(calls, key=sizes.__getitem__)
        raise StageError(
            f"written out in place of its calls, it comes to {sizes[largest]} nodes; the model may have {MOST_NODES}",
            where=f"function {largest[1]}",
        )


def _sound(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, if every value of a graph is computed once."""
    for graph in graphs(model):
        computed: set[str] = set()
        for node in graph.node:
            for name in filter(None, node.output):
                if name in computed:
                    raise ValueError(f"it computes {name} twice")
                computed.add(name)
    return model


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that says the type of whatever can be known, stored tensors included."""
    out = onnx.shape_inference.infer_shapes(model)
    for graph in graphs(out):
        typed = {item.name for item in (*graph.value_info, *graph.input, *graph.output)}
        for tensor in graph.initializer:
            if tensor.name not in typed:
                graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return out


def _means_the_same(function: onnx.FunctionProto, versions: dict[str, int]) -> bool:
    """Whether every operator of a function can be read in the model's versions as it is."""
    own_versions = _versions(function.opset_import)
    for node in function.node:
        if bodies(node):
            return False
        own = own_versions.get(node.domain)
        other = versions.get(node.domain)
        if own == other:
            continue
        if own is None or other is None or not _readable(node, own, other):
            return False
    return True


def _readable(node: onnx.NodeProto, own_version: int, other_version: int) -> bool:
    """Whether a node written in one version of its domain means the same in another, as far as schemas say it."""
    try:
        own = onnx.defs.get_schema(node.op_type, own_version, node.domain)
        other = onnx.defs.get_schema(node.op_type, other_version, node.domain)
    except onnx.defs.SchemaError:
        return False
    # Not changed in between.
    if own.since_version == other.since_version:
        return True
    if node.op_type in _CHANGED:
        return False
    # An attribute that only one version has is neutral by default, so only one that is written out is in the way.
    shared = own.attributes.keys() & other.attributes.keys()
    written = {attribute.name for attribute in node.attribute}
    if not written <= shared:
        return False
    for name in shared - written:
        if own.attributes[name].default_value != other.attributes[name].default_value:
            return False
    takes_inputs: bool = other.min_input <= len(node.input) <= other.max_input
    takes_outputs: bool = other.min_output <= len(node.output) <= other.max_output
    return takes_inputs and takes_outputs


def _retagged(model: onnx.ModelProto) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(model)
    versions = _versions(out.opset_import)
    for function in out.functions:
        for item in function.opset_import:
            item.version = versions.get(item.domain, item.version)
    return out


def _versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {o.domain: o.version for o in imports}
