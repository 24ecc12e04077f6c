"""Shape functions of single operators where the library's own claim more than holds in every run, or less than we need.

`onnx-shape-inference` annotates models for people. Here constants are written from what it says, so that its guesses
have to go: it takes two unequal names to be the same size where operands broadcast, a Slice to lie inside of its axis,
an axis of unknown size not to be 1 (Squeeze), and integers never to wrap around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import OpShapeInferenceRegistry, ShapeInferenceContext, check_inputs
from onnx_shape_inference import registry as library

from layerline.graph.analysis.ir_queries import BROADCASTING, constant, dim, optional_input, subgraphs
from layerline.graph.analysis.symbolic_sizes import IrDim, broadcast, is_size

Elements = Sequence[IrDim]
ShapeFunction = Callable[[ShapeInferenceContext, ir.Node], None]

corrected = OpShapeInferenceRegistry()
FOLLOWED = frozenset(
    {"Shape", "Size", "Gather", "Slice", "Concat", "Cast", "Equal", "Where", "ConstantOfShape", "ReduceProd"}
    | {"Add", "Sub", "Mul", "Div", "Identity", "Squeeze", "Unsqueeze", "Reshape"}
)
"""Operators whose integer results are followed element by element."""
_LAST = 2**31 - 1


def _corrects(*operators: str) -> Callable[[ShapeFunction], ShapeFunction]:
    def register(function: ShapeFunction) -> ShapeFunction:
        for name in operators:
            corrected.register("", name)(function)
        return function

    return register


def from_library(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Runs the library's function for a node; of versions before the oldest that it has, that one.

    An invalid or too old form of the node raises there: what is an input now was an attribute then.
    """
    versions = library.version_boundaries(node.domain, node.op_type)
    if versions:
        version = max(ctx.get_opset_version(node.domain), versions[0])
        library.get(node.domain, node.op_type, version=version)(ctx, node)


