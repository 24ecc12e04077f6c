"""Inlining a model's own functions, also where they are written in another version of ONNX's operators.

onnx converts such a function while inlining it, but has to be told the type of everything a call reads, which it finds
out for the main graph alone, and it may double a Constant on the way. So its result is checked, and where it can't be
used, a function whose operators mean the same in both versions is taken to be written in the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx.inliner
from onnx import helper

from layerline.backends.light import bodies
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError

MOST_NODES = 1_000_000
"""Nodes that a model may come to when its functions are written out in place of each call, as every runtime does."""
# Read otherwise in later versions under an unchanged signature.
_CHANGED = frozenset({"GroupNormalization", "Softmax", "LogSoftmax", "Hardmax", "BatchNormalization", "Split"})
_FAILS = (RuntimeError, ValueError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError)


def inline(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model with its functions' nodes in place of calls to them, and what was done; else as it was, and why."""
    names = ", ".join(sorted({f.name for f in model.functions}))
    versions = _versions(model.opset_import)
    same = all(_versions(f.opset_import).items() <= versions.items() for f in model.functions)
    refusal = ""
    try:
        inlined = _sound(onnx.inliner.inline_local_functions(model if same else _typed(model), convert_version=True))
        _untyped(model, inlined)
    except _FAILS as error:
        inlined, refusal = model, str(error)
    if refusal and not same and all(_means_the_same(f, versions) for f in model.functions):
        try:
            inlined, refusal = _sound(onnx.inliner.inline_local_functions(_retagged(model), convert_version=False)), ""
        except _FAILS as error:
            refusal = str(error)
    if refusal:
        return model, f"functions {names} are left as they are: onnx can't inline them ({refusal})"
    left = ", ".join(sorted({f.name for f in inlined.functions}))
    return inlined, f"inlined the model's functions: {names}" + (f"; left as they are: {left}" if left else "")


def refuse_endless(model: onnx.ModelProto) -> None:
    """Refuses functions that call themselves, or call each other until no memory holds what they come to.

    Counted, not written out: forty functions, each of which calls the next one twice, come to 2^40 nodes.

    Raises:
        StageError: names the function.
    """
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    for start in functions:
        pending = [start]
        while pending:
            key = pending[-1]
            calls = _calls(functions[key].node, functions)
            if open_calls := [c for c in calls if c not in sizes]:
                if any(c in pending for c in open_calls):
                    raise StageError("not valid ONNX: it calls itself", where=f"function {key[1]}")
                pending.append(open_calls[0])
                continue
            sizes[key] = _count(functions[key].node) + sum(sizes[c] for c in calls)
            pending.pop()
    calls = [c for g in onnx_files.graphs(model) for c in _calls(g.node, functions, nested=False)]
    total = sum(sizes[c] for c in calls)
    if total > MOST_NODES:
        largest = max(calls, key=sizes.__getitem__)
        raise StageError(
            f"written out in place of its calls, it comes to {sizes[largest]} nodes; the model may have {MOST_NODES}",
            where=f"function {largest[1]}",
        )


def _calls(
    nodes: Iterable[onnx.NodeProto], functions: Mapping[tuple[str, str], object], *, nested: bool = True
) -> list[tuple[str, str]]:
    """Every call of one of these functions, in bodies too."""
    found = []
    for node in nodes:
        if (node.domain, node.op_type) in functions:
            found.append((node.domain, node.op_type))
        for body in bodies(node) if nested else ():
            found += _calls(body.node, functions)
    return found


def _count(nodes: Iterable[onnx.NodeProto]) -> int:
    return sum(1 + sum(_count(body.node) for body in bodies(node)) for node in nodes)


def _sound(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, if every value of a graph is computed once.

    Raises:
        ValueError: one isn't.
    """
    for graph in onnx_files.graphs(model):
        outputs = [o for n in graph.node for o in n.output if o]
        if len(outputs) > len(set(outputs)):
            doubled = next(o for o in outputs if outputs.count(o) > 1)
            raise ValueError(f"it computes {doubled} twice")
    return model


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that says the type of whatever can be known, stored tensors included."""
    out = onnx.shape_inference.infer_shapes(model)
    for graph in onnx_files.graphs(out):
        known = {v.name for v in (*graph.value_info, *graph.input, *graph.output)}
        graph.value_info.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer if t.name not in known
        )
    return out


def _untyped(model: onnx.ModelProto, inlined: onnx.ModelProto) -> None:
    """Takes back what `_typed` said: it was for the inliner alone."""
    said = {v.name: v for v in model.graph.value_info}
    del inlined.graph.value_info[:]
    inlined.graph.value_info.extend(said.values())


def _means_the_same(function: onnx.FunctionProto, versions: dict[str, int]) -> bool:
    """Whether every operator of a function can be read in the model's versions as it is."""
    own = _versions(function.opset_import)
    return not any(bodies(n) for n in function.node) and all(
        _readable(node, own[node.domain], versions[node.domain])
        for node in function.node
        if own.get(node.domain) != versions.get(node.domain)
    )


def _readable(node: onnx.NodeProto, own: int, other: int) -> bool:
    try:
        a, b = (onnx.defs.get_schema(node.op_type, version, node.domain) for version in (own, other))
    except onnx.defs.SchemaError:
        return False
    if a.since_version == b.since_version:
        return True
    given = {x.name for x in node.attribute}
    defaults = [{k: v.default_value.SerializeToString() for k, v in s.attributes.items()} for s in (a, b)]
    shared = defaults[0].keys() & defaults[1].keys()
    # An attribute that only one version has is neutral by default.
    agree = all(defaults[0][k] == defaults[1][k] for k in shared - given) and given <= shared
    fits = b.min_input <= len(node.input) <= b.max_input and b.min_output <= len(node.output) <= b.max_output
    return agree and fits and node.op_type not in _CHANGED


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
