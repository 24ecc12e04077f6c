"""Puts two models into one ONNX graph that reduces every pair of values to a few scalars, so that no value is stored.

The candidate's nodes are copied beside the reference's under a prefix, and share its inputs and equal initializers. An
optional third copy reads the reference's values wherever the candidate has a value of that name: it shows the error
that each layer makes by itself. Nodes are ordered so that each pair is measured as soon as it is computed: ONNX Runtime
frees a value once all its readers have run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import helper

from layerline.backends.light import Light, bodies, equal, rename
from layerline.compare.pair_metrics import Measures, Pair
from layerline.graph.analysis.proto_queries import in_order, reads
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import opset_of

# Prefixes of the candidate's names, and of the copy that is fed the reference's values.
B, ISOLATED = "b//", "i//"
_RESERVED = re.compile(r"(b|i|cast|reference|target)//|layerline/|\d+/")


def joint(
    reference: Light,
    candidate: Light,
    pairs: Iterable[Pair],
    *,
    measured: Collection[int],
    whole: Collection[int] = (),
    isolated: bool = False,
    settled: Collection[str] = (),
    axes: Mapping[int, int] | None = None,
) -> Light:
    """The graph that runs both; its outputs are `<i>/<column>` and, where isolated, `<i>/isolated/<column>`.

    Args:
        pairs: values that stand for each other; the isolated copy reads the reference's.
        measured: indices of the pairs that are measured.
        whole: indices of the pairs whose sides are outputs as they are.
        settled: values of both that the candidate's nodes read from the reference.
        axes: instead of these measures, the columns of `Measures.by_channel` along these axes, where isolated.
    """
    reference, pairs = _unreserved(reference, list(pairs))
    a, b = reference.model, candidate.model
    shared = _shared(reference, candidate)
    outer = _outer(candidate, shared)
    computed_a = _computed(a.graph)
    read = outer | {name: name for name in settled if name in computed_a}
    nodes = [*a.graph.node, *copied(b.graph.node, B, read)]
    if isolated:
        reference_values, casts = feeds_of(pairs)
        nodes += casts + copied(b.graph.node, ISOLATED, outer | reference_values)
    computed_b = _computed(b.graph)
    measures = Measures(opset_of(a))
    for i, pair in enumerate(pairs):
        if i not in measured:
            continue
        other = outer.get(pair.b, B + pair.b)
        if axes is not None:
            alone = ISOLATED + pair.b if pair.b in computed_b else other
            measures.by_channel(str(i), pair, (other, alone), axes[i])
            continue
        measures.add(str(i), pair, other, whole=i in whole)
        # An index is no error of its own: it follows the data that it points into.
        if isolated and pair.pointer is None:
            if pair.b in computed_b:
                other = ISOLATED + pair.b
            measures.add(f"{i}/isolated", pair, other, whole=i in whole)
    return _model(reference, candidate, measures, nodes, shared)


def effects_graph(
    base: Light,
    other: Light,
    pairs: Iterable[Pair],
    layers: Sequence[int],
    targets: Mapping[int, Pair],
    *,
    whole: bool,
) -> Light:
    """The graph that computes a model's outputs once more for each layer, with this layer the other model's.

    Its inputs are those of the model, and what its outputs are compared with. Its outputs are
    `<layer>/<output>/<column>`, for the outputs that a layer reaches; `b` is the only column of an output that is
    handed over. All layers share one run of the model: of it, only the nodes that depend on a layer are copied.

    Args:
        base: the model whose outputs are computed.
        other: the model that single layers come from. They read the values of `base`.
        pairs: values of `base` and `other` that stand for each other.
        layers: indices of the pairs whose other side replaces that of `base`.
        targets: by index of an output's pair: the input that it is compared with (`a`), and its types.
        whole: whether all outputs are handed over.
    """
    base, pairs = _unreserved(base, list(pairs))
    graph = base.model.graph
    shared = _shared(base, other)
    base_values, casts = feeds_of(pairs)
    isolated = copied(other.model.graph.node, ISOLATED, _outer(other, shared) | base_values)
    nodes = [*graph.node, *casts, *isolated]
    fixed = {i.name for i in graph.input} | base.stored | _computed(graph)
    measures = Measures(opset_of(base.model))
    for index in layers:
        layer, prefix = pairs[index], f"{index}//"
        behind, changed = _behind(graph, layer.a)
        nodes.append(helper.make_node("Cast", [ISOLATED + layer.b], [prefix + layer.a], to=layer.dtype_a))
        nodes += copied(behind, prefix, {name: name for name in fixed - changed})
        for place, target in targets.items():
            output = pairs[place].a
            if output not in changed:
                continue
            # Integers of two types can't be compared in the graph.
            if whole or target.small or (target.counted and target.dtype_a != target.dtype_b):
                measures.hand_over(f"{index}/{place}/b", prefix + output, target.dtype_b)
            else:
                measures.add(f"{index}/{place}", target, prefix + output, whole=False)
    model = _model(base, other, measures, nodes, shared)
    for target in targets.values():
        model.model.graph.input.append(helper.make_tensor_value_info(target.a, target.dtype_a, None))
    return model


def _behind(graph: onnx.GraphProto, value: str) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that depend on a value, and the values that do, itself among them."""
    changed = {value}
    nodes = []
    for node in graph.node:
        if not changed.isdisjoint(reads(node)):
            nodes.append(node)
            changed.update(node.output)
    return nodes, changed


