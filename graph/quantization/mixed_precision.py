"""Half precision that keeps its numbers: float16 or bfloat16 where it is safe, float32 where it is not.

Inputs and outputs of the model stay float32 under their names, and so does every inner name: a value X that is half now
is still called X; where a float32 node reads it, it reads X/float32, and the other way round X/float16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from layerline.backends.base import MODULE
from layerline.calib.plan import Kept
from layerline.graph.analysis.ir_queries import FreshNames, constant, copied, first_output
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization.naming import kept_float
from layerline.graph.quantization.precision_choice import float32_nodes, half_slots
from layerline.graph.quantization.weight_sources import drop_unread

TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_FLOAT = ir.DataType.FLOAT

Use = tuple[ir.Node, int]


@dataclass(frozen=True, kw_only=True)
class HalfModel:
    """A converted model."""

    model: ir.Model  # inner values are half where that is safe; inputs and outputs are float32.
    kept: tuple[Kept, ...]  # nodes that stay in float32 for a reason of their own
    nodes: int  # how many nodes compute in half
    # by stored tensor, how many of its numbers became 0 in half, and its size
    vanished: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def to_half(
    model: ir.Model,
    mode: str,
    *,
    amax: Mapping[str, float] | None = None,
    skip: Sequence[str] = (),
    single: Collection[str] = (),
    only: Collection[str] | None = None,
) -> HalfModel:
    """Converts a float32 model; Q/DQ nodes may be in it.

    Args:
        amax: greatest |x| measured, by value name. Nodes that read or make a value beyond half's range stay float32.
        skip: names of values or nodes, module paths, or globs that stay in float32.
        single: first outputs of nodes that stay in float32.
        only: first outputs of the nodes that may become half; all others stay in float32. None: any node.
    """
    half = TYPES[mode]
    work = copied(raise_opset(model, required_opset(model, mode)))
    infer_types(work)
    float32 = float32_nodes(work, half, amax or {}, skip)
    for node in work.graph:
        if first_output(node) in single:
            float32[node] = "layers"
        elif only is not None and first_output(node) not in only:
            float32[node] = ""
    kept: list[Kept] = []
    for node, reason in float32.items():
        if reason:
            kept.append(kept_float(node, reason))
    conversion = _Conversion(work, half, [n for n in work.graph if n not in float32])
    conversion.run()
    # A node none of whose inputs can be half only moves or makes integers.
    computing = sum(1 for slots in conversion.slots.values() if slots)
    return HalfModel(model=work, kept=tuple(kept), nodes=computing, vanished=conversion.vanished)


def required_opset(model: ir.Model, mode: str) -> int:
    """The least opset in which a model can be converted."""
    if mode == "bf16":
        return 22  # convolutions and pools take bfloat16 from opset 22 on
    if any(n.op_type in ("QuantizeLinear", "DequantizeLinear") for n in model.graph):
        return 19  # the scales of Q/DQ may be half from opset 19 on
    return 13


def float_values(model: ir.Model) -> list[str]:
    """Names of the float32 inputs and computed values of the main graph, in topological order."""
    work = copied(model)
    infer_types(work)
    values = [*work.graph.inputs]
    for node in work.graph:
        values.extend(node.outputs)
    # A sequence has the type of its tensors, and no array of its own.
    tensors = [v for v in values if isinstance(v.type, ir.TensorType) and v.dtype == _FLOAT]
    return [v.name or "" for v in tensors if constant(v) is None]


def emulate(model: ir.Model) -> ir.Model:
    """Rewrites a half-precision model for a runtime without half arithmetic.

    Every half value is computed in float32 and then rounded to its type, as hardware with float32 accumulators does.
    The rounded value keeps the name.
    """
    work = copied(model)
    infer_types(work)
    names = FreshNames(work)
    halves = set(TYPES.values())
    # Stored numbers are half already: widening them changes none.
    for tensor in list(work.graph.initializers.values()):
        if tensor.dtype in halves and tensor.const_value is not None:
            tensor.const_value = ir.tensor(tensor.const_value.numpy().astype("float32"), name=tensor.name)
            tensor.dtype = _FLOAT
    # Half inputs are read in float32, as everything between them is.
    position = {node: index for index, node in enumerate(work.graph)}
    for value in work.graph.inputs:
        readers: list[Use] = [(use.node, use.idx) for use in value.uses() if use.node in position]
        if value.dtype in halves and readers:
            cast = _cast(names, value, _FLOAT, names.fresh(f"{value.name}/float32"))
            _rewire(readers, cast.outputs[0])
            min((node for node, _ in readers), key=position.__getitem__).prepend(cast)
    for node in list(work.graph):
        for output in node.outputs:
            if output.dtype in halves:
                _round(work.graph, names, output, output.dtype)
        # What a Cast rounds to is rounded behind it now.
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and ir.DataType(to.as_int()) in halves:
            node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
    return work


def _round(graph: ir.Graph, names: FreshNames, value: ir.Value, half: ir.DataType) -> None:
    producer = value.producer()
    assert producer is not None
    is_output = value.is_graph_output()
    name = value.name or ""
    # exact -> narrow (half) -> the old name (float32).
    value.name = names.fresh(f"{name}/exact")
    value.dtype = _FLOAT
    narrow = _cast(names, value, half, names.fresh(f"{name}/narrow"))
    back = _cast(names, narrow.outputs[0], _FLOAT, name)
    for use in value.uses():
        if use.node is not narrow:
            use.node.replace_input_with(use.idx, back.outputs[0])
    if is_output:
        _replace_output(graph, value, back.outputs[0])
    producer.append([narrow, back])


class _Conversion:
    """Changes the types of values, one by one. Some readers of a value want half, the others float32.

    Attributes:
        slots: by node to convert, the positions of the inputs that it reads as half.
        vanished: by stored tensor, how many of its numbers became 0, and its size.
    """

    def __init__(self, model: ir.Model, half: ir.DataType, nodes: Iterable[ir.Node]) -> None:
        opset = model.opset_imports.get("", 1)
        self.graph = model.graph
        self.half = half
        self.suffix = f"/{half.name.lower()}"
        self.slots = {n: half_slots(n, half, opset)[0] for n in nodes}
        self.names = FreshNames(model)
        self.vanished: dict[str, tuple[int, int]] = {}
        self.position = {n: i for i, n in enumerate(self.graph)}

    def run(self) -> None:
        values = [*self.graph.inputs]
        values += [v for v in self.graph.initializers.values() if not v.is_graph_input()]
        for node in self.graph:
            values.extend(node.outputs)
        for value in values:
            if value.dtype == _FLOAT:
                self._convert(value)

    def _convert(self, value: ir.Value) -> None:
        uses: list[Use] = [(u.node, u.idx) for u in value.uses()]
        # One value may have readers of both kinds; each kind gets it in its own type.
        wants_half = [(node, i) for node, i in uses if i in self.slots.get(node, ())]
        wants_single = [u for u in uses if u not in wants_half]
        producer = value.producer()
        if producer is not None and producer in self.slots:
            self._make_half(value, producer, wants_single)
            return
        if not wants_half:
            return
        array = constant(value)
        # A stored number is rounded here, and takes no Cast at run time.
        if array is not None:
            halved = array.astype(self.half.numpy())
            lost = int(np.count_nonzero(array) - np.count_nonzero(halved))
            if lost:
                self.vanished[value.name or ""] = lost, array.size
            self._store_half(value, ir.tensor(halved), wants_half, keeps_float_readers=bool(wants_single))
            return
        cast = _cast(self.names, value, self.half, self.names.fresh(f"{value.name}{self.suffix}"))
        _rewire(wants_half, cast.outputs[0])
        if producer is not None:
            producer.append(cast)
        else:
            # An input has no node to stand behind.
            first_reader = min((node for node, _ in wants_half), key=lambda n: self.position[n])
            first_reader.prepend(cast)

    def _make_half(self, value: ir.Value, producer: ir.Node, wants_single: Sequence[Use]) -> None:
        """The value becomes half under its name; a Cast serves float32 readers and keeps the model's output float32."""
        value.dtype = self.half
        if not wants_single and not value.is_graph_output():
            return
        name = value.name or ""
        if value.is_graph_output():
            value.name = self.names.fresh(f"{name}{self.suffix}")
            cast = _cast(self.names, value, _FLOAT, name)
            _replace_output(self.graph, value, cast.outputs[0])
        else:
            cast = _cast(self.names, value, _FLOAT, self.names.fresh(f"{name}/float32"))
        _rewire(wants_single, cast.outputs[0])
        producer.append(cast)

    def _store_half(
        self, value: ir.Value, tensor: ir.TensorProtocol, uses: Sequence[Use], *, keeps_float_readers: bool
    ) -> None:
        is_interface = value.is_graph_input() or value.is_graph_output()
        if value.is_initializer() and not keeps_float_readers and not is_interface:
            tensor.name = value.name
            value.const_value = tensor
            value.dtype = self.half
            return
        name = self.names.fresh(f"{value.name}{self.suffix}")
        tensor.name = name
        shape = ir.Shape(tensor.shape.numpy())
        half_copy = ir.Value(name=name, shape=shape, type=ir.TensorType(self.half), const_value=tensor)
        self.graph.register_initializer(half_copy)
        _rewire(uses, half_copy)
        drop_unread(value)


def _rewire(uses: Sequence[Use], value: ir.Value) -> None:
    for node, index in uses:
        node.replace_input_with(index, value)


def _cast(names: FreshNames, value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    producer = value.producer()
    props: dict[str, str] = {}
    if producer is not None and MODULE in producer.metadata_props:
        props[MODULE] = producer.metadata_props[MODULE]
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(to))
    cast = names.fresh(f"{name}/Cast")
    return ir.node("Cast", [value], {"to": int(to)}, outputs=[output], name=cast, metadata_props=props)


def _replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = new
