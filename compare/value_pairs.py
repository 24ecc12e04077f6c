"""Which values of two models stand for each other, and whether both models can be one graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from layerline.compare.topk_indices import pointers
from layerline.graph.analysis.ir_queries import first_output, name_of, names
from layerline.pipeline.errors import StageError


def pair_values(reference: ir.Model, candidate: ir.Model, pairs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Reference value to candidate value, in the reference's topological order; outputs by position.

    Raises:
        StageError: a name in `pairs` that its model does not have, or another number of outputs.
    """
    outputs_a = names(reference.graph.outputs)
    outputs_b = names(candidate.graph.outputs)
    if len(outputs_a) != len(outputs_b):
        raise StageError(
            f"the reference gives {outputs_a}, the candidate {outputs_b}: outputs are paired by position",
            where="outputs",
        )
    values_a = computed_values(reference.graph)
    values_b = computed_values(candidate.graph)
    if pairs is None:
        pairs = {name: name for name in values_a}
    else:
        _check_names("reference", pairs.keys(), values_a)
        _check_names("candidate", pairs.values(), values_b)
    in_candidate = set(values_b)
    by_position = dict(zip(outputs_a, outputs_b, strict=True))
    matched: dict[str, str] = {}
    for name in values_a:
        if name in by_position:
            matched[name] = by_position[name]
        elif pairs.get(name) in in_candidate:
            matched[name] = pairs[name]
    # Outputs that no node computes (an input or a constant that is passed on) come last.
    for name, other in by_position.items():
        matched.setdefault(name, other)
    return matched


def sides_of_qdq(graph: ir.Graph, covered: Collection[str]) -> set[str]:
    """Values that say again what a quantised value says: its integers, and what they stand for.

    Args:
        covered: values that have a row, and weights that the model stores.
    """
    sources: dict[str | None, str | None] = {}
    sides = set[str]()
    for node in graph:
        if node.op_type == "QuantizeLinear":
            sources[node.outputs[0].name] = name_of(node.inputs[0])
            sides.add(first_output(node))
        elif node.op_type == "DequantizeLinear":
            source = name_of(node.inputs[0])
            if sources.get(source, source) in covered:
                sides.add(first_output(node))
    return sides.difference(names(graph.outputs))


def computed_values(graph: ir.Graph) -> list[str]:
    """Names of the values that the nodes of a graph compute, constants left out."""
    computed: list[str] = []
    for node in graph:
        if node.op_type != "Constant":
            computed += names(node.outputs)
    return computed


def _check_names(side: str, wanted: Iterable[str], values: Iterable[str]) -> None:
    unknown = sorted(set(wanted) - set(values))
    if unknown:
        raise StageError(f"the {side} has no value called {unknown[0]!r}", where="pairs")


def why_two_sessions(reference: ir.Model, candidate: ir.Model) -> str | None:
    """Why the two cannot be one graph, in one sentence for a report's notes; None when they can."""
    opsets_a, opsets_b = _opsets(reference), _opsets(candidate)
    for domain in sorted(set(opsets_a) & set(opsets_b)):
        if opsets_a[domain] != opsets_b[domain]:
            versions = f"{opsets_a[domain]} and {opsets_b[domain]} of {domain or 'ai.onnx'}"
            return f"compared as two sessions: opset {versions} cannot share a graph"
    # The measuring nodes count axes from the end, which came with opset 11.
    if min(opsets_a.get("", 0), opsets_b.get("", 0)) < 11:
        return "compared as two sessions: below opset 11"
    # Its functions may have the names of the reference's, with other bodies.
    if candidate.functions:
        return "compared as two sessions: the candidate has functions"
    # The order of unsorted results is free, so they are sorted before they are compared; numpy does that.
    if any(not p.ordered for p in pointers(reference.graph).values()):
        return "compared as two sessions: a TopK leaves its order open"
    return None


def _opsets(model: ir.Model) -> dict[str, int]:
    """Opset versions by domain; ai.onnx is another name of the empty domain."""
    return {domain.replace("ai.onnx", "", 1): version for domain, version in model.opset_imports.items()}
