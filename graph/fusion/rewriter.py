"""The machine that applies rewrite rules: it names, records and prunes; a rule only says what becomes what.

Three invariants hold after every firing, whichever rule fired:

- every graph input and output is still there under its name;
- a value that is still in the graph under its original name still has its original numbers: a replacement takes the
  name of the last value it replaces, and anything new gets a name that no value had;
- the nodes a firing made carry their sources: the values they replaced, the module paths and the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import onnx
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis import provenance, shape_inference
from layerline.graph.analysis.ir_queries import captures, subgraphs
from layerline.graph.fusion.extract_subgraph import cut, known_after
from layerline.graph.fusion.rule import Decline, Declined, Firing, Rewrite, Rule, Site

MAX_ROUNDS = 12


class Made(Protocol):
    """What a firing adds to the graph: a tape, or a branch that moves out."""

    @property
    def nodes(self) -> Sequence[ir.Node]: ...

    @property
    def initializers(self) -> Sequence[ir.Value]: ...


class Rewriting:
    """A model being rewritten: hands rules their graphs, applies what they decide, keeps the record.

    Args:
        model: rewritten in place.
        denied: sites at which nothing may fire (their proof failed in an earlier pass).
        limit: stop after this many firings; None for no limit. Rewriting is deterministic, so the first k firings of
            two passes are the same: this is what bisecting stands on.
        fold_limit: bytes that a folded constant may add to the file beyond what it frees; all of them together may add
            as much, or a tenth of what the model stores, where that is more.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        denied: frozenset[Site] = frozenset(),
        limit: int | None = None,
        fold_limit: int = 1 << 20,
    ) -> None:
        self.model, self.denied, self.limit, self.fold_limit = model, denied, limit, fold_limit
        self.opset = model.opset_imports.get("", 1)
        stored = sum(t.const_value.nbytes for t in model.graph.initializers.values() if t.const_value is not None)
        self.fold_total, self.folded = max(fold_limit, stored // 10), 0
        self.firings: list[Firing] = []
        self.declines: dict[Site, Decline] = {}
        self._inferred = -1
        bodies = [g for g in model.graphs() if g is not model.graph]
        self._ends = {o.name: o.shape for g in bodies for o in g.outputs if o.name}
        self._begins = [(i, i.shape) for g in bodies for i in g.inputs]
        self._told = shape_inference.declared(model)
        self.known = {v.name for v in values(model.graph) if v.name}
        self._owner: dict[int, ir.Node] = {}
        self._late: dict[int, list[str]] = {}
        self._taken, self._nodes = self._names()

    def _names(self) -> tuple[set[str | None], set[str | None]]:
        """Names of all values and of all nodes; the two may overlap."""
        graphs = list(self.model.graphs())
        return {v.name for g in graphs for v in values(g)}, {n.name for g in graphs for n in g}

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
        owners = self._owners(graph)
        foreign = max((i for i, owner in enumerate(owners) if owner.domain), default=-1)
        return [owner.graph for owner in owners[foreign + 1 :] if owner.graph is not None]

    def infer(self) -> None:
        """Works out all shapes anew, unless nothing has fired since they were."""
        if self._inferred != len(self.firings):
            shape_inference.infer(self.model, self._told)
            self._inferred = len(self.firings)

    def finish(self) -> None:
        """Shapes of the rewritten model; bodies take and give what the file said, where nothing is known."""
        self.infer()
        for value, said in self._begins:
            value.shape = value.shape or said
        for body in (g for g in self.model.graphs() if g is not self.model.graph):
            for output in body.outputs:
                output.shape = output.shape or self._ends.get(output.name or "")

    def attempt(self, rule: str, node: ir.Node, rewrite: Rewrite) -> None:
        """Tries one rule at one node."""
        tape, fired = Tape(), False
        try:
            new = rewrite(node, tape, self)
            if new is not None:
                _refuse_other_outputs(node)
                if reason := shape_inference.clash(node.outputs[0], new, tape.nodes, self.model):
                    raise Declined(reason)
                fired = self.fire(rule, node.outputs[0], new, tape)
        except Declined as declined:
            self.decline(rule, node.outputs[0], str(declined))
        if not fired:
            # Nodes that were made and not used must not be taken for consumers of what they read.
            for made in tape.nodes:
                _detach(made)

    def decline(self, rule: str, value: ir.Value, reason: str) -> None:
        """Records once why a rule did not fire at a value."""
        site = self._site(rule, value)
        self.declines.setdefault(site, Decline(site, reason))

    def fresh(self, name: str) -> str:
        """`name`, or the first `name_2`, `name_3`, … that no value of the model is called."""
        return _fresh(name, self._taken)

    def release(self, nodes: Iterable[ir.Node], initializers: Iterable[ir.Value]) -> None:
        """Lets nodes on their way from one graph to another keep their names, where nothing else has them."""
        moving = list(nodes)
        self._taken -= {v.name for n in moving for v in n.outputs} | {v.name for v in initializers}
        self._nodes -= {n.name for n in moving}
        staying = self._names()
        self._taken |= staying[0]
        self._nodes |= staying[1]

    def permits(self, rule: str, value: ir.Value) -> bool:
        """Whether this rule may still fire at this value."""
        if self.limit is not None and len(self.firings) >= self.limit:
            return False
        return self._site(rule, value) not in self.denied

    def fire(self, rule: str, old: ir.Value, new: ir.Value, tape: Tape) -> bool:
        """Replaces `old`, an output of a node, by `new` and prunes what nothing reads any more.

        Raises:
            Declined: the names of graph inputs and outputs could not all be kept.
        """
        return self.swap(rule, [(old, new)], tape)

    def swap(self, rule: str, pairs: Sequence[tuple[ir.Value, ir.Value]], tape: Made) -> bool:
        """Replaces several values at once; the firing's place is the first of them."""
        first = pairs[0][0]
        node = first.producer()
        assert node is not None and node.graph is not None
        if not self.permits(rule, first):
            return False
        site, inside = self._site(rule, first), self._owners(node.graph)
        taken_over = [self._takes_over(old, new, tape) for old, new in pairs]
        self._settle_names(node, dict(pairs), tape)
        after = (
            {}
            if inside or node.op_type == "Constant"
            else {o.name or "": cut(n, self.known, made=_is_made(n, tape)) for o, n in pairs}
        )
        if tape.nodes:
            node.graph.insert_before(node, tape.nodes)
        for (old, new), rename in zip(pairs, taken_over, strict=True):
            if rename:
                new.name = old.name
            new.shape, new.type = new.shape or old.shape, new.type or old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        gone = self.prune([p for old, _ in pairs if (p := old.producer()) is not None])
        modules = provenance.stamp(tape.nodes, gone, rule)
        sources = tuple(dict.fromkeys(o.name for n in gone for o in n.outputs if o.name and n.op_type != "Constant"))
        result = pairs[0][1].name or ""
        self.firings.append(Firing(site, result, sources, modules, after))
        if inside:
            self._late[len(self.firings) - 1] = [o.name for o in inside[0].outputs if o.name]
        elif after and first.name not in self.known:
            self._late[len(self.firings) - 1] = known_after(pairs[0][1], self.known)
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
        here = {v.name or "": v for v in values(self.model.graph)}
        wanted = {n for names in self._late.values() for n in names if n in here}
        now = {n: cut(here[n], self.known, made=True) for n in sorted(wanted)}
        for index, names in self._late.items():
            self.firings[index] = replace(self.firings[index], after={n: now[n] for n in names if n in now})
        return tuple(self.firings)

    def fold(self, rule: str, old: ir.Value, tensor: ir.TensorProtocol) -> bool:
        """Replaces `old` by a constant: an initializer of its graph, or a Constant node where it is a graph output."""
        tape = Tape()
        if old.is_graph_output():
            new = tape.op("Constant", [], {"value": tensor})
        else:
            new = tape.initializer(tensor, old.name)
        new.shape, new.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        return self.fire(rule, old, new, tape)

    def prune(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        """Removes the nodes that nothing reads, then what only they read; returns the removed nodes, inputs first."""
        removed: list[ir.Node] = []
        pending = list(nodes)
        while pending:
            node = pending.pop(0)
            graph = node.graph
            if graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
                continue
            read = [v for v in node.inputs if v is not None] + captures(node)
            _detach(node)
            graph.remove(node, safe=True)
            removed.insert(0, node)
            for value in read:
                producer = value.producer()
                if producer is not None:
                    pending.append(producer)
                elif not value.uses():
                    drop_initializer(value)
        return removed

    def _site(self, rule: str, value: ir.Value) -> Site:
        node = value.producer()
        owners = self._owners(value.graph if node is None else node.graph)
        return Site(rule, value.name or "", tuple(o.name or "" for o in owners))

    def _owners(self, graph: ir.Graph | None) -> list[ir.Node]:
        """The nodes around a body, outermost first."""
        owners: list[ir.Node] = []
        while graph is not None and id(graph) in self._owner:
            owners.insert(0, self._owner[id(graph)])
            graph = owners[0].graph
        return owners

    def _takes_over(self, old: ir.Value, new: ir.Value, tape: Made) -> bool:
        """Whether `new`, which was there already, must be called `old` from now on.

        It must where `old` is a graph output. It should where both belong to one module and nothing else reads `new`:
        then `new` is an inner step of what people know as `old` (the MatMul of a Linear).
        """
        made, node = new.producer(), old.producer()
        assert node is not None
        if _is_made(new, tape):
            return False
        free = made is not None and made.graph is node.graph and not new.is_graph_output()
        if not old.is_graph_output():
            alone = free and all(u.node is node for u in new.uses())
            return alone and made is not None and provenance.modules(made) == provenance.modules(node) != ()
        if not free:
            raise Declined(f"{old.name} is a graph output and must stay apart from {new.name}")
        return True

    def _settle_names(self, node: ir.Node, pairs: Mapping[ir.Value, ir.Value], tape: Made) -> None:
        """Names everything made: replacements like what they replace, the rest like nothing before."""
        assert node.graph is not None
        names = {new: old.name for old, new in pairs.items()}
        stem = next(iter(pairs)).name
        for value in tape.initializers:
            _call(value, names.get(value) or self.fresh(value.name or f"{stem}/constant"))
            node.graph.register_initializer(value)
        self._nodes.discard(node.name)
        for count, made in enumerate(tape.nodes):
            base = node.name or stem or made.op_type
            last = any(o in names for o in made.outputs)
            made.name = _fresh(made.name or (base if last else f"{base}/{made.op_type}_{count}"), self._nodes)
            for output in made.outputs:
                output.name = names.get(output) or self.fresh(output.name or f"{stem}/{made.op_type}_{count}")


def run(work: Rewriting, rules: Sequence[Rule]) -> None:
    """Applies the rules in order, again and again, until a whole round fires nothing."""
    for _ in range(MAX_ROUNDS):
        before = len(work.firings)
        # What still declines in the last round is what declined.
        work.declines.clear()
        work.infer()
        for rule in rules:
            rule.run(work)
        if len(work.firings) == before:
            return


def drop_initializer(value: ir.Value) -> None:
    """Forgets a stored tensor that nothing reads; inputs and outputs of the graph stay."""
    graph = value.graph
    if graph is not None and value.is_initializer() and not (value.is_graph_input() or value.is_graph_output()):
        graph.initializers.pop(value.name or "")


def _call(value: ir.Value, name: str) -> None:
    """Names a stored tensor, and not the tensor of the unfused model that it may have come from."""
    if value.name != name and isinstance(value.const_value, ir.serde.TensorProtoTensor):
        apart = onnx.TensorProto()
        apart.CopyFrom(value.const_value.raw)
        value.const_value = ir.serde.TensorProtoTensor(apart)
    value.name = name


def _is_made(value: ir.Value, tape: Made) -> bool:
    return value in tape.initializers or value.producer() in tape.nodes


def _fresh(name: str, taken: set[str | None]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


def _refuse_other_outputs(node: ir.Node) -> None:
    for other in node.outputs[1:]:
        if other.uses() or other.is_graph_output():
            raise Declined(f"second output {other.name} of {node.op_type} {node.outputs[0].name} is used")


def _detach(node: ir.Node) -> None:
    """Takes back what a node and its bodies read, so that nothing seems used by a node that is gone."""
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    for graph in subgraphs(node):
        for inner in graph:
            _detach(inner)


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every named value of one graph: inputs, stored tensors, outputs of nodes."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
