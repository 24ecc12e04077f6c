"""Shape arithmetic with a known result, Reshapes to computed shapes, and pairs of Reshapes or Transposes.

The content of a shape tensor is followed by name (shape_inference.py), so a Reshape to
[Shape(x)[0], Shape(x)[1], 12, 64] becomes a Reshape to the stored tensor [0, 0, 12, 64] and stays right at every size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, name_of, parent, rank
from layerline.graph.analysis.shape_inference import ShapeSymbols
from layerline.graph.analysis.symbolic_sizes import SymbolicShape, sizes
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import everywhere, on, sole
from layerline.graph.fusion.rules.noop import permutation

_KINDS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


@everywhere("shape-constants")
def fold_shapes(work: Rewriting) -> None:
    """Integer tensors whose every element is a number: the last of a chain first, so that the rest just falls away."""
    for graph in work.graphs():
        symbols = ShapeSymbols()
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
            work.fold("shape-constants", output, ir.tensor(array))


@on("reshape-target", "Reshape")
def target(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape to a computed shape: 0 where a size stays in its place, -1 for the one that remains."""
    if constant(node.inputs[1]) is not None:
        return None
    before = sizes(node.inputs[0])
    after = _requested_shape(node)
    if before is None or after is None:
        raise Declined(f"the shape {name_of(node.inputs[1])} that {node.outputs[0].name} is given is not known")
    return _reshaped(node, node.inputs[0], _target(before, after), after, tape)


def _reshaped(node: ir.Node, data: ir.Value | None, shape: list[int], after: SymbolicShape, tape: Tape) -> ir.Value:
    """A Reshape of `data` to a stored shape in place of `node`."""
    # A stored 0 would copy a size instead of being one.
    if shape.count(-1) > 1 or 0 in after:
        raise Declined(f"shape {list(after)} of {node.outputs[0].name} leaves more than one size open")
    stored = tape.initializer(ir.tensor(np.array(shape, np.int64)), f"{node.outputs[0].name}/shape")
    return tape.op("Reshape", [data, stored])


def _target(before: SymbolicShape, after: SymbolicShape) -> list[int]:
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


def _requested_shape(node: ir.Node) -> SymbolicShape | None:
    """The shape that a Reshape gives, from the tensor that holds it and from what was inferred."""
    requested = ShapeSymbols().of(node.inputs[1])
    inferred = sizes(node.outputs[0])
    if requested is None:
        return inferred
    if inferred is None or len(inferred) != len(requested):
        return requested
    best = list(inferred)
    for axis, size in enumerate(requested):
        # The number, where one of the two has it: a requested 0 or -1 is none.
        if isinstance(size, int) and size not in (0, -1) and not isinstance(inferred[axis], int):
            best[axis] = size
    return tuple(best)


@on("reshape-reshape", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    """Reshape, Flatten, Squeeze or Unsqueeze of one of these: one Reshape, as all keep the order of elements."""
    inner = parent(node.inputs[0], "Reshape", "Flatten", "Squeeze", "Unsqueeze")
    if inner is None:
        return None
    before = sizes(inner.inputs[0])
    after = sizes(node.outputs[0])
    if before is not None and before == after:
        return inner.inputs[0]
    sole(node.inputs[0], node)
    stored_shape: Array | None = constant(node.inputs[1]) if node.op_type == "Reshape" else None
    # Without 0 and -1 the shape means the same whatever it is applied to.
    if stored_shape is not None and (stored_shape > 0).all():
        shape = [int(size) for size in stored_shape]
        after = ()
    elif before is None or after is None or 0 in after:
        raise Declined(f"the shape of {node.outputs[0].name} is not known")
    else:
        shape = _target(before, after)
    return _reshaped(node, inner.inputs[0], shape, after, tape)


@on("transpose-transpose", "Transpose")
def transpose(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    inner = parent(node.inputs[0], "Transpose")
    if inner is None:
        return None
    first = permutation(inner)
    second = permutation(node)
    if first is None or second is None:
        return None
    # Axis i of the result is axis second[i] of the middle value, which is axis first[second[i]] of the input.
    both = [first[axis] for axis in second]
    if both == list(range(len(both))):
        return inner.inputs[0]
    sole(node.inputs[0], node)
    return tape.op("Transpose", [inner.inputs[0]], {"perm": both})