def _outer(candidate: Light, shared: Collection[str]) -> dict[str, str]:
    """Names that the candidate's inputs and stored tensors have in a joint graph."""
    outer = {i.name: i.name for i in candidate.fed}
    for name in candidate.stored:
        outer[name] = name if name in shared else B + name
    return outer


def _model(
    reference: Light,
    candidate: Light,
    measures: Measures,
    nodes: Iterable[onnx.NodeProto],
    shared: Collection[str],
) -> Light:
    """The model that takes these measures, with those of the nodes that they need."""
    a, b = reference.model, candidate.model
    # Each measure stands right behind its pair: the runtime frees a value once its last reader has run.
    ordered = in_order(measures.nodes, nodes)
    inputs_a = {i.name for i in a.graph.input}
    inputs = [*a.graph.input, *(i for i in candidate.fed if i.name not in inputs_a)]
    initializers = [*a.graph.initializer, *_prefixed(b, shared)]
    graph = helper.make_graph(ordered, "compare", inputs, measures.outputs, initializers)
    graph.sparse_initializer.extend(a.graph.sparse_initializer)
    # `why_two_sessions` made sure that a domain in both has one version.
    opsets = {o.domain: o for o in (*a.opset_import, *b.opset_import)}
    model = helper.make_model(graph, opset_imports=list(opsets.values()), ir_version=max(a.ir_version, b.ir_version, 8))
    model.functions.extend(a.functions)
    return Light(model, reference.weights | {B + n: w for n, w in candidate.weights.items() if n not in shared})


def _computed(graph: onnx.GraphProto) -> set[str]:
    names = set[str]()
    for node in graph.node:
        names.update(node.output)
    return names


def _unreserved(reference: Light, pairs: list[Pair]) -> tuple[Light, list[Pair]]:
    """Renames the reference's values whose names the joint graph uses itself."""
    # Names that begin like ours are rare: the reference is copied only where one occurs.
    taken = set[str]()
    for graph in onnx_files.graphs(reference.model):
        taken.update(name for name in _computed(graph) if _RESERVED.match(name))
    if not taken:
        return reference, pairs
    names = {name: f"reference//{name}" for name in sorted(taken)}
    renamed = reference.copy()
    rename(renamed.model.graph, names)
    return renamed, [_renamed_pair(pair, names) for pair in pairs]


def _renamed_pair(pair: Pair, names: Mapping[str, str]) -> Pair:
    pointer = pair.pointer
    if pointer is not None:
        pointer = replace(pointer, data=names.get(pointer.data, pointer.data))
    return replace(pair, a=names.get(pair.a, pair.a), pointer=pointer)


