"""Where Q/DQ belongs: TensorRT's rules for explicit quantisation, applied to one graph.

- The inputs of layers with weights are quantised (Conv, ConvTranspose, Gemm, MatMul), never their outputs: the next
  layer's Q sits behind the activation, so that Conv + ReLU can fuse. Biases stay float.
- A residual Add has its skip input quantised, not the one of the Conv that it fuses with.
- A Concat whose output is quantised has all inputs quantised with the output's scale.
- The weight of a ConvTranspose is (inputs, outputs / group, ...): its output channels lie along axis 1, and along
  axis 0 where it is depthwise (a group for each input channel). With other groups no axis holds them all.
- Average pooling may run in int8. MaxPool, Reshape, Transpose and the like need nothing: TensorRT moves Q/DQ past them.

Source: NVIDIA TensorRT documentation, "Working with Quantized Types", Q/DQ layer-placement recommendations.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from layerline.backends.light import Model
from layerline.calib.plan import Kept, Role, Wanted
from layerline.graph.analysis.element_types import infer_types
from layerline.graph.analysis.ir_queries import dim, subgraphs
from layerline.graph.io.ir_convert import to_ir
from layerline.graph.quantization.naming import first_output, matching, module_of
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import ConfigError, StageError

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLS = ("AveragePool", "GlobalAveragePool")
OPS = (*WEIGHTED, "Add", "Concat", *POOLS)
_RECURRENT = ("LSTM", "GRU", "RNN")
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu")
_MOVES = (
    *(
        "Reshape",
        "Flatten",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Tile",
        "Identity",
        "Slice",
        "Split",
        "Gather",
    ),
    *(
        "GatherElements",
        "GatherND",
        "Pad",
        "DepthToSpace",
        "SpaceToDepth",
        "MaxPool",
        "GlobalMaxPool",
        "Dropout",
        "Cast",
    ),
)
_FAR = 8.0  # how far apart inputs of a Concat may be: sharing a scale costs the least of them three of eight bits
_LARGE = 1024  # elements from which a float weight is worth a line in the list of what stays float
_ALIKE = 4.0  # how far apart output channels that share a scale may be: two of eight bits
_FLOAT = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a person can choose.

    Attributes:
        ops: operators to quantise, of OPS.
        skip: what stays float: value or node names, module paths (with everything below them), or globs of either.
        per_channel: one scale per output channel of a weight, not one per weight.
        attention: quantise MatMuls of two activations too.
        amax: greatest |x| of activations, as far as known: inputs of a Concat that differ much keep their own scales.
        keep: reasons by the first output of nodes that were found to be better off in float.
    """

    ops: Sequence[str] = OPS
    skip: Sequence[str] = ()
    per_channel: bool = True
    attention: bool = False
    amax: Mapping[str, float] = field(default_factory=dict)
    keep: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """What the rules want in int8, in topological order, and what stays float though it has weights or a rule."""

    wanted: tuple[Wanted, ...]
    kept: tuple[Kept, ...]


def place(model: Model, rules: Rules | None = None) -> Placement:
    """Applies the rules to a float model.

    Raises:
        ConfigError: an operator without a rule, or a skip pattern that matches nothing.
        StageError: the model has quantisation nodes already.
    """
    rules = rules or Rules()
    check_ops(rules.ops)
    graph = to_ir(model)
    infer_types(graph)
    return _Placing(graph, rules).run()


def products(model: Model) -> list[str]:
    """The first outputs of all nodes that multiply matrices, in bodies too: what int8 speeds up."""
    graph = to_ir(model).graph
    return [first_output(n) for n in graph.all_nodes() if n.op_type in (*WEIGHTED, *_RECURRENT) and n.domain == ""]


def check_ops(ops: Sequence[str]) -> None:
    """Refuses an operator that no rule is about.

    Raises:
        ConfigError: names the first, and the nearest that there is one for.
    """
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], OPS, 1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"there is no int8 rule for {unknown[0]!r}; there is for {', '.join(OPS)}", where="ops", hint=hint
        )


@dataclass
class _Slot:
    """A wanted value while its readers are still being found."""

    role: Role
    axis: int | None
    module: str
    readers: list[tuple[str, int]] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)


