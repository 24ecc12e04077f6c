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

import onnx_ir as ir

from layerline.backends.light import equal
from layerline.compare.pair_metrics import Measures, Pair
from layerline.graph.analysis.assembly import Assembly, in_order
from layerline.graph.analysis.ir_queries import copied, fed, graph_values, names, reads
from layerline.graph.io.opset import opset_of

# Prefixes of the candidate's names, and of the copy that is fed the reference's values.
B, ISOLATED = "b//", "i//"
_RESERVED = re.compile(r"(b|i|cast|reference|target)//|layerline/|\d+/")


def joint(
    reference: ir.Model,
    candidate: ir.Model,
    pairs: Iterable[Pair],
    *,
    measured: Collection[int],
    whole: Collection[int] = (),
    isolated: bool = False,
    settled: Collection[str] = (),
    axes: Mapping[int, int] | None = None,
) -> ir.Model:
    """The graph that runs both; its outputs are `<i>/<column>` and, where isolated, `<i>/isolated/<column>`.

    Args:
        measured: indices of the pairs that are measured.
        whole: indices of the pairs whose sides are outputs as they are.
        settled: values of both that the candidate's nodes read from the reference.
        axes: instead of these measures, the columns of `Measures.by_channel` along these axes, where isolated.
    """
    reference, pairs = _unreserved(reference, list(pairs))
    graph = Assembly()
    outer = _store(graph, reference, candidate)
    for node in reference.graph:
        graph.copy(node)
    # What only the candidate computes can't be read from the reference.
    computed_a = _computed(reference.graph)
    copy_nodes(graph, candidate.graph, B, outer | {name: name for name in settled if name in computed_a})
    if isolated:
        reference_values, _ = feeds_of(graph, pairs)
        copy_nodes(graph, candidate.graph, ISOLATED, outer | reference_values)
    computed_b = _computed(candidate.graph)
    measures = Measures(graph, opset_of(reference))
    for i, pair in enumerate(pairs):
        if i not in measured:
            continue
        other = outer.get(pair.b, B + pair.b)
        # Columns by channel are asked for few layers, and take the place of the sums.
        if axes is not None:
            alone = other
            if pair.b in computed_b:
                alone = ISOLATED + pair.b
            measures.by_channel(str(i), pair, (other, alone), axes[i])
            continue
        measures.add(str(i), pair, other, whole=i in whole)
        # An index is no error of its own: it follows the data that it points into.
        if isolated and pair.pointer is None:
            if pair.b in computed_b:
                other = ISOLATED + pair.b
            measures.add(f"{i}/isolated", pair, other, whole=i in whole)
    return _model(reference, candidate, measures)


def effects_graph(
    base: ir.Model,
    other: ir.Model,
    pairs: Iterable[Pair],
    layers: Sequence[int],
    targets: Mapping[int, Pair],
    *,
    whole: bool,
) -> ir.Model:
    """The graph that computes a model's outputs once more for each layer, with this layer the other model's.

    Its inputs are those of the model, and what its outputs are compared with. Its outputs are
    `<layer>/<output>/<column>`, for the outputs that a layer reaches; `b` is the only column of an output that is
    handed over. All layers share one run of the model: of it, only the nodes that depend on a layer are copied.

    Args:
        other: the model that single layers come from. They read the values of `base`.
        layers: indices of the pairs whose other side replaces that of `base`.
        targets: by index of an output's pair: the input that it is compared with (`a`), and its types.
        whole: whether all outputs are handed over.
    """
    base, pairs = _unreserved(base, list(pairs))
    graph = Assembly()
    outer = _store(graph, base, other)
    for node in base.graph:
        graph.copy(node)
    base_values, _ = feeds_of(graph, pairs)
    copy_nodes(graph, other.graph, ISOLATED, outer | base_values)
    # What a layer does not reach is computed once, for all layers.
    fixed = set(names(graph_values(base.graph)))
    measures = Measures(graph, opset_of(base))
    for index in layers:
        layer, prefix = pairs[index], f"{index}//"
        behind, changed = _behind(base.graph, layer.a)
        # The layer's value in the type that its readers in the base model take.
        graph.node("Cast", [ISOLATED + layer.b], prefix + layer.a, to=layer.dtype_a)
        copy_nodes(graph, behind, prefix, {name: name for name in fixed - changed})
        for place, target in targets.items():
            output = pairs[place].a
            # An output that the layer does not reach has no error by it.
            if output not in changed:
                continue
            # Integers of two types can't be compared in the graph.
            if whole or target.small or (target.counted and target.dtype_a != target.dtype_b):
                measures.hand_over(f"{index}/{place}/b", prefix + output, target.dtype_b)
            else:
                measures.add(f"{index}/{place}", target, prefix + output, whole=False)
    inputs = [ir.Value(name=each.a, type=ir.TensorType(ir.DataType(each.dtype_a))) for each in targets.values()]
    return _model(base, other, measures, inputs)


def _behind(graph: ir.Graph, value: str) -> tuple[list[ir.Node], set[str]]:
    """The nodes that depend on a value, and the values that do, itself among them."""
    changed = {value}
    nodes = []
    for node in graph:
        if not changed.isdisjoint(names(reads(node))):
            nodes.append(node)
            changed.update(names(node.outputs))
    return nodes, changed


