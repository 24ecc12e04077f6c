"""Values whose size depends on numbers, not on the sizes of the inputs: boxes that are found, elements that are not 0.

Two models that compute alike may find 12 and 11 boxes. Such values can't be compared element by element, so the values
that they are chosen from stand for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import may_be_equal, name_of, names, node_label, reads, subgraphs

# Operators whose output has a size by the numbers in these inputs.
_SIZE_INPUTS: Mapping[str, tuple[int, ...]] = {
    "NonZero": (0,),
    "NonMaxSuppression": (0, 1),
    "Unique": (0,),
    "Compress": (1,),
    "TopK": (1,),
    "Slice": (1, 2),
    "Expand": (1,),
    "Tile": (1,),
    "Reshape": (1,),
    "Range": (0, 1, 2),
    "ConstantOfShape": (0,),
}
# Operators whose output has the size of their first input, whatever the others are.
_SIZE_OF_FIRST = ("ScatterND", "ScatterElements", "Scatter")


_DECISIONS = frozenset(
    ("And", "Or", "Xor", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Cast", "ArgMax", "ArgMin")
)
_MOVES = frozenset(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"))


@dataclass(frozen=True)
class Counted:
    """The values of a graph whose size depends on numbers: by name, the label of the node that counts.

    `outputs` are those among the graph's outputs; `sources` are the computed values that these are chosen from, and
    are compared in their place.
    """

    values: Mapping[str, str]
    outputs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def note(self) -> str:
        """Why outputs are not compared themselves, in words; empty where all are."""
        if not self.outputs:
            return ""
        counting = " and ".join(dict.fromkeys(self.values[name] for name in self.outputs))
        judged = f"judged by {', '.join(self.sources)}" if self.sources else "not judged"
        return f"{counting} decides the size of {', '.join(self.outputs)}, so they are {judged}"


def counted(graph: ir.Graph) -> Counted:
    """Finds them in the main graph."""
    # Sizes and constants are the same in both models; what is computed from them alone counts nothing.
    fixed = set(graph.initializers)
    values: dict[str, str] = {}
    producers: dict[str, ir.Node] = {}
    for node in graph:
        producers.update(dict.fromkeys(names(node.outputs), node))
        origin = _origin(node, values, fixed)
        sized = names(node.outputs)
        if not origin and node.op_type in ("If", "Loop"):
            sized = names(_sized_by_bodies(node, fixed))
            if sized:
                origin = node_label(node)
        if origin:
            values.update(dict.fromkeys(sized, origin))
        elif node.op_type in ("Constant", "Shape", "Size") or fixed.issuperset(names(reads(node))):
            fixed.update(names(node.outputs))
    outputs = tuple(name for name in names(graph.outputs) if name in values)
    sources = dict.fromkeys(_sources(outputs, values, producers, fixed.union(names(graph.inputs))))
    return Counted(values, outputs, tuple(sources))


def _origin(node: ir.Node, values: Mapping[str, str], fixed: set[str]) -> str:
    """The label of the node that decides the size of this node's outputs; empty where the inputs' sizes do."""
    deciding = names(node.inputs)
    if node.op_type in _SIZE_OF_FIRST:
        deciding = names(node.inputs[:1])
    for name in deciding:
        if name in values:
            return values[name]
    for index in _SIZE_INPUTS.get(node.op_type, ()):
        read = node.inputs[index : index + 1]
        if not fixed.issuperset(names(read)):
            return node_label(node)
    return ""


def _sized_by_bodies(node: ir.Node, fixed: set[str]) -> list[ir.Value]:
    """The outputs whose size follows from the branch that is taken, or from the number of rounds of a Loop."""
    graphs = subgraphs(node)
    chosen = not fixed.issuperset(names(node.inputs[:1]))
    if node.op_type == "If":
        if not chosen:
            return []
        triples = zip(node.outputs, graphs[0].outputs, graphs[1].outputs, strict=True)
        return [output for output, first, second in triples if not may_be_equal(first.shape, second.shape)]
    body = graphs[0]
    # Exporters write a loop of a fixed number of rounds as one that passes its condition on.
    condition: ir.Value | None = body.outputs[0]
    producer = body.outputs[0].producer()
    while producer is not None and producer.op_type == "Identity":
        condition = producer.inputs[0]
        producer = None if condition is None else condition.producer()
    is_constant = producer is not None and producer.op_type == "Constant"
    goes_on = is_constant or condition is body.inputs[1] or name_of(condition) in {*body.initializers, *fixed}
    if goes_on and not chosen:
        return []
    # Carried values come first; each of the others has an element a round.
    return list(node.outputs[len(node.inputs) - 2 :])


def _sources(
    wanted: Collection[str], values: Mapping[str, str], producers: Mapping[str, ir.Node], fixed: Collection[str]
) -> Iterator[str]:
    """The values outside of `values` that the wanted ones are computed from."""
    waiting = list(wanted)
    visited = set(waiting)
    while waiting:
        for name in names(reads(producers[waiting.pop(0)])):
            if name in visited or name in fixed:
                continue
            visited.add(name)
            if name in values or _is_decision(name, producers):
                waiting.append(name)
            else:
                yield name


def _is_decision(name: str, producers: Mapping[str, ir.Node]) -> bool:
    """Whether a value holds truths or whole numbers that a threshold made: what is before it says more."""
    while name in producers:
        node = producers[name]
        if node.op_type in _DECISIONS:
            return True
        if node.op_type not in _MOVES:
            return False
        name = name_of(node.inputs[0]) or ""
    return False
