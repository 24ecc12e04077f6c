"""Applies rewrite rules: names the new nodes and values, records each firing, removes what is no longer read.

A rule only says which value replaces which. Three invariants hold after every firing, whichever rule fired:

- every graph input and output is still there under its name;
- a value that is still in the graph under its original name still has its original numbers: a replacement takes the
  name of the last value it replaces, and anything new gets a name that no value had;
- the nodes a firing made carry their sources: the values they replaced, the module paths and the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis import provenance, shape_inference
from layerline.graph.analysis.ir_queries import fresh_name, graph_values, node_names, reads, subgraphs, value_names
from layerline.graph.analysis.symbolic_sizes import unquoted
from layerline.graph.fusion.firing import After, Declined, Firing, Site, cut, nearest_unfused_after

Rewrite: TypeAlias = "Callable[[ir.Node, Tape, Rewriting], ir.Value | None]"


@dataclass(eq=False)
class Rewriting:
    """A model being rewritten: hands rules their graphs, applies what they decide, keeps the record.

    Attributes:
        denied: sites at which nothing may fire (their proof failed in an earlier pass).
        limit: stop after this many firings; the first k of two passes are the same, which bisecting stands on.
        fold_limit: bytes that a folded constant may add to the file beyond what it frees; all of them together may add
            as much, or a tenth of what the model stores, where that is more.
    """

    model: ir.Model
    _: KW_ONLY
    denied: frozenset[Site] = frozenset()
    limit: int | None = None
    fold_limit: int = 1 << 20

    def __post_init__(self) -> None:
        model = self.model
        self.opset = model.opset_imports.get("", 1)
        # A tenth of what is stored: folding must not make a large file noticeably larger.
        tensors = [value.const_value for value in model.graph.initializers.values()]
        self.fold_total = max(self.fold_limit, sum(tensor.nbytes for tensor in tensors if tensor is not None) // 10)
        self.folded = 0
        self.firings: list[Firing] = []
        self.declines: dict[Site, str] = {}
        # Number of firings at the last shape inference; -1 before the first.
        self._inferred = -1
        # Inference may know less of a body's ends than the file says; `finish` falls back on these.
        self._body_shapes: dict[ir.Graph, list[ir.Shape | None]] = {}
        for body in model.graph.subgraphs():
            self._body_shapes[body] = [value.shape for value in _ends(body)]
        # Read before the first inference overwrites them.
        self._declared_shapes = shape_inference.declared(model)
        self.unfused_names = {value.name for value in graph_values(model.graph) if value.name}
        # The node that holds a body, by the body's id; filled while `graphs` walks.
        self._owner: dict[int, ir.Node] = {}
        # Firings that are proved by other values than their own, and the names of those; see `record`.
        self._proved_by: dict[int, list[str]] = {}
        # A node and a value may share a name, so the two are kept apart.
        self._value_names = value_names(model)
        self._node_names = node_names(model)

    def graphs(self) -> Iterator[ir.Graph]:
        """The main graph, then every body inside it; a body whose node went meanwhile is passed over."""
        pending = [self.model.graph]
        while pending:
            graph = pending.pop(0)
            if graph is not self.model.graph and self._owner[id(graph)].graph is None:
                continue
            yield graph
            for node in graph:
                for body in subgraphs(node):
                    self._owner[id(body)] = node
                    pending.append(body)

    def reachable(self, graph: ir.Graph) -> list[ir.Graph]:
        """The graphs around a body whose tensors it may read, outermost first: none through a foreign operator."""
        reachable: list[ir.Graph] = []
        for owner in self._owners(graph):
            if owner.domain:
                reachable.clear()
            elif owner.graph is not None:
                reachable.append(owner.graph)
        return reachable

    def infer(self) -> None:
        """Works out all shapes anew, unless nothing has fired since they were."""
        if self._inferred != len(self.firings):
            shape_inference.infer(self.model, self._declared_shapes)
            self._inferred = len(self.firings)

    def finish(self) -> None:
        """Infers the shapes of the rewritten model; where nothing follows, ends of bodies keep their declared ones."""
        self.infer()
        for body in self.model.graph.subgraphs():
            # By place: bodies side by side may use one name for values of different shapes.
            for value, declared_shape in zip(_ends(body), self._body_shapes[body], strict=True):
                value.shape = value.shape or declared_shape
        for graph in self.model.graphs():
            for value in graph_values(graph):
                if value.shape is not None and not value.shape.is_static():
                    value.shape = unquoted(value.shape)

    def attempt(self, rule: str, node: ir.Node, rewrite: Rewrite) -> None:
        """Tries one rule at one node."""
        tape = Tape()
        fired = False
        try:
            new = rewrite(node, tape, self)
            if new is not None:
                # What replaces a node stands for its first output alone.
                refuse_other_outputs(node)
                clash = shape_inference.clash(node.outputs[0], new, tape.nodes, self.model)
                if clash:
                    raise Declined(clash)
                fired = self.swap(rule, [(node.outputs[0], new)], tape.nodes, tape.initializers)
        except Declined as declined:
            self.decline(rule, node.outputs[0], str(declined))
        if not fired:
            # Nodes that were made and not used must not be taken for consumers of what they read.
            for made in tape.nodes:
                _detach(made)

    def decline(self, rule: str, value: ir.Value, reason: str) -> None:
        """Records once why a rule did not fire at a value."""
        self.declines.setdefault(self._site(rule, value), reason)

    def release(self, nodes: Iterable[ir.Node], initializers: Iterable[ir.Value]) -> None:
        """Lets nodes on their way from one graph to another keep their names, where nothing else has them."""
        for node in nodes:
            self._node_names.discard(node.name or "")
            for value in node.outputs:
                self._value_names.discard(value.name or "")
        for value in initializers:
            self._value_names.discard(value.name or "")
        # What stays in the model may have the same name.
        self._value_names |= value_names(self.model)
        self._node_names |= node_names(self.model)

    def permits(self, rule: str, value: ir.Value) -> bool:
        """Whether this rule may still fire at this value."""
        if self.limit is not None and len(self.firings) >= self.limit:
            return False
        return self._site(rule, value) not in self.denied

    def swap(
        self,
        rule: str,
        pairs: Sequence[tuple[ir.Value, ir.Value]],
        nodes: Sequence[ir.Node],
        initializers: Sequence[ir.Value],
    ) -> bool:
        """Replaces outputs of nodes by other values, and prunes what nothing reads. The first is the firing's place."""
        first_old, first_new = pairs[0]
        node = first_old.producer()
        assert node is not None and node.graph is not None
        if not self.permits(rule, first_old):
            return False
        # Taken down before the node is out of its graph.
        site = self._site(rule, first_old)
        owners = self._owners(node.graph)
        made = {new for _, new in pairs if new in initializers or new.producer() in nodes}
        # Decided while the graph still shows who reads what.
        renamed = [new for old, new in pairs if new not in made and self._takes_over(old, new)]
        self._settle_names(node, dict(pairs), nodes, initializers)
        after: dict[str, After] = {}
        # A constant has its bytes by construction; inside a body the outputs of the node around it are proved.
        if not owners and node.op_type != "Constant":
            for old, new in pairs:
                after[old.name or ""] = cut(new, self.unfused_names, made=new in made)
        # Right before the node they replace, where all that they read is computed already.
        node.graph.insert_before(node, nodes)
        for old, new in pairs:
            if new in renamed:
                new.name = old.name
            # Good until shapes are inferred anew, before the next round.
            new.shape = new.shape or old.shape
            new.type = new.type or old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        # Only now is it known what nothing reads any more.
        gone = self.prune(dict.fromkeys(old.producer() for old, _ in pairs))
        modules = provenance.stamp(nodes, gone, rule)
        # Names of the values that are gone, each once; what is a constant has no source.
        sources: dict[str, None] = {}
        for removed in gone:
            if removed.op_type != "Constant":
                sources.update((output.name, None) for output in removed.outputs if output.name)
        self.firings.append(Firing(site, first_new.name or "", tuple(sources), modules, after))
        index = len(self.firings) - 1
        if owners:
            self._proved_by[index] = [output.name for output in owners[0].outputs if output.name]
        elif after and first_old.name not in self.unfused_names:
            self._proved_by[index] = nearest_unfused_after(first_new, self.unfused_names)
        return True

    def merge(self, rule: str, old: ir.Value, new: ir.Value) -> None:
        """What reads one stored tensor reads another of the same bytes, which is no change to prove."""
        site = self._site(rule, old)
        if self.permits(rule, old):
            old.replace_all_uses_with(new)
            drop_initializer(old)
            self.firings.append(Firing(site, new.name or "", (old.name or "",), (), {}))

    def record(self) -> tuple[Firing, ...]:
        """The firings in order.

        What fired inside a body is proved by the outputs of the node around it, and what replaced a value that the
        unfused model doesn't have by the next values that it has: both as they are now, all firings together.
        """
        # Later firings may have replaced some of these values again, or dropped them.
        present = {value.name or "": value for value in graph_values(self.model.graph)}

        @cache
        def after_of(name: str) -> After:
            """One object for all firings of a body, so that it is proved once."""
            return cut(present[name], self.unfused_names, made=True)

        for index, names in self._proved_by.items():
            after = {name: after_of(name) for name in names if name in present}
            self.firings[index] = replace(self.firings[index], after=after)
        return tuple(self.firings)

    def fold(self, rule: str, old: ir.Value, tensor: ir.TensorProtocol) -> bool:
        """Replaces `old` by a constant: an initializer of its graph, or a Constant node where it is a graph output."""
        tape = Tape()
        if old.is_graph_output():
            # An output of a graph keeps a node that computes it.
            new = tape.op("Constant", [], {"value": tensor})
        else:
            new = tape.initializer(tensor, old.name)
        new.shape, new.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        return self.swap(rule, [(old, new)], tape.nodes, tape.initializers)

    def prune(self, nodes: Iterable[ir.Node | None]) -> list[ir.Node]:
        """Removes the nodes that nothing reads, then what only they read; returns the removed nodes, inputs first."""
        removed: list[ir.Node] = []
        pending = list(nodes)
        while pending:
            node = pending.pop(0)
            if node is None or node.graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
                continue
            graph = node.graph
            read = reads(node)
            _detach(node)
            graph.remove(node, safe=True)
            # A node goes before what it reads, so the last one removed comes first in the order of the graph.
            removed.insert(0, node)
            for value in read:
                producer = value.producer()
                if producer is not None:
                    pending.append(producer)
                elif not value.uses():
                    drop_initializer(value)
        return removed

    def _site(self, rule: str, value: ir.Value) -> Site:
        # The graph of a computed value is that of its node, also where the value is an output of a body around it.
        node = value.producer()
        graph = value.graph if node is None else node.graph
        return Site(rule, value.name or "", tuple(owner.name or "" for owner in self._owners(graph)))

    def _owners(self, graph: ir.Graph | None) -> list[ir.Node]:
        """The nodes around a body, outermost first."""
        owners: list[ir.Node] = []
        while graph is not None and id(graph) in self._owner:
            owners.insert(0, self._owner[id(graph)])
            graph = owners[0].graph
        return owners

    def _takes_over(self, old: ir.Value, new: ir.Value) -> bool:
        """Whether `new`, which was there already, must be called `old` from now on.

        It must where `old` is a graph output. It should where both belong to one module and nothing else reads `new`:
        then `new` is an inner step of what people know as `old` (the MatMul of a Linear).
        """
        producer = new.producer()
        node = old.producer()
        assert node is not None
        is_free = producer is not None and producer.graph is node.graph and not new.is_graph_output()
        if old.is_graph_output():
            if not is_free:
                raise Declined(f"{old.name} is a graph output and must stay apart from {new.name}")
            return True
        if producer is None or not is_free or any(use.node is not node for use in new.uses()):
            return False
        modules = provenance.modules(node)
        return modules != () and provenance.modules(producer) == modules

    def _settle_names(
        self,
        node: ir.Node,
        pairs: Mapping[ir.Value, ir.Value],
        nodes: Sequence[ir.Node],
        initializers: Sequence[ir.Value],
    ) -> None:
        """Names the new values and nodes: a replacement has the name of the old value, all others get fresh names."""
        assert node.graph is not None
        replaced_names = {new: old.name for old, new in pairs.items()}
        stem = next(iter(pairs)).name
        for value in initializers:
            name = replaced_names.get(value) or fresh_name(value.name or f"{stem}/constant", self._value_names)
            _set_tensor_name(value, name)
            node.graph.register_initializer(value)
        # The node goes, so one that replaces it may have its name.
        self._node_names.discard(node.name or "")
        for count, made in enumerate(nodes):
            node_name = node.name or stem or made.op_type
            if not any(output in replaced_names for output in made.outputs):
                node_name = f"{node_name}/{made.op_type}_{count}"
            made.name = fresh_name(made.name or node_name, self._node_names)
            for output in made.outputs:
                value_name = output.name or f"{stem}/{made.op_type}_{count}"
                output.name = replaced_names.get(output) or fresh_name(value_name, self._value_names)


