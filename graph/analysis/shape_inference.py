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
from layerline.graph.analysis.ir_queries import constant_tensor, subgraphs
from layerline.graph.analysis.symbolic_shapes import LONGEST, Size, Symbols, is_size, quotient, sizes

Open = tuple[Size | None, ...]
"""A shape with None for what isn't known."""
_LAST = 2**31 - 1
# Written by our export stage and by torch's exporter on nodes that were traced; files from elsewhere have neither.
_TRACED = (SOURCE, TRACED, "pkg.torch.onnx.name_scopes")
_GIVES_UP = (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, RuntimeError, TypeError, ValueError)


Declared = Mapping[str, ir.Shape]


def declared(model: ir.Model) -> Declared:
    """What a model says of its inner values, where its word is good: torch's exporter wrote it from what it traced.

    It knows what no inference can, such as that [:, :seq] of a table of 512 positions has seq of them.
    """
    if not any(key in n.metadata_props for n in model.graph for key in _TRACED):
        return {}
    return {o.name: o.shape for n in model.graph for o in n.outputs if o.name and o.shape is not None}


def infer(model: ir.Model, told: Declared | None = None) -> None:
    """Replaces the shape and type of every inner value by what follows from the model's inputs and constants.

    Afterwards every unknown size has a name of its own, "value#axis", so that equal names always mean equal sizes.

    Args:
        told: shapes to fill in with where nothing follows; see `declared`.
    """
    for value in model.graph.inputs:
        # Sizes of 0 and -1 are how old exporters wrote "any".
        if value.shape is not None:
            value.shape = ir.Shape([None if isinstance(d, int) and d <= 0 else d for d in value.shape])
            _name_sizes(value)
    _infer_graph(model.graph, model, told or {})


def clash(old: ir.Value, new: ir.Value, made: Sequence[ir.Node], model: ir.Model) -> str | None:
    """How the shape of `new`, computed by nodes just made that are still without names, differs from that of `old`.

    A constant of more axes than what it is joined with widens the result: a rule that leaves it out would change the
    shape. None where the two agree as far as both are known. The nodes are left as they were.
    """
    outputs = [o for n in made for o in n.outputs]
    were = [(o, o.name, o.shape, o.type) for o in outputs]
    known = Symbols()
    for count, output in enumerate(outputs):
        output.name = f"made {count}"
    for node in made:
        _infer_one(node, model, known, {})
    a, b = sizes(old), sizes(new)
    for output, name, shape, kind in were:
        output.name, output.shape, output.type = name, shape, kind
    if a is None or b is None or (len(a) == len(b) and not any(map(_differ, a, b))):
        return None
    return f"{old.name} has shape {list(a)}, what would replace it {list(b)}"


def _differ(a: Size, b: Size) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _infer_graph(graph: ir.Graph, model: ir.Model, told: Declared) -> None:
    for value in graph.initializers.values():
        assert value.const_value is not None
        value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
    known = Symbols()
    for node in graph:
        bodies = subgraphs(node)
        if bodies:
            loop_shapes.infer_bodies(node, partial(_infer_graph, model=model, told={}))
        _infer_one(node, model, known, told)


def _infer_one(node: ir.Node, model: ir.Model, known: Symbols, told: Declared) -> None:
    """Shapes and types of a node's outputs; its bodies have theirs already."""
    for output in node.outputs:
        output.shape = None
    bodies = subgraphs(node)
    if bodies:
        _from_bodies(node, bodies)
    else:
        _infer_node(node, model)
    own = _OURS.get(node.op_type) if node.domain == "" else None
    if own is not None and (shape := own(node, known)) is not None:
        if node.op_type in _OVERRULED:
            node.outputs[0].shape = ir.Shape(shape)
        else:
            _refine(node.outputs[0], shape)
    for output in node.outputs:
        if (said := told.get(output.name or "")) is not None:
            _refine(output, tuple(d if isinstance(d, int) else d.value for d in said))
        _name_sizes(output)


def _infer_node(node: ir.Node, model: ir.Model) -> None:
    if node.op_type == "Constant" and node.domain == "":
        tensor = constant_tensor(node)
        if tensor is not None:
            node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
            return
    given = [v for v in node.inputs if v is not None]
    types = {v.name or "": _type(v) for v in given}
    data = {v.name or "": t for v in given if (t := _small(v)) is not None}
    try:
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports.get(node.domain, 1), node.domain)
        proto = ir.serde.serialize_node(node)
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
    except _GIVES_UP:
        # An operator that onnx doesn't know, or an input of unknown type: nothing is known of its outputs.
        return
    for output in node.outputs:
        if output.name in found and (kind := ir.serde.deserialize_type_proto_for_type(found[output.name])) is not None:
            output.type, output.shape = kind, ir.serde.deserialize_type_proto_for_shape(found[output.name])


