"""Arithmetic on shapes whose outcome is known before any run, and Reshapes that can say what they mean.

What a shape tensor holds is followed by name (shape_inference.py), so a Reshape to [Shape(x)[0], Shape(x)[1], 12, 64]
becomes a Reshape to the stored tensor [0, 0, 12, 64] and stays right at every size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import constant, name_of, rank
from layerline.graph.analysis.shape_inference import Symbols
from layerline.graph.analysis.symbolic_sizes import Size, Sizes, sizes
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule, on

_KINDS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def fold_shapes(work: Rewriting) -> None:
    """Integer tensors whose every element is a number: the last of a chain first, so that the rest just falls away."""
    for graph in work.graphs():
        symbols = Symbols()
        for node in reversed(list(graph)):
            output = node.outputs[0]
            if node.graph is None or node.op_type == "Constant" or output.dtype not in _KINDS:
                continue
            elements = symbols.of(output)
            # Names are no constants; a tensor of unknown rank can't be written with its shape.
            if elements is None or rank(output) is None or not all(isinstance(e, int) for e in elements):
                continue
            array = np.array(elements, output.dtype.numpy())
            if rank(output) == 0:
                array = array.reshape(())
            work.fold(KNOWN.name, output, ir.tensor(array))


def target(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """Reshape to a computed shape: 0 where a size stays in its place, -1 for the one that remains."""
    if constant(node.inputs[1]) is not None or work.opset < 5:
        return None
    before = sizes(node.inputs[0])
    after = _requested_shape(node)
    if before is None or after is None:
        raise Declined(f"the shape {name_of(node.inputs[1])} that {node.outputs[0].name} is given is not known")
    target_sizes = reshape_target(before, after)
    # A stored 0 would copy a size instead of being one.
    if target_sizes.count(-1) > 1 or 0 in after:
        raise Declined(f"shape {list(after)} of {node.outputs[0].name} leaves more than one size open")
    shape = tape.initializer(ir.tensor(np.array(target_sizes, np.int64)), f"{node.outputs[0].name}/shape")
    return tape.op("Reshape", [node.inputs[0], shape])


def reshape_target(before: Sizes, after: Sizes) -> list[int]:
    """What a Reshape from one shape to the other stores: 0 for a named size that stays in its place, -1 for others."""
    target_sizes: list[int] = []
    for axis, size in enumerate(after):
        # A number is right whatever the input's size.
        if isinstance(size, int):
            target_sizes.append(size)
        elif axis < len(before) and size == before[axis]:
            target_sizes.append(0)
        else:
            target_sizes.append(-1)
    return target_sizes


def _requested_shape(node: ir.Node) -> Sizes | None:
    """The shape that a Reshape gives, from the tensor that holds it and from what was inferred."""
    requested = Symbols().of(node.inputs[1])
    inferred = sizes(node.outputs[0])
    if requested is None:
        return inferred
    if inferred is None or len(inferred) != len(requested):
        return requested
    return tuple(map(_better, requested, inferred))


def _better(requested: Size, inferred: Size) -> Size:
    """The number, where one of the two has it: a requested 0 or -1 is none."""
    if isinstance(requested, int) and requested not in (0, -1) and not isinstance(inferred, int):
        return requested
    return inferred


KNOWN = Rule("shape-constants", "shape arithmetic whose result is the same in every run", fold_shapes)
TARGET = on("reshape-target", "Reshape to a computed shape made a stored one, with 0 and -1", ["Reshape"], target)
