"""Ifs with a constant condition, and sequences that are only taken apart again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, dim, optional_input, scalar
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import each


@each("constant-branch", "If")
def branch(node: ir.Node, work: Rewriting) -> None:
    """If whose condition is a constant: the branch that is always taken moves out, the other goes."""
    condition = constant(node.inputs[0])
    if condition is None or condition.size != 1:
        return
    branch_name = "then_branch" if condition.item() else "else_branch"
    body = node.attributes[branch_name].as_graph()
    ends = list(body.outputs)
    for old, end in zip(node.outputs, ends, strict=True):
        producer = end.producer()
        is_computed = producer is not None and producer.graph is body
        if not is_computed or ends.count(end) > 1:
            raise Declined(f"branch output {end.name} of If {old.name} is not computed in the branch, or given twice")
    if node.outputs and not work.permits("constant-branch", node.outputs[0]):
        return
    nodes = list(body)
    initializers = list(body.initializers.values())
    # A node can't move while its graph still holds on to it.
    body.outputs.clear()
    body.initializers.clear()
    body.remove(nodes)
    work.release(nodes, initializers)
    work.swap("constant-branch", list(zip(node.outputs, ends, strict=True)), nodes, initializers)


@each("split-sequence", "SplitToSequence")
def split(node: ir.Node, work: Rewriting) -> None:
    """SplitToSequence whose pieces are each picked by number: one Split."""
    name = node.outputs[0].name
    lengths = _lengths(node)
    picks = node.outputs[0].consumers()
    chosen: list[int] = []
    for pick in picks:
        index: float | None = None
        if pick.op_type == "SequenceAt" and not node.outputs[0].is_graph_output():
            index = scalar(pick.inputs[1])
        if index is None:
            raise Declined(f"sequence {name} is used other than by picking fixed pieces")
        if pick.graph is not node.graph:
            raise Declined(f"piece {pick.outputs[0].name} of sequence {name} is picked in the body of another node")
        if -len(lengths) <= index < len(lengths):
            chosen.append(int(index) % len(lengths))
    # A Split gives each piece once, under one name.
    if not picks or len(set(chosen)) < len(picks):
        raise Declined(f"the {len(picks)} pieces picked of sequence {name} are not different ones of {len(lengths)}")
    tape = Tape()
    inputs = [node.inputs[0]]
    attributes: dict[str, int | list[int]] = {"axis": node.attributes.get_int("axis", 0)}
    # From opset 13 on the sizes are an input.
    if work.opset >= 13:
        inputs.append(tape.initializer(ir.tensor(np.array(lengths, np.int64)), f"{name}/lengths"))
    else:
        attributes["split"] = lengths
    pieces = tape.op_multi_out("Split", inputs, attributes, num_outputs=len(lengths))
    pairs = [(pick.outputs[0], pieces[index]) for pick, index in zip(picks, chosen, strict=True)]
    work.swap("split-sequence", pairs, tape.nodes, tape.initializers)


def _lengths(node: ir.Node) -> list[int]:
    """The size of every piece along the axis that is split."""
    name = node.outputs[0].name
    size = dim(node.inputs[0], node.attributes.get_int("axis", 0))
    step = 1
    if optional_input(node, 1) is None:
        # keepdims counts only where the pieces have no lengths of their own.
        if not isinstance(size, int) or not node.attributes.get_int("keepdims", 1):
            raise Declined(f"the pieces of {name} can't be counted, or lose their axis")
    else:
        lengths = constant(node.inputs[1])
        if lengths is not None and lengths.ndim:
            return [int(length) for length in lengths]
        if lengths is None or not isinstance(size, int):
            raise Declined(f"the pieces of {name} can't be counted")
        step = int(lengths)
    # The last piece is what is left over.
    return [min(step, size - start) for start in range(0, size, step)]
