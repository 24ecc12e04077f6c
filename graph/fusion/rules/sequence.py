"""Sequences that are only taken apart again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, consumers, dim, parent, rank, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule, on


def split(work: Rewriting) -> None:
    """SplitToSequence whose pieces are each picked by number: one Split."""
    for graph in work.graphs():
        for node in graph:
            if node.op_type == "SplitToSequence" and node.domain == "":
                try:
                    _split(node, work)
                except Declined as declined:
                    work.decline(SPLIT.name, node.outputs[0], str(declined))


def _split(node: ir.Node, work: Rewriting) -> None:
    name, lengths = node.outputs[0].name, _lengths(node)
    picks = consumers(node.outputs[0])
    indices = [scalar(p.inputs[1]) if p.op_type == "SequenceAt" else None for p in picks]
    if node.outputs[0].is_graph_output() or not picks or None in indices:
        raise Declined(f"sequence {name} is used other than by picking fixed pieces")
    if away := next((p for p in picks if p.graph is not node.graph), None):
        raise Declined(f"piece {away.outputs[0].name} of sequence {name} is picked in the body of another node")
    chosen = [int(i) % len(lengths) for i in indices if i is not None and -len(lengths) <= i < len(lengths)]
    if len(chosen) < len(picks) or len(set(chosen)) < len(chosen):
        raise Declined(f"pieces {indices} of sequence {name} are not {len(picks)} different ones of {len(lengths)}")
    tape = Tape()
    axis = node.attributes.get_int("axis", 0)
    if work.opset >= 13:
        sizes = tape.initializer(ir.tensor(np.array(lengths, np.int64)), f"{name}/lengths")
        pieces = tape.op_multi_out("Split", [node.inputs[0], sizes], {"axis": axis}, num_outputs=len(lengths))
    else:
        attributes = {"axis": axis, "split": lengths}
        pieces = tape.op_multi_out("Split", [node.inputs[0]], attributes, num_outputs=len(lengths))
    work.swap(SPLIT.name, [(p.outputs[0], pieces[i]) for p, i in zip(picks, chosen, strict=True)], tape)


def _lengths(node: ir.Node) -> list[int]:
    name, count = node.outputs[0].name, rank(node.inputs[0])
    axis: int = node.attributes.get_int("axis", 0)
    keeps: int = node.attributes.get_int("keepdims", 1)
    size = dim(node.inputs[0], axis if axis >= 0 or count is None else axis + count)
    if len(node.inputs) < 2 or node.inputs[1] is None:
        if not isinstance(size, int) or not keeps:
            raise Declined(f"the pieces of {name} can't be counted, or lose their axis")
        return [1] * size
    given = constant(node.inputs[1])
    if given is None or (given.ndim == 0 and not isinstance(size, int)):
        raise Declined(f"the pieces of {name} can't be counted")
    if given.ndim:
        return [int(g) for g in given]
    assert isinstance(size, int)
    step = int(given)
    return [min(step, size - start) for start in range(0, size, step)]


def at(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """SequenceAt of a sequence that was just put together."""
    made, index = parent(node.inputs[0], "SequenceConstruct"), scalar(node.inputs[1])
    if made is None or index is None or not -len(made.inputs) <= index < len(made.inputs):
        return None
    return made.inputs[int(index)]


def concat(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """ConcatFromSequence of a sequence that was just put together."""
    made = parent(node.inputs[0], "SequenceConstruct")
    if made is None or node.attributes.get_int("new_axis", 0) != 0:
        return None
    return tape.op("Concat", made.inputs, {"axis": node.attributes.get_int("axis", 0)})


SPLIT = Rule("split-sequence", "SplitToSequence whose pieces are picked by number to Split", split)
AT = on("sequence-at", "picking from a sequence just put together", ["SequenceAt"], at)
CONCAT = on("sequence-concat", "joining a sequence just put together", ["ConcatFromSequence"], concat)
