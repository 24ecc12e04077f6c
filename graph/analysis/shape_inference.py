"""Shapes worked out from the inputs alone: what a foreign file says about its inner values is not believed.

A runtime enforces the static sizes of inputs, so those may be built on. Declared shapes of inner values are hints that
no runtime checks, and rules that fold shape arithmetic would turn a wrong hint into wrong numbers.

onnx's own inference is asked node by node, because it forgets what shape tensors hold by name (a Reshape to
[batch, seq, 12, 64]) and makes up new names for the same unknown size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx
import onnx_ir as ir

from layerline.backends.base import SOURCE, TRACED
from layerline.graph.analysis import loop_shapes
from layerline.graph.analysis.ir_queries import constant_tensor, optional_input, subgraphs
from layerline.graph.analysis.size_algebra import Size, is_size, quotient, sizes
from layerline.graph.analysis.symbolic_shapes import LONGEST, Symbols

PartialShape = tuple[Size | None, ...]
"""A shape with None for what isn't known."""
DeclaredShapes = Mapping[str, ir.Shape]
# Exporters write INT64_MAX or INT32_MAX as the end of a Slice that takes the rest.
_LAST = 2**31 - 1
# Written by our export stage and by torch's exporter on nodes that were traced; files from elsewhere have neither.
_TRACED = (SOURCE, TRACED, "pkg.torch.onnx.name_scopes")
_ONNX_ERRORS = (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, RuntimeError, TypeError, ValueError)


def declared(model: ir.Model) -> DeclaredShapes:
    """The shapes a model declares for its inner values, where torch's exporter wrote them from what it traced.

    It knows what no inference can, such as that [:, :seq] of a table of 512 positions has seq of them. Files from
    elsewhere declare nothing that may be built on.
    """
    if not any(_is_traced(node) for node in model.graph):
        return {}
    shapes: dict[str, ir.Shape] = {}
    for node in model.graph:
        for output in node.outputs:
            if output.name and output.shape is not None:
                shapes[output.name] = output.shape
    return shapes


def _is_traced(node: ir.Node) -> bool:
    return any(key in node.metadata_props for key in _TRACED)


def infer(model: ir.Model, declared_shapes: DeclaredShapes | None = None) -> None:
    """Replaces the shape and type of every inner value by what follows from the model's inputs and constants.

    Afterwards every unknown size has a name of its own, "value#axis", so that equal names always mean equal sizes.

    Args:
        declared_shapes: shapes to fill in with where nothing follows; see `declared`.
    """
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([_input_size(dim) for dim in value.shape])
            _name_sizes(value)
    _infer_graph(model.graph, model, declared_shapes or {})