def drop_initializer(value: ir.Value) -> None:
    """Forgets a stored tensor that nothing reads; inputs and outputs of the graph stay."""
    graph = value.graph
    if graph is not None and value.is_initializer() and not (value.is_graph_input() or value.is_graph_output()):
        graph.initializers.pop(value.name or "")


def _set_tensor_name(value: ir.Value, name: str) -> None:
    """Names a stored tensor, and not the tensor of the unfused model that it may have come from."""
    if value.name != name and isinstance(value.const_value, ir.serde.TensorProtoTensor):
        copy = onnx.TensorProto()
        copy.CopyFrom(value.const_value.raw)
        value.const_value = ir.serde.TensorProtoTensor(copy)
    value.name = name


def refuse_other_outputs(node: ir.Node) -> None:
    """Declines where anything but a node's first output is read."""
    for other in node.outputs[1:]:
        if other.uses() or other.is_graph_output():
            raise Declined(f"second output {other.name} of {node.op_type} {node.outputs[0].name} is used")


def _ends(body: ir.Graph) -> list[ir.Value]:
    """Inputs and outputs of a body."""
    return [*body.inputs, *body.outputs]


def _detach(node: ir.Node) -> None:
    """Takes back what a node and its bodies read, so that nothing seems used by a node that is gone."""
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    for graph in subgraphs(node):
        for inner in graph:
            _detach(inner)