def isolated_model(candidate: Light, pairs: Iterable[Pair]) -> Light:
    """The candidate with every paired value read from an input of the value's name in the reference, prefixed `a//`.

    Values of types without a code here, text among them, are computed by the candidate itself.
    """
    pairs = [p for p in pairs if p.dtype_a and p.dtype_b]
    graph = candidate.model.graph
    reference_values, casts = feeds_of(pairs, "a//")
    outer = {i.name: i.name for i in graph.input}
    outer.update({name: name for name in candidate.stored})
    taps = [helper.make_tensor_value_info("a//" + p.a, p.dtype_a, None) for p in pairs]
    computed = _computed(graph)
    outputs = [helper.make_empty_tensor_value_info(ISOLATED + p.b) for p in pairs if p.b in computed]
    isolated = candidate.copy()
    target = isolated.model.graph
    del target.node[:], target.output[:], target.value_info[:]
    target.node.extend([*casts, *copied(graph.node, ISOLATED, outer | reference_values)])
    target.input.extend(taps)
    target.output.extend(outputs)
    return isolated


def feeds_of(pairs: Iterable[Pair], prefix: str = "") -> tuple[dict[str, str], list[onnx.NodeProto]]:
    """The reference's value that replaces each value of the candidate, and Cast nodes where the types differ."""
    names: dict[str, str] = {}
    casts: list[onnx.NodeProto] = []
    for pair in pairs:
        # The first pair holds where two values of the reference are paired with one of the candidate.
        if pair.b in names:
            continue
        names[pair.b] = prefix + pair.a
        if pair.dtype_a != pair.dtype_b:
            names[pair.b] = f"cast//{pair.a}"
            casts.append(helper.make_node("Cast", [prefix + pair.a], [names[pair.b]], to=pair.dtype_b))
    return names, casts


def copied(nodes: Iterable[onnx.NodeProto], prefix: str, outer: Mapping[str, str]) -> list[onnx.NodeProto]:
    """Copies of the nodes, subgraphs included.

    Args:
        prefix: goes before every name that the nodes write.
        outer: the names of what they read from elsewhere; a name that is not there gets the prefix.
    """

    def read(name: str) -> str:
        return outer.get(name, write(name))

    def write(name: str) -> str:
        return prefix + name if name else ""

    copies: list[onnx.NodeProto] = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        # The records of where a node comes from are long, and of no use in a graph that only measures.
        copy.ClearField("metadata_props")
        copy.name = write(node.name)
        copy.input[:] = [read(name) for name in node.input]
        copy.output[:] = [write(name) for name in node.output]
        for body in bodies(copy):
            inner = copied(body.node, prefix, outer)
            written = {name for inner_node in inner for name in inner_node.output}
            for item in (*body.input, *body.initializer):
                item.name = prefix + item.name
                written.add(item.name)
            for item in body.output:
                # A branch may also return a value of the outer scope as it is.
                item.name = prefix + item.name if prefix + item.name in written else read(item.name)
            del body.node[:], body.value_info[:]
            body.node.extend(inner)
        copies.append(copy)
    return copies


def _shared(a: Light, b: Light) -> set[str]:
    """Stored tensors that both have under one name with the same content."""
    tensors_a = {t.name: t for t in a.model.graph.initializer}
    shared = {t.name for t in b.model.graph.initializer if t.name in tensors_a and _equal(tensors_a[t.name], t)}
    shared.update(name for name, w in b.weights.items() if name in a.weights and equal(w, a.weights[name]))
    return shared


def _equal(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    # Equal numbers in different fields count as different tensors, which costs memory and nothing else.
    if a.HasField("raw_data") and b.HasField("raw_data"):
        return bool((a.data_type, a.dims, a.raw_data) == (b.data_type, b.dims, b.raw_data))
    return bool(a.SerializeToString() == b.SerializeToString())


def _prefixed(b: onnx.ModelProto, shared: Collection[str]) -> list[onnx.TensorProto]:
    out = []
    for tensor in b.graph.initializer:
        if tensor.name not in shared:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = B + tensor.name
            out.append(copy)
    return out