def _input_size(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    # Sizes of 0 and -1 are how old exporters wrote "any".
    if isinstance(dim, int) and dim <= 0:
        return None
    return dim


def clash(old: ir.Value, new: ir.Value, made: Sequence[ir.Node], model: ir.Model) -> str | None:
    """How the shape of `new`, computed by nodes just made that are still without names, differs from that of `old`.

    A constant of more axes than what it is joined with widens the result: a rule that leaves it out would change the
    shape. None where the two agree as far as both are known. The nodes are left as they were.
    """
    outputs = [output for node in made for output in node.outputs]
    before = [(output.name, output.shape, output.type) for output in outputs]
    symbols = Symbols()
    # onnx's inference joins inputs and outputs by name.
    for count, output in enumerate(outputs):
        output.name = f"made {count}"
    for node in made:
        _infer_one(node, model, symbols, {})
    old_shape = sizes(old)
    new_shape = sizes(new)
    for output, (name, shape, kind) in zip(outputs, before, strict=True):
        output.name = name
        output.shape = shape
        output.type = kind
    if old_shape is None or new_shape is None:
        return None
    if len(old_shape) == len(new_shape) and not any(map(_differ, old_shape, new_shape)):
        return None
    return f"{old.name} has shape {list(old_shape)}, what would replace it {list(new_shape)}"


def _differ(a: Size, b: Size) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _infer_graph(graph: ir.Graph, model: ir.Model, declared_shapes: DeclaredShapes) -> None:
    for value in graph.initializers.values():
        assert value.const_value is not None
        value.shape = ir.Shape(value.const_value.shape.numpy())
        value.dtype = value.const_value.dtype
    symbols = Symbols()
    for node in graph:
        if subgraphs(node):
            loop_shapes.infer_bodies(node, partial(_infer_graph, model=model, declared_shapes={}))
        _infer_one(node, model, symbols, declared_shapes)


def _infer_one(node: ir.Node, model: ir.Model, symbols: Symbols, declared_shapes: DeclaredShapes) -> None:
    """Shapes and types of a node's outputs; its bodies have theirs already."""
    for output in node.outputs:
        output.shape = None
    bodies = subgraphs(node)
    if bodies:
        _infer_from_bodies(node, bodies)
    else:
        _infer_by_onnx(node, model)
    if node.domain == "" and node.op_type in _BY_NAME:
        shape = _BY_NAME[node.op_type](node, symbols)
        if shape is not None:
            if node.op_type in _OVERRULED:
                node.outputs[0].shape = None
            _refine(node.outputs[0], shape)
    for output in node.outputs:
        declared_shape = declared_shapes.get(output.name or "")
        if declared_shape is not None:
            _refine(output, _dims(declared_shape))
        _name_sizes(output)


def _infer_by_onnx(node: ir.Node, model: ir.Model) -> None:
    if node.op_type == "Constant" and node.domain == "":
        tensor = constant_tensor(node)
        if tensor is not None:
            node.outputs[0].shape = ir.Shape(tensor.shape.numpy())
            node.outputs[0].dtype = tensor.dtype
            return
    types: dict[str, onnx.TypeProto] = {}
    tensors: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None:
            continue
        types[value.name or ""] = _type(value)
        shape_tensor = _small_tensor(value)
        if shape_tensor is not None:
            tensors[value.name or ""] = shape_tensor
    try:
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports.get(node.domain, 1), node.domain)
        proto = ir.serde.serialize_node(node)
        inferred = onnx.shape_inference.infer_node_outputs(schema, proto, types, tensors)
    except _ONNX_ERRORS:
        # An operator that onnx doesn't know, or an input of unknown type: nothing is known of its outputs.
        return
    for output in node.outputs:
        if output.name in inferred:
            kind = ir.serde.deserialize_type_proto_for_type(inferred[output.name])
            if kind is not None:
                output.type = kind
                output.shape = ir.serde.deserialize_type_proto_for_shape(inferred[output.name])