class _Placing:
    """One pass over one graph; the rules are its methods, in the order in which they depend on each other."""

    def __init__(self, model: ir.Model, rules: Rules) -> None:
        self.model, self.graph, self.rules = model, model.graph, rules
        self.nodes = list(model.graph)
        self.slots: dict[ir.Value, _Slot] = {}
        self.kept: dict[ir.Node, str] = {}
        self.skipped = matching(model, rules.skip, field="skip")

    def run(self) -> Placement:
        for node in self.nodes:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                raise StageError("the model is quantised already", where=first_output(node), hint="use mode: none")
        for node in self._of(WEIGHTED):
            self._weighted(node)
        for node in self._of(("Add",)):
            self._add(node)
        for node in self._of(POOLS):
            if self._activation(node.inputs[0]):
                self._want(node, 0, "activation", None, f"input of {node.op_type}")
        for node in reversed(list(self._of(("Concat",)))):
            self._concat(node)
        self._share_weights()
        return Placement(tuple(self._wanted()), tuple(self._reasons()))

    def _weighted(self, node: ir.Node) -> None:
        constants = [weight_of(v) is not None for v in node.inputs[:2]]
        if not all(constants[i] or self._activation(v) for i, v in enumerate(node.inputs[:2])):
            self.kept[node] = f"its inputs are not all float16, bfloat16 or float32 ({_dtypes(node)})"
        elif all(constants):
            self.kept[node] = "both inputs are constant"
        elif constants[1]:
            if self.rules.per_channel and (reason := _uneven_groups(node) or _uneven_stack(node)):
                self.kept[node] = reason
                return
            self._want(node, 0, "activation", None, f"input of {node.op_type}")
            self._want(node, 1, "weight", _channel_axis(node), f"weight of {node.op_type}{_shared_scales(node)}")
        elif node.op_type in ("Conv", "ConvTranspose"):
            self.kept[node] = "its weights are computed, not constant"
        elif constants[0]:
            self._want(node, 1, "activation", None, f"input of {node.op_type}")
            self._want(node, 0, "weight", None, f"weight of {node.op_type}, on its left side")
        elif self.rules.attention:
            for index in (0, 1):
                self._want(node, index, "activation", None, f"input of {node.op_type} with two activations")
        else:
            self.kept[node] = "both inputs are activations (attention: true quantises them)"

    def _add(self, node: ir.Node) -> None:
        convs = [self._fusing_conv(v) for v in node.inputs]
        inputs = [v for v in node.inputs if v is not None]
        if not any(convs):
            if all(self._activation(v) for v in inputs):
                self.kept[node] = "no quantised Conv leads to this Add alone, so it cannot fuse into one"
            elif any(self._activation(v) for v in inputs) and not any(self._product(v) for v in inputs):
                self.kept[node] = "adds a constant"
        elif any(weight_of(v) is not None for v in inputs):
            self.kept[node] = "adds a constant"
        elif any(first_output(n) in self.rules.keep for v in inputs if (n := v.producer()) is not None):
            self.kept[node] = "a layer that it adds stays float"
        elif _broadcasts(*inputs):
            self.kept[node] = "broadcasts, so it cannot fuse into the Conv"
        else:
            # Of two Convs the deeper one runs last: it fuses, the other's output is there by then.
            _, fused = max((self._depths[conv], i) for i, conv in enumerate(convs) if conv is not None)
            self._want(node, 1 - fused, "activation", None, "skip input of a residual Add")

    def _concat(self, node: ir.Node) -> None:
        output = node.outputs[0]
        if not self._activation(output):
            return  # shape arithmetic
        if output not in self.slots:
            self.kept[node] = "its output is not quantised"
        elif not all(self._activation(v) for v in node.inputs):
            self.kept[node] = "an input is constant"
        elif (ratio := self._ratio(node)) > _FAR:
            self.kept[node] = f"its inputs differ {ratio:.3g} times in size, so each keeps its own scale"
        else:
            for index in range(len(node.inputs)):
                self._want(node, index, "activation", None, "input of a Concat whose output is quantised")
            members = [v for v in (*node.inputs, output) if v is not None]
            group = {v.name or "" for v in members}.union(*(self.slots[v].shared for v in members))
            for value in self.slots:
                if value.name in group:
                    self.slots[value].shared = group

    def _ratio(self, node: ir.Node) -> float:
        """How many times larger the greatest input is than the least, as far as their sizes are known."""
        sizes = [self.rules.amax.get(v.name or "", 0.0) for v in node.inputs if v is not None]
        live = [s for s in sizes if s > 0]
        return max(live, default=1.0) / min(live, default=1.0)

    def _want(self, node: ir.Node, index: int, role: Role, axis: int | None, why: str) -> None:
        value = node.inputs[index]
        assert value is not None
        axis = axis if self.rules.per_channel else None
        slot = self.slots.setdefault(value, _Slot(role, axis, module_of(node)))
        if slot.axis != axis:
            slot.axis = None
            why += ", read along several axes: one scale"
        slot.readers.append((first_output(node), index))
        if why not in slot.why:
            slot.why.append(why)

    def _share_weights(self) -> None:
        """Whatever else reads a quantised weight reads the same numbers, and no float copy stays behind."""
        for value, slot in self.slots.items():
            for use in value.uses():
                reader = (first_output(use.node), use.idx)
                constant = weight_of(use.node.outputs[0]) is not None
                if slot.role == "weight" and not constant and use.node not in self.skipped:
                    slot.readers += [reader] if reader not in slot.readers else []

    def _fusing_conv(self, value: ir.Value | None) -> ir.Node | None:
        """The quantised Conv that computes `value` for this reader alone."""
        node = value.producer() if value is not None else None
        if value is None or node is None or node.op_type not in ("Conv", "ConvTranspose"):
            return None
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        return node if alone and node.inputs[0] in self.slots and node not in self.kept else None

    def _activation(self, value: ir.Value | None) -> bool:
        return value is not None and weight_of(value) is None and value.dtype in _FLOAT

    def _of(self, ops: Sequence[str]) -> Iterator[ir.Node]:
        """The nodes of these operators that may be quantised; the others get their reason."""
        for node in self.nodes:
            if node.op_type in ops and node.domain == "":
                if node in self.skipped:
                    self.kept[node] = "skip"
                elif first_output(node) in self.rules.keep:
                    self.kept[node] = self.rules.keep[first_output(node)]
                elif node.op_type not in self.rules.ops:
                    self.kept[node] = f"ops leaves {node.op_type} out"
                else:
                    yield node

    @functools.cached_property
    def _depths(self) -> dict[ir.Node, int]:
        """The longest way from an input to each node, in nodes."""
        depth: dict[ir.Node, int] = {}
        for node in self.nodes:
            before = (v.producer() for v in node.inputs if v is not None)
            depth[node] = 1 + max((depth.get(n, 0) for n in before if n is not None), default=0)
        return depth

    def _wanted(self) -> Iterator[Wanted]:
        order = {v: i for i, v in enumerate(dict.fromkeys(_values(self.graph, self.nodes)))}
        for value, slot in sorted(self.slots.items(), key=lambda item: order[item[0]]):
            yield Wanted(
                name=value.name or "",
                role=slot.role,
                module=slot.module,
                axis=slot.axis,
                shared=tuple(sorted(slot.shared - {value.name or ""})),
                readers=tuple(slot.readers),
                why="; ".join(slot.why),
            )

    def _reasons(self) -> Iterator[Kept]:
        done = {reader for slot in self.slots.values() for reader, _ in slot.readers}
        fused = self._fused(done)
        for node in self.nodes:
            name, module = first_output(node), module_of(node)
            if node in self.kept:
                yield Kept(name=name, op=node.op_type, module=module, reason=self.kept[node])
            elif name not in done and node.op_type not in OPS and (large := _large_weight(node)) is not None:
                reason = f"there is no int8 rule for {node.op_type}, which reads the weight {large}"
                yield Kept(name=name, op=node.op_type, module=module, reason=reason)
            elif name not in done and node not in fused and self._computes(node):
                reason = f"there is no int8 rule for {node.op_type}"
                yield Kept(name=name, op=node.op_type, module=module, reason=reason)
            for body in subgraphs(node):
                yield from _in_body(node, body)

    def _product(self, value: ir.Value) -> bool:
        """Whether a quantised MatMul or the like computes it: a constant that is added there is its bias."""
        node = value.producer()
        return node is not None and node.op_type in WEIGHTED and node.inputs[0] in self.slots and node not in self.kept

    def _fused(self, done: set[str]) -> set[ir.Node]:
        """Activations right behind a quantised layer, which compute as part of it."""
        fused = set[ir.Node]()
        for node in self.nodes:
            before = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            if node.op_type not in _ACTIVATIONS or before is None:
                continue
            if before in fused or (first_output(before) in done and before not in self.kept):
                fused.add(node)
        return fused

    def _computes(self, node: ir.Node) -> bool:
        """Whether it makes new floating-point numbers of activations, and does not only move them."""
        return (
            node.op_type not in (*OPS, *_MOVES)
            and any(self._activation(v) for v in node.inputs)
            and any(self._activation(v) for v in node.outputs)
        )