def _type(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if value.type is not None:
        proto = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _small(value: ir.Value) -> onnx.TensorProto | None:
    node = value.producer()
    tensor = value.const_value or (constant_tensor(node) if node is not None and node.op_type == "Constant" else None)
    if tensor is None or tensor.size > LONGEST or tensor.dtype == ir.DataType.STRING:
        return None
    return ir.serde.serialize_tensor(tensor)


def _from_bodies(node: ir.Node, bodies: list[ir.Graph]) -> None:
    """If gives what both branches agree on; of loops only the types are taken."""
    if node.op_type != "If":
        return
    for index, output in enumerate(node.outputs):
        ends = [b.outputs[index] for b in bodies]
        output.type = ends[0].type or output.type
        if len({str(e.shape) for e in ends}) == 1 and ends[0].shape is not None and ends[0].shape.is_static():
            output.shape = ends[0].shape.copy()


def _refine(value: ir.Value, shape: Open) -> None:
    old = value.shape
    if old is None:
        value.shape = ir.Shape(shape)
    elif len(old) == len(shape):
        value.shape = ir.Shape([s if _is_open(d) else d for d, s in zip(old, shape, strict=True)])


def _is_open(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is None


def _name_sizes(value: ir.Value) -> None:
    if value.shape is not None and any(_is_open(d) for d in value.shape):
        named = sizes(value)
        assert named is not None
        value.shape = ir.Shape(named)


def _reshape(node: ir.Node, known: Symbols) -> Open | None:
    target, of = known.of(node.inputs[1]), sizes(node.inputs[0])
    if target is None:
        return None
    copy = not node.attributes.get_int("allowzero", 0)
    out: list[Size | None] = []
    for axis, item in enumerate(target):
        if item == 0 and copy:
            out.append(of[axis] if of is not None and axis < len(of) else None)
        else:
            out.append(item if is_size(item) else None)
    if of is not None and out.count(None) == 1 and -1 in target:
        out[out.index(None)] = quotient(of, [x for x in out if x is not None])
    return tuple(out)


def _expand(node: ir.Node, known: Symbols) -> Open | None:
    target, of = known.of(node.inputs[1]), sizes(node.inputs[0])
    if target is None or of is None:
        return None
    length = max(len(target), len(of))
    a, b = ((1,) * (length - len(x)) + x for x in (of, target))
    return tuple(_broadcast(x, y) for x, y in zip(a, b, strict=True))


def _broadcast(a: Size, b: Size) -> Size | None:
    if a == b or b == 1:
        return a
    if a == 1:
        return b if is_size(b) else None
    # A number other than 1 decides; of two names neither is known to be the other's.
    return a if isinstance(a, int) else b if isinstance(b, int) and b > 1 else None


def _constant_of_shape(node: ir.Node, known: Symbols) -> Open | None:
    target = known.of(node.inputs[0])
    return None if target is None else tuple(t if is_size(t) else None for t in target)


def _range(node: ir.Node, known: Symbols) -> Open | None:
    start, end, step = (known.of(v) for v in node.inputs)
    return end if start == (0,) and step == (1,) and end is not None and is_size(end[0]) else None


def _slice(node: ir.Node, known: Symbols) -> Open | None:
    """Axes that are taken whole keep their size, also where it is a name."""
    of = sizes(node.inputs[0])
    if of is None or len(node.inputs) < 3:
        return None
    starts, ends, axes, steps = (known.of(v) for v in (*node.inputs[1:], None, None)[:4])
    if starts is None or ends is None:
        return None
    axes = axes if axes is not None else tuple(range(len(starts)))
    out: list[Size | None] = list(of)
    for axis, start, end, step in zip(axes, starts, ends, steps or (1,) * len(axes), strict=True):
        assert isinstance(axis, int)
        whole = start == 0 and step == 1 and (end == of[axis] or (isinstance(end, int) and end >= _LAST))
        out[axis] = of[axis] if whole else None
    return tuple(out)


def _dft(node: ir.Node, known: Symbols) -> Open | None:
    """The transformed axis has the length's size, or one more than half of it; real and imaginary part come last."""
    of = sizes(node.inputs[0])
    if of is None or len(of) < 2:
        return None
    length = node.inputs[1] if len(node.inputs) > 1 else None
    inverse, onesided = (node.attributes.get_int(name, 0) for name in ("inverse", "onesided"))
    place = _dft_axis(node, known, len(of))
    if place is None or (inverse and onesided):
        return (None,) * len(of)
    size: Size | None = of[place]
    if length is not None:
        told = known.of(length)
        size = told[0] if told is not None and len(told) == 1 and is_size(told[0]) else None
    if onesided:
        size = size // 2 + 1 if isinstance(size, int) else None
    out: list[Size | None] = [*of[:-1], 2]
    out[place] = size
    return tuple(out)


def _dft_axis(node: ir.Node, known: Symbols, rank: int) -> int | None:
    """The axis that a DFT transforms, from the front; None where it is not known."""
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is not None:
        told = known.of(given)
        place = told[0] if told is not None and len(told) == 1 else None
    elif "axis" in node.attributes:
        place = node.attributes.get_int("axis", 1)
    else:
        place = 1 if rank == 3 else None  # 1 up to opset 19, the last but one since: the same of three axes
    return place % rank if isinstance(place, int) and -rank <= place < rank else None


_OURS: dict[str, Callable[[ir.Node, Symbols], Open | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Slice": _slice,
    "DFT": _dft,
}
# onnx's own inference takes the transformed axis to keep its size where the length is no constant.
_OVERRULED = frozenset({"DFT"})