def _type(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if value.type is not None:
        proto = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _small_tensor(value: ir.Value) -> onnx.TensorProto | None:
    """What inference may have to read: axes, sizes and the like, and no weights."""
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant":
        tensor = constant_tensor(producer)
    if tensor is None or tensor.size > LONGEST or tensor.dtype == ir.DataType.STRING:
        return None
    return ir.serde.serialize_tensor(tensor)


def _infer_from_bodies(node: ir.Node, bodies: list[ir.Graph]) -> None:
    """If gives what both branches agree on; of loops nothing is taken."""
    if node.op_type != "If":
        return
    for index, output in enumerate(node.outputs):
        ends = [body.outputs[index] for body in bodies]
        output.type = ends[0].type or output.type
        shape = ends[0].shape
        # A name in a branch means something in that branch alone, so only numbers are taken.
        if shape is not None and shape.is_static() and all(str(end.shape) == str(shape) for end in ends):
            output.shape = shape.copy()


def _dims(shape: ir.Shape) -> PartialShape:
    dims: list[Size | None] = []
    for dim in shape:
        if isinstance(dim, int):
            dims.append(dim)
        else:
            dims.append(dim.value)
    return tuple(dims)


def _refine(value: ir.Value, shape: PartialShape) -> None:
    """Fills in the sizes that are not known yet."""
    old = value.shape
    if old is None:
        value.shape = ir.Shape(shape)
    elif len(old) == len(shape):
        dims: list[Size | None] = []
        for known_size, size in zip(_dims(old), shape, strict=True):
            if known_size is None:
                dims.append(size)
            else:
                dims.append(known_size)
        value.shape = ir.Shape(dims)


def _name_sizes(value: ir.Value) -> None:
    if value.shape is not None and None in _dims(value.shape):
        named = sizes(value)
        assert named is not None
        value.shape = ir.Shape(named)


def _only_size(elements: Sequence[Size] | None) -> Size | None:
    """The one element of a tensor that holds a size; None where it may be negative."""
    if elements is None or len(elements) != 1 or not is_size(elements[0]):
        return None
    return elements[0]


def _reshape(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    target = symbols.of(node.inputs[1])
    shape = sizes(node.inputs[0])
    if target is None:
        return None
    zero_copies = not node.attributes.get_int("allowzero", 0)
    result: list[Size | None] = []
    for axis, item in enumerate(target):
        if item == 0 and zero_copies:
            if shape is not None and axis < len(shape):
                result.append(shape[axis])
            else:
                result.append(None)
        elif is_size(item):
            result.append(item)
        else:
            result.append(None)
    if shape is not None and -1 in target and result.count(None) == 1:
        rest = [size for size in result if size is not None]
        result[result.index(None)] = quotient(shape, rest)
    return tuple(result)


def _expand(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    target = symbols.of(node.inputs[1])
    shape = sizes(node.inputs[0])
    if target is None or shape is None:
        return None
    length = max(len(target), len(shape))
    aligned_shape = (1,) * (length - len(shape)) + shape
    aligned_target = (1,) * (length - len(target)) + target
    return tuple(map(_broadcast, aligned_shape, aligned_target))


def _broadcast(a: Size, b: Size) -> Size | None:
    if a == b or b == 1:
        return a
    if a == 1:
        if is_size(b):
            return b
        return None
    # A number other than 1 decides; of two names neither is known to be the other's.
    if isinstance(a, int):
        return a
    if isinstance(b, int) and b > 1:
        return b
    return None


def _constant_of_shape(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    target = symbols.of(node.inputs[0])
    if target is None:
        return None
    return tuple(_only_size([item]) for item in target)


def _range(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    start, end, step = (symbols.of(value) for value in node.inputs)
    if start != (0,) or step != (1,):
        return None
    if end is None or not is_size(end[0]):
        return None
    return end


def _slice(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    """Axes that are taken whole keep their size, also where it is a name."""
    shape = sizes(node.inputs[0])
    if shape is None or len(node.inputs) < 3:
        return None
    starts, ends, axes, steps = (symbols.of(optional_input(node, index)) for index in range(1, 5))
    if starts is None or ends is None:
        return None
    if axes is None:
        axes = tuple(range(len(starts)))
    result: list[Size | None] = list(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps or (1,) * len(axes), strict=True):
        assert isinstance(axis, int)
        reaches_end = end == shape[axis] or (isinstance(end, int) and end >= _LAST)
        if start != 0 or step != 1 or not reaches_end:
            result[axis] = None
    return tuple(result)


def _dft(node: ir.Node, symbols: Symbols) -> PartialShape | None:
    """The transformed axis has the length's size, or one more than half of it; real and imaginary part come last."""
    shape = sizes(node.inputs[0])
    if shape is None or len(shape) < 2:
        return None
    length = optional_input(node, 1)
    inverse: int = node.attributes.get_int("inverse", 0)
    onesided: int = node.attributes.get_int("onesided", 0)
    axis = _dft_axis(node, symbols, len(shape))
    if axis is None or (inverse and onesided):
        return (None,) * len(shape)
    size: Size | None = shape[axis]
    if length is not None:
        size = _only_size(symbols.of(length))
    if onesided:
        if isinstance(size, int):
            size = size // 2 + 1
        else:
            size = None
    result: list[Size | None] = [*shape[:-1], 2]
    result[axis] = size
    return tuple(result)


def _dft_axis(node: ir.Node, symbols: Symbols, rank: int) -> int | None:
    """The axis that a DFT transforms, from the front; None where it is not known."""
    axis: Size | None = None
    value = optional_input(node, 2)
    if value is not None:
        elements = symbols.of(value)
        if elements is not None and len(elements) == 1:
            axis = elements[0]
    elif "axis" in node.attributes:
        axis = node.attributes.get_int("axis", 1)
    elif rank == 3:
        axis = 1  # 1 up to opset 19, the last but one since: the same of three axes
    if isinstance(axis, int) and -rank <= axis < rank:
        return axis % rank
    return None


# onnx's inference reads these operators' shape tensors as numbers alone; here their elements are followed by name.
_BY_NAME: dict[str, Callable[[ir.Node, Symbols], PartialShape | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Slice": _slice,
    "DFT": _dft,
}
# onnx's own inference takes the transformed axis to keep its size where the length is no constant.
_OVERRULED = frozenset({"DFT"})
