"""Arithmetic on shapes whose outcome is known before any run, and Reshapes that can say what they mean.

What a shape tensor holds is followed by name (symbolic_shapes.py), so a Reshape to [Shape(x)[0], Shape(x)[1], 12, 64]
becomes a Reshape to the stored tensor [0, 0, 12, 64] and stays right at every size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, rank
from layerline.graph.analysis.size_algebra import Size, Sizes, sizes
from layerline.graph.analysis.symbolic_shapes import Symbols
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule, on

_KINDS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def known(work: Rewriting) -> None:
    """Integer tensors whose every element is a number: the last of a chain first, so that the rest just falls away."""
    for graph in work.graphs():
        symbols = Symbols()
        for node in reversed(list(graph)):
            output = node.outputs[0]
            if node.graph is None or node.op_type == "Constant" or output.dtype not in _KINDS:
                continue
            elements = symbols.of(output)
            if elements is not None and rank(output) is not None and all(isinstance(e, int) for e in elements):
                array = np.array(elements, output.dtype.numpy()).reshape(() if rank(output) == 0 else -1)
                work.fold(KNOWN.name, output, ir.tensor(array))


def target(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """Reshape to a computed shape: 0 where a size stays in its place, -1 for the one that remains."""
    if constant(node.inputs[1]) is not None or work.opset < 5:
        return None
    of, wanted = sizes(node.inputs[0]), _wanted(node)
    if of is None or wanted is None:
        raise Declined(f"the shape {_name(node.inputs[1])} that {node.outputs[0].name} is given is not known")
    out: list[int] = []
    for axis, item in enumerate(wanted):
        if isinstance(item, int):
            out.append(item)
        elif axis < len(of) and item == of[axis]:
            out.append(0)
        else:
            out.append(-1)
    if out.count(-1) > 1 or any(w == 0 for w in wanted):
        raise Declined(f"shape {list(wanted)} of {node.outputs[0].name} leaves more than one size open")
    shape = tape.initializer(ir.tensor(np.array(out, np.int64)), f"{node.outputs[0].name}/shape")
    return tape.op("Reshape", [node.inputs[0], shape])


def _wanted(node: ir.Node) -> Sizes | None:
    """The shape asked for, as known from the tensor that asks or from what follows from it."""
    asked, result = Symbols().of(node.inputs[1]), sizes(node.outputs[0])
    if asked is None:
        return result
    if result is None or len(result) != len(asked):
        return asked
    return tuple(_better(a, r) for a, r in zip(asked, result, strict=True))


def _better(asked: Size, result: Size) -> Size:
    return result if isinstance(result, int) or asked in (0, -1) or not isinstance(asked, int) else asked


def _name(value: ir.Value | None) -> str | None:
    return value.name if value is not None else None


KNOWN = Rule("shape-constants", "shape arithmetic whose result is the same in every run", known)
TARGET = on("reshape-target", "Reshape to a computed shape made a stored one, with 0 and -1", ["Reshape"], target)