def _broadcasts(a: ir.Value, b: ir.Value) -> bool:
    """Whether the shapes surely differ. Two unknown sizes of one axis may have other names and still be equal."""
    if a.shape is None or b.shape is None:
        return False
    pairs = [(dim(a, i), dim(b, i)) for i in range(len(a.shape))]
    return len(a.shape) != len(b.shape) or any(
        (x == 1) != (y == 1) or (isinstance(x, int) and isinstance(y, int) and x != y) for x, y in pairs
    )


def _in_body(owner: ir.Node, body: ir.Graph) -> Iterator[Kept]:
    for node in body:
        if node.op_type in WEIGHTED or _large_weight(node) is not None:
            reason = f"it is inside the body of {owner.op_type} {first_output(owner)}, where ranges are not observed"
            yield Kept(name=first_output(node), op=node.op_type, module=module_of(node), reason=reason)
        for inner in subgraphs(node):
            yield from _in_body(owner, inner)


def _channel_axis(node: ir.Node) -> int | None:
    """The output-channel dimension of the weight, input 1."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 0 if _groups(node) > 1 and dim(node.inputs[1], 0) == _groups(node) else 1
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    array = weight_of(node.inputs[1])
    # onnxruntime's integer products take scales a channel of two axes only, and fail to load any others.
    return 1 if array is not None and array.ndim == 2 else None


def _groups(node: ir.Node) -> int:
    groups: int = node.attributes.get_int("group", 1)
    return groups


def _shared_scales(node: ir.Node) -> str:
    """What to say of a grouped ConvTranspose, whose axis 1 holds one output channel of every group."""
    shared = node.op_type == "ConvTranspose" and _groups(node) > 1 and _channel_axis(node) == 1
    return f", each scale shared by its {_groups(node)} groups" if shared else ""


def _uneven_groups(node: ir.Node) -> str:
    """Why a grouped ConvTranspose stays float: output channels that would share a scale differ too much in size."""
    weight = weight_of(node.inputs[1])
    if not _shared_scales(node) or weight is None or weight.shape[0] % _groups(node):
        return ""
    grouped = np.abs(weight.astype(np.float64)).reshape(_groups(node), -1, *weight.shape[1:])
    greatest = grouped.max(axis=(1, *range(3, grouped.ndim)), initial=0.0)  # (groups, outputs / group)
    least = np.where(greatest > 0, greatest, np.inf).min(axis=0)
    ratio = float((greatest.max(axis=0) / least).max(initial=1.0))
    if ratio <= _ALIKE:
        return ""
    return f"its {_groups(node)} groups would share scales along axis 1, and their channels differ {ratio:.3g} times"


def _uneven_stack(node: ir.Node) -> str:
    """Why a product with a stack of matrices stays float: its channels would share one scale and differ too much."""
    weight = weight_of(node.inputs[1])
    if node.op_type != "MatMul" or weight is None or weight.ndim < 3:
        return ""
    greatest = np.abs(weight.astype(np.float64)).max(axis=tuple(range(weight.ndim - 1)), initial=0.0)
    there = greatest[greatest > 0]
    ratio = float(there.max(initial=0.0) / there.min(initial=np.inf)) if there.size else 1.0
    if ratio <= _ALIKE:
        return ""
    return (
        f"its weight has {weight.ndim} axes, for which onnxruntime takes one scale, and its channels differ "
        f"{ratio:.3g} times"
    )


def _large_weight(node: ir.Node) -> str | None:
    for value in node.inputs:
        array = weight_of(value)
        if value is not None and array is not None and array.ndim > 1 and array.size >= _LARGE:
            return value.name
    return None


def _values(graph: ir.Graph, nodes: Iterable[ir.Node]) -> Iterator[ir.Value]:
    """Every value in the order in which a reader of the graph meets it first."""
    yield from graph.inputs
    for node in nodes:
        yield from (v for v in node.inputs if v is not None)
        yield from node.outputs


def _dtypes(node: ir.Node) -> str:
    return ", ".join(str(v.dtype) for v in node.inputs[:2] if v is not None)