def _set_open(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Outputs of the rank and type of the first input, of unknown sizes."""
    (data,) = check_inputs(node, "data")
    for output in node.outputs:
        shape = None
        if data.shape is not None:
            shape = ir.Shape([ctx.new_symbolic_dim() for _ in data.shape])
        ctx.set_shape_and_dtype(output, shape, data.dtype)


@_corrects(*BROADCASTING, "Sum", "Mean", "Mod", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
@_corrects("Expand", "PRelu", "StringConcat")
def _broadcasting(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Numpy's rule: shapes are aligned at their last axes, and an axis of size 1 is repeated."""
    from_library(ctx, node)
    shapes: list[Elements] = []
    for index, value in enumerate(node.inputs):
        shape: Elements | None = None
        if node.op_type == "Expand" and index == 1:
            # Expand broadcasts with its shape input, both ways: a 1 in it keeps the size that the data has.
            shape = _requested(ctx, value)
        elif value is not None and value.shape is not None:
            shape = list(value.shape)
        if shape is not None:
            shapes.append(shape)
    if len(shapes) == len(node.inputs):
        # None stands where two names meet: either may be 1 in some run, so the result is of neither name.
        dims = [ctx.new_symbolic_dim() if size is None else size for size in broadcast(shapes)]
        ctx.set_shape(node.outputs[0], ir.Shape(dims))
    else:
        # An operand of unknown rank may have more axes than all others.
        ctx.set_shape(node.outputs[0], None)
    if node.op_type in _ELEMENTWISE:
        ctx.set_symbolic_value(node.outputs[0], _combined(ctx, node))


def _requested(ctx: ShapeInferenceContext, value: ir.Value | None) -> Elements | None:
    """The sizes that a shape tensor asks for: as many as it has elements, where they are not known."""
    elements: Elements | None = ctx.get_symbolic_value(value)
    count = dim(value, 0)
    if elements is None and isinstance(count, int):
        return [ctx.new_symbolic_dim() for _ in range(count)]
    return elements


def _combined(ctx: ShapeInferenceContext, node: ir.Node) -> Elements | None:
    """The elements of an elementwise result; None where an operand's are not known. Operands have one axis at most."""
    operands: list[Elements] = []
    for value in node.inputs:
        elements = ctx.get_symbolic_value(value)
        if elements is None:
            return None
        operands.append(elements)
    count = max(map(len, operands))
    spread: list[Elements] = []
    for elements in operands:
        if len(elements) == 1:
            # A scalar, or one element, is repeated.
            elements = list(elements) * count
        if len(elements) != count:
            return None
        spread.append(elements)
    results: list[IrDim] = []
    for items in zip(*spread, strict=True):
        result = _ELEMENTWISE[node.op_type](*items)
        if result is None:
            # A tensor of truth values is only followed as a whole: as an element "unknown" would be a number.
            if node.op_type in ("Equal", "Where"):
                return None
            result = ctx.new_number()
        results.append(result)
    return results


def _subtract(a: IrDim, b: IrDim) -> IrDim | None:
    """The difference; None where it may be negative: a name stands for a size, and sizes are not."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a == b:
        return 0
    if b == 0:
        return a
    return None


def _divide(a: IrDim, b: IrDim) -> IrDim | None:
    if b == 1:
        return a
    # Runtimes round negative quotients differently; sizes have none.
    if b == 0 or not (is_size(a) and is_size(b)):
        return None
    if isinstance(b, int):
        return a // b
    # SymbolicDim does not divide a number by a name.
    if isinstance(a, int):
        return None
    return a // b


def _combine(combine: Callable[[IrDim, IrDim], IrDim], neutral: int, a: IrDim, b: IrDim) -> IrDim | None:
    if b == neutral:
        return a
    if a == neutral:
        return b
    both_numbers = isinstance(a, int) and isinstance(b, int)
    if both_numbers or (is_size(a) and is_size(b)):
        return combine(a, b)
    return None


def _equal(a: IrDim, b: IrDim) -> int | None:
    """Whether two elements are the same number in every run; None where that depends on the run."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b:
        return 1
    for number, name in ((a, b), (b, a)):
        # Exporters compare a requested shape with -1, to find the axes that Expand shall keep.
        if isinstance(number, int) and number < 0 and is_size(name):
            return 0
    return None


def _select(condition: IrDim, when_true: IrDim, when_false: IrDim) -> IrDim | None:
    # Whatever the condition is.
    if when_true == when_false:
        return when_true
    if not isinstance(condition, int):
        return None
    if condition:
        return when_true
    return when_false


_ELEMENTWISE: dict[str, Callable[..., IrDim | None]] = {
    "Add": partial(_combine, operator.add, 0),
    "Sub": _subtract,
    "Mul": partial(_combine, operator.mul, 1),
    "Div": _divide,
    "Equal": _equal,
    "Where": _select,
}


@_corrects("Concat")
def _concat(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    from_library(ctx, node)
    joined: list[IrDim] | None = []
    for value in node.inputs:
        elements = ctx.get_symbolic_value(value)
        if elements is None:
            # The library would make up sizes for what it does not know; such an element may be -1.
            joined = None
            break
        joined += elements
    ctx.set_symbolic_value(node.outputs[0], joined)


@_corrects("ConstantOfShape")
def _constant_of_shape(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """A tensor of the requested shape, filled with the attribute `value`: one float32 zero where that is left out."""
    from_library(ctx, node)
    shape = _requested(ctx, node.inputs[0])
    if shape is None:
        return
    ctx.set_shape(node.outputs[0], ir.Shape(shape))
    fill = node.attributes.get("value")
    if len(shape) == 1 and isinstance(shape[0], int) and fill is not None and fill.as_tensor().dtype.is_integer():
        # Longer tensors are not followed; the bound keeps a file from asking for a list of any length.
        count = min(shape[0], 1 << 16)
        ctx.set_symbolic_value(node.outputs[0], [int(fill.as_tensor().numpy().item())] * count)


@_corrects("ReduceProd")
def _reduce_prod(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    from_library(ctx, node)
    elements = ctx.get_symbolic_value(node.inputs[0])
    # Since opset 18 the axes are an input; left out, all axes are reduced.
    axes: Elements | None = ()
    if optional_input(node, 1) is not None:
        axes = ctx.get_symbolic_value(node.inputs[1])
    if elements is None or axes is None:
        return
    # With this attribute no axes mean none, instead of all.
    if node.attributes.get_int("noop_with_empty_axes", 0) and not axes:
        ctx.set_symbolic_value(node.outputs[0], elements)
        return
    if all(is_size(element) for element in elements):
        total: IrDim = 1
        for element in elements:
            total = total * element
        # How a long product wraps is the runtime's own business.
        if not isinstance(total, int) or total < 2**31:
            ctx.set_symbolic_value(node.outputs[0], [total])


@_corrects("Slice")
def _slice(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Axes that are taken whole keep their size, also where it is a name; of other names nothing follows."""
    (data,) = check_inputs(node, "data")
    bounds = slice_bounds(ctx, node)
    if bounds is None or data.shape is None:
        _set_open(ctx, node)
        return
    dims = list(data.shape)
    for start, end, axis, step in zip(*bounds, strict=True):
        size = dims[axis]
        if takes_whole(start, end, step, size):
            continue
        if all(isinstance(item, int) for item in (start, end, step, size)):
            # Slice counts negative bounds from the end and clamps what lies outside, as Python's slices do.
            dims[axis] = len(range(*slice(start, end, step).indices(size)))
        else:
            dims[axis] = ctx.new_symbolic_dim()
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), data.dtype)
    elements = ctx.get_symbolic_value(data)
    # The elements of a shape have one axis, so one slice of it.
    numbers = [bound[0] for bound in bounds if len(bound) == 1]
    if elements is not None and len(numbers) == 4 and all(isinstance(number, int) for number in numbers):
        start, end, _, step = numbers
        ctx.set_symbolic_value(node.outputs[0], elements[start:end:step])


def takes_whole(start: IrDim, end: IrDim, step: IrDim, size: IrDim) -> bool:
    """Whether a Slice with these bounds takes all of an axis."""
    if start != 0 or step != 1:
        return False
    if end == size:
        return True
    # Exporters write INT64_MAX or INT32_MAX as the end of a Slice that takes the rest.
    least = size if isinstance(size, int) else _LAST
    return isinstance(end, int) and end >= least


def slice_bounds(ctx: ShapeInferenceContext, node: ir.Node) -> list[Elements] | None:
    """starts, ends, axes and steps; None where one is not known."""
    bounds: list[Elements | None] = []
    for index in range(1, 5):
        value = optional_input(node, index)
        bounds.append(ctx.get_symbolic_value(value))
        if value is not None and bounds[-1] is None:
            return None
    starts, ends, axes, steps = bounds
    if starts is None or ends is None:
        return None
    # Axes that are left out are the first ones, in order; steps that are left out are 1.
    return [starts, ends, axes or range(len(starts)), steps or [1] * len(starts)]


@_corrects("Squeeze")
def _squeeze(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Without axes every axis of size 1 goes: which ones these are is certain only where all sizes are numbers."""
    axes = optional_input(node, 1)
    (data,) = check_inputs(node, "data")
    # An attribute before opset 13, and an input since.
    names_axes = "axes" in node.attributes or (axes is not None and _is_readable(axes))
    takes_all = axes is None and data.shape is not None and data.shape.is_static()
    if names_axes or takes_all:
        from_library(ctx, node)
    else:
        ctx.set_dtype(node.outputs[0], data.dtype)


@_corrects("Split", "Pad")
def _with_stored_amounts(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """The library takes an input that it can't read, the parts or the axes, to be left out."""
    amounts = optional_input(node, {"Split": 1, "Pad": 3}[node.op_type])
    if amounts is None or _is_readable(amounts):
        from_library(ctx, node)
    else:
        _set_open(ctx, node)


def _is_readable(value: ir.Value) -> bool:
    """Whether the library reads what a value holds; it does not look through Identity."""
    return ir.convenience.get_const_tensor(value) is not None


@_corrects("Reshape")
def _reshape(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    from_library(ctx, node)
    # The library forgets it where the rank is not known.
    ctx.set_dtype(node.outputs[0], check_inputs(node, "data")[0].dtype)


@_corrects("Range")
def _range(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    first = check_inputs(node, "start", "limit", "delta")[0]
    start, end, step = (ctx.get_symbolic_value(value) for value in node.inputs)
    # The length is max(ceil((limit - start) / delta), 0): of 0, n and 1 that is n.
    if start == [0] and step == [1] and end is not None and is_size(end[0]):
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(end), first.dtype)
    elif all(constant(value) is not None for value in node.inputs):
        from_library(ctx, node)
    else:
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([ctx.new_symbolic_dim()]), first.dtype)


@_corrects("Resize")
def _resize(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Runtimes multiply by the float32 scale in float32: 10 times 1.3 is 13, although the scale is below 1.3."""
    from_library(ctx, node)
    output = node.outputs[0]
    (data,) = check_inputs(node, "X")
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    keeps_ratio = node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch"
    if output.shape is None or crops or keeps_ratio:
        _set_open(ctx, node)
        return
    # The input `sizes` gives the result outright; the library has read it.
    if optional_input(node, 3) is not None:
        return
    scales = constant(node.inputs[-1])
    if scales is None:
        scales = np.empty(0, np.float32)
    axes = node.attributes.get_ints("axes") or range(len(output.shape))
    if scales.size != len(axes):
        _set_open(ctx, node)
        return
    dims = list(data.shape)
    for axis, scale in zip(axes, scales.astype(np.float32), strict=True):
        if isinstance(dims[axis], int):
            dims[axis] = int(np.float32(dims[axis]) * scale)
        # floor(n * scale) is a multiple of n only for a whole scale.
        elif scale == int(scale):
            dims[axis] *= int(scale)
        else:
            dims[axis] = ctx.new_symbolic_dim()
    ctx.set_shape(output, ir.Shape(dims))


@_corrects("ConvTranspose")
def _conv_transpose(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Without auto_pad: stride * (n - 1) + output_padding + (kernel - 1) * dilation + 1 - pads, the library's own."""
    from_library(ctx, node)
    shape = node.outputs[0].shape
    # With SAME padding onnxruntime's result is not always the stride times the input.
    if shape is not None and node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        pixels = [ctx.new_symbolic_dim() for _ in shape[2:]]
        ctx.set_shape(node.outputs[0], ir.Shape([*shape[:2], *pixels]))


@_corrects("If")
def _branches(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """What all branches agree on. Where the shape of one is not known, the library takes that of the other."""
    from_library(ctx, node)
    for index, output in enumerate(node.outputs):
        if any(body.outputs[index].shape is None for body in subgraphs(node)):
            ctx.set_shape(output, None)


@_corrects("Loop", "Scan", "SequenceMap")
def _turns(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Of loops nothing is taken: what one carries may change its shape, or keep the first in no turn at all."""
