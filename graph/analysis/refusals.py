"""Why a model is refused: a node with the control flow around it, and nodes that run in training mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from layerline.backends.base import SOURCE, TRACED
from layerline.graph.analysis import ir_queries, provenance
from layerline.graph.analysis.shape_inference import infer_types
from layerline.pipeline.errors import StageError


@dataclass(frozen=True)
class Refusal:
    """A reason why a model can't be built: the tensor's name, then the fields of a PipeError."""

    tensor: str
    where: str
    what: str
    hint: str


@dataclass(frozen=True)
class NodeSite:
    """A node and the control-flow nodes whose bodies it lies in, outermost first."""

    node: ir.Node
    inside: tuple[ir.Node, ...] = ()

    def refuse(self, value: ir.Value | None, what: str, hint: str) -> Refusal:
        """A refusal at this node, about one of its values."""
        tensor = ""
        parts: list[str] = []
        if value is not None and value.name:
            tensor = value.name
            parts.append(f"tensor {tensor}")
        parts.append(f"{self.node.op_type} node {name(self.node)}")
        modules = provenance.modules(self.node)
        if modules:
            parts.append(f"module {modules[0]}")
        return Refusal(tensor, ", ".join(parts), what, hint)


def sites(graph: ir.Graph, inside: tuple[ir.Node, ...] = ()) -> Iterator[NodeSite]:
    """Every node in order, those in bodies after the node that holds them."""
    for node in graph:
        yield NodeSite(node, inside)
        for body in ir_queries.subgraphs(node):
            yield from sites(body, (*inside, node))


def name(node: ir.Node) -> str:
    """The node's name, or that of its first output."""
    names = [node.name, *(output.name for output in node.outputs)]
    return next(filter(None, names), "")


def refuse_training(model: ir.Model) -> None:
    """Refuses, by a StageError that says what to change, a node that drops values or takes the batch's statistics."""
    typed = ir_queries.copied(model)
    infer_types(typed)
    for site in sites(typed.graph):
        # A training_mode computed from constants may still turn out false; fuse folds it.
        if site.node.op_type == "Dropout" and not _switch(site.node):
            continue
        for refusal in training_mode(site):
            raise StageError(refusal.what, where=refusal.where, hint=refusal.hint)


def training_mode(site: NodeSite) -> Iterator[Refusal]:
    """Whether the node runs in training mode, and how to switch that off."""
    node = site.node
    if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
        what = "BatchNormalization is in training mode: it takes the batch's own statistics"
        remedy = "set the node's attribute training_mode to 0"
    elif node.op_type == "Dropout" and ir_queries.trains(node):
        what = "Dropout is in training mode: it drops values in every run"
        remedy = _switch(node) or "make its third input, training_mode, false"
    else:
        return
    hint = f"{remedy}, or export again after model.eval()"
    if is_traced(node, site.inside):
        hint = "call model.eval() before export"
    yield site.refuse(node.outputs[0], what, hint)


def _switch(dropout: ir.Node) -> str:
    """How to switch a Dropout off: in pipe.yaml where its mode is an input, in the file where it is stored."""
    mode = ir_queries.optional_input(dropout, 2)
    if mode is None:
        return ""
    if mode.is_graph_input() and not mode.is_initializer():
        return f"fix that input in pipe.yaml: import-onnx {{values: {{{mode.name}: 0}}}}"
    if ir_queries.constant(mode) is None:
        return ""
    return f"store false in {mode.name}, its third input"


def is_traced(choice: ir.Node, inside: tuple[ir.Node, ...]) -> bool:
    """Whether the model was exported from the project's own module, as the metadata of its nodes says."""
    graph = (*inside, choice)[0].graph
    return graph is not None and any(n.metadata_props.keys() & {SOURCE, TRACED} for n in graph)
