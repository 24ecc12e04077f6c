"""Puts a graph together by names, out of copies of other graphs' nodes: the graphs that measure a model.

Onnx_ir's values are objects, and each belongs to one graph. Here a name stands for one value, so that nodes may be
added in any order, and a copy may read what another copy computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import Array, reads

Rename = Callable[[str], str]


def same(name: str) -> str:
    """Keeps a name."""
    return name


class Assembly:
    """Nodes and stored tensors of a graph to be."""

    def __init__(self) -> None:
        self._values: dict[str, ir.Value] = {}
        self._stored: dict[str, ir.Value] = {}

    def value(self, name: str) -> ir.Value:
        """The value of that name."""
        if name not in self._values:
            self._values[name] = ir.Value(name=name)
        return self._values[name]

    def store(self, name: str, tensor: ir.TensorProtocol | Array) -> None:
        """Stores a tensor under a name; it is shared, not copied."""
        if not isinstance(tensor, ir.TensorProtocol):
            tensor = ir.tensor(tensor)
        value = self._stored[name] = self.value(name)
        value.const_value = tensor
        value.type = ir.TensorType(tensor.dtype)
        value.shape = ir.Shape(tensor.shape.numpy())

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: int) -> ir.Node:
        """Adds a node with one output."""
        values = [self.value(name) for name in inputs]
        return ir.node(op, values, attributes, outputs=[self.value(output)], name="")

    def copy(self, node: ir.Node, read: Rename = same, write: Rename = same) -> ir.Node:
        """Adds a copy of a node without its metadata.

        `read` gives the name here of a value that the node, or a body in it, reads from outside; `write` that of what
        the node and its bodies compute, and of the node.
        """
        return self._copy(node, read, write, {}, top=True)

    def _copy(self, node: ir.Node, read: Rename, write: Rename, inner: dict[ir.Value, ir.Value], top: bool) -> ir.Node:
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            if value is None or not value.name:
                inputs.append(None)
            else:
                inputs.append(inner.get(value) or self.value(read(value.name)))
        attributes = [self._attribute(attribute, read, write, inner) for attribute in node.attributes.values()]
        outputs: list[ir.Value] = []
        for value in node.outputs:
            if top and value.name:
                outputs.append(self.value(write(value.name)))
            else:
                outputs.append(_inner(value, write, inner))
        name = write(node.name) if node.name else ""
        return ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, outputs=outputs, name=name
        )

    def _attribute(self, attribute: ir.Attr, read: Rename, write: Rename, inner: dict[ir.Value, ir.Value]) -> ir.Attr:
        if attribute.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attribute.name, self._body(attribute.as_graph(), read, write, inner))
        if attribute.type == ir.AttributeType.GRAPHS:
            bodies = [self._body(body, read, write, inner) for body in attribute.as_graphs()]
            return ir.AttrGraphs(attribute.name, bodies)
        return attribute

    def _body(self, body: ir.Graph, read: Rename, write: Rename, inner: dict[ir.Value, ir.Value]) -> ir.Graph:
        inputs = [_inner(value, write, inner) for value in body.inputs]
        stored = [_inner(value, write, inner) for value in body.initializers.values()]
        nodes = [self._copy(node, read, write, inner, top=False) for node in body]
        outputs = [inner[value] for value in body.outputs]
        return ir.Graph(inputs, outputs, nodes=nodes, initializers=stored, name=body.name)

    def model(
        self,
        nodes: Iterable[ir.Node],
        inputs: Sequence[ir.Value],
        outputs: Iterable[str],
        *,
        opsets: Mapping[str, int],
        ir_version: int,
        functions: Iterable[ir.Function] = (),
    ) -> ir.Model:
        """The model that computes `outputs` with these nodes, in this order; its inputs are like `inputs`."""
        own_inputs: list[ir.Value] = []
        for value in inputs:
            own = self.value(value.name or "")
            own.type = value.type
            own.shape = value.shape
            own_inputs.append(own)
        graph = ir.Graph(
            own_inputs,
            [self.value(name) for name in outputs],
            nodes=nodes,
            initializers=[value for value in self._stored.values() if value.uses() or value.is_graph_output()],
            opset_imports=dict(opsets),
            name="measures",
        )
        return ir.Model(graph, ir_version=ir_version, functions=list(functions))


def _inner(value: ir.Value, write: Rename, inner: dict[ir.Value, ir.Value]) -> ir.Value:
    """The copy of a value that a body defines."""
    if value not in inner:
        name = write(value.name) if value.name else ""
        inner[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    return inner[value]


def in_order(wanted: Iterable[ir.Node]) -> list[ir.Node]:
    """The wanted nodes in their order, each with what computes its inputs right before it.

    What is measured comes as early as it can: a runtime lets a value go once nothing reads it any more.
    """
    stack = list(wanted)[::-1]
    ordered: dict[ir.Node, None] = {}
    # Depth first without recursion: a node stays on the stack until all that it reads is in order.
    opened: set[ir.Node] = set()
    while stack:
        node = stack[-1]
        if node not in opened:
            opened.add(node)
            makers = [value.producer() for value in reads(node)]
            stack += [maker for maker in reversed(makers) if maker is not None and maker not in opened]
            continue
        ordered[stack.pop()] = None
    return list(ordered)