def _store(graph: Assembly, reference: ir.Model, candidate: ir.Model) -> dict[str, str]:
    """Stores the tensors of both, equal ones of one name once.

    Returns:
        The names in the joint graph of the candidate's inputs and stored tensors.
    """
    stored = dict(reference.graph.initializers.tensor_items())
    for name, tensor in stored.items():
        graph.store(name, tensor)
    outer = {name: name for name in names(fed(candidate))}
    for name, tensor in candidate.graph.initializers.tensor_items():
        outer[name] = name
        if name not in stored or not equal(stored[name], tensor):
            outer[name] = B + name
            graph.store(B + name, tensor)
    return outer


def _model(reference: ir.Model, candidate: ir.Model, measures: Measures, further: Sequence[ir.Value] = ()) -> ir.Model:
    """The model that takes these measures, with those of the nodes that they need, and further inputs."""
    # By name, so that an input of both models is one input.
    inputs = {value.name: value for value in (*fed(candidate), *reference.graph.inputs, *further)}
    # `why_two_sessions` made sure that a domain in both has one version.
    return measures.graph.model(
        # Each measure stands right behind its pair: the runtime frees a value once its last reader has run.
        in_order(measures.nodes),
        list(inputs.values()),
        measures.outputs,
        opsets={**reference.opset_imports, **candidate.opset_imports},
        ir_version=max(reference.ir_version, candidate.ir_version, 8),
        functions=reference.functions.values(),
    )


def _computed(graph: ir.Graph) -> set[str]:
    computed = set[str]()
    for node in graph:
        computed.update(names(node.outputs))
    return computed


def _unreserved(reference: ir.Model, pairs: list[Pair]) -> tuple[ir.Model, list[Pair]]:
    """Renames the reference's values whose names the joint graph uses itself."""
    # Names that begin like ours are rare: the reference is copied only where one occurs.
    if not any(_RESERVED.match(name) for graph in reference.graphs() for name in _computed(graph)):
        return reference, pairs
    renamed = copied(reference)
    new_names: dict[str, str] = {}
    for node in renamed.graph.all_nodes():
        for value in node.outputs:
            if value.name and _RESERVED.match(value.name):
                new_names[value.name] = f"reference//{value.name}"
                value.name = new_names[value.name]
    return renamed, [_renamed_pair(pair, new_names) for pair in pairs]


def _renamed_pair(pair: Pair, names: Mapping[str, str]) -> Pair:
    pointer = pair.pointer
    if pointer is not None:
        pointer = replace(pointer, data=names.get(pointer.data, pointer.data))
    return replace(pair, a=names.get(pair.a, pair.a), pointer=pointer)


def isolated_model(candidate: ir.Model, pairs: Iterable[Pair]) -> ir.Model:
    """The candidate with every paired value read from an input of the value's name in the reference, prefixed `a//`.

    Values of types without a code here, text among them, are computed by the candidate itself.
    """
    pairs = [p for p in pairs if p.dtype_a and p.dtype_b]
    graph = Assembly()
    outer = {name: name for name in names(candidate.graph.inputs)}
    for name, tensor in candidate.graph.initializers.tensor_items():
        outer[name] = name
        graph.store(name, tensor)
    reference_values, casts = feeds_of(graph, pairs, "a//")
    nodes = copy_nodes(graph, candidate.graph, ISOLATED, outer | reference_values)
    taps = [ir.Value(name="a//" + p.a, type=ir.TensorType(ir.DataType(p.dtype_a))) for p in pairs]
    computed = _computed(candidate.graph)
    return graph.model(
        [*casts, *nodes],
        [*candidate.graph.inputs, *taps],
        [ISOLATED + p.b for p in pairs if p.b in computed],
        opsets=candidate.opset_imports,
        ir_version=candidate.ir_version,
        functions=candidate.functions.values(),
    )


def feeds_of(graph: Assembly, pairs: Iterable[Pair], prefix: str = "") -> tuple[dict[str, str], list[ir.Node]]:
    """The reference's value that replaces each value of the candidate, and Cast nodes where the types differ."""
    sources: dict[str, str] = {}
    casts: list[ir.Node] = []
    for pair in pairs:
        # The first pair holds where two values of the reference are paired with one of the candidate.
        if pair.b in sources:
            continue
        sources[pair.b] = prefix + pair.a
        if pair.dtype_a != pair.dtype_b:
            sources[pair.b] = f"cast//{pair.a}"
            casts.append(graph.node("Cast", [prefix + pair.a], sources[pair.b], to=pair.dtype_b))
    return sources, casts


def copy_nodes(graph: Assembly, nodes: Iterable[ir.Node], prefix: str, outer: Mapping[str, str]) -> list[ir.Node]:
    """Adds copies of the nodes.

    Args:
        prefix: goes before every name that the nodes write.
        outer: the names of what they read from elsewhere; a name that is not there gets the prefix.
    """

    def read(name: str) -> str:
        return outer.get(name, prefix + name)

    def write(name: str) -> str:
        return prefix + name

    return [graph.copy(node, read, write) for node in nodes]
