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

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.light import Model
from layerline.calib.plan import Kept, Role, Wanted
from layerline.graph.analysis.ir_queries import dim, subgraphs
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.io.ir_convert import to_ir
from layerline.graph.quantization.naming import first_output, matching, module_of
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLS = ("AveragePool", "GlobalAveragePool")
OPS = (*WEIGHTED, "Add", "Concat", *POOLS)
_RECURRENT = ("LSTM", "GRU", "RNN")
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu")
# Operators that move numbers without changing them: not worth a line in the list of what stays float.
_MOVES = frozenset(
    "Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Identity Slice Split Gather GatherElements GatherND Pad "  # noqa: SIM905
    "DepthToSpace SpaceToDepth MaxPool GlobalMaxPool Dropout Cast".split()
)
# Inputs of a Concat that share a scale may differ this much in size: the smallest loses three of its eight bits.
_CONCAT_MAX_RATIO = 8.0
# Output channels that share a scale may differ this much in size: the smallest loses two of its eight bits.
_CHANNEL_MAX_RATIO = 4.0
# A float weight with this many elements is listed among what stays float, whatever operator reads it.
_LARGE_WEIGHT = 1024
_FLOAT = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The user's choices, and what calibration says about single values and nodes.

    Attributes:
        ops: operators to quantise, of OPS.
        skip: what stays float: value or node names, module paths (with everything below them), or globs of either.
        per_channel: one scale per output channel of a weight, not one per weight.
        attention: quantise MatMuls of two activations too.
        amax: greatest |x| of activations, where measured. Inputs of a Concat that differ much keep their own scales.
        keep: nodes that stay float, because int8 loses too much there or because the user says so: the reason, by the
            node's first output.
        forced: first outputs of nodes that `skip` does not hold.
    """

    ops: Sequence[str] = OPS
    skip: Sequence[str] = ()
    per_channel: bool = True
    attention: bool = False
    amax: Mapping[str, float] = field(default_factory=dict)
    keep: Mapping[str, str] = field(default_factory=dict)
    forced: Collection[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """The values to quantise, in topological order, and the nodes with weights or a rule that stay float."""

    wanted: tuple[Wanted, ...]
    kept: tuple[Kept, ...]


def place(model: Model, rules: Rules | None = None) -> Placement:
    """Applies the rules to a float model.

    Raises:
        ConfigError: an operator without a rule, or a skip pattern that matches nothing.
        StageError: the model has quantisation nodes already.
    """
    if rules is None:
        rules = Rules()
    check_ops(rules.ops)
    graph = to_ir(model)
    infer_types(graph)
    return _Placing(graph, rules).run()


def products(model: Model) -> list[str]:
    """First outputs of all nodes that multiply matrices, subgraphs included: the nodes that int8 speeds up."""
    multiplying = (*WEIGHTED, *_RECURRENT)
    return [
        first_output(node)
        for node in to_ir(model).graph.all_nodes()
        if node.op_type in multiplying and node.domain == ""
    ]


def check_ops(ops: Sequence[str]) -> None:
    """Refuses operators that have no int8 rule.

    Raises:
        ConfigError: names the first such operator and the nearest one that has a rule.
    """
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        hint = did_you_mean(unknown[0], OPS)
        raise ConfigError(
            f"{unknown[0]!r} has no int8 rule; the operators with one are {', '.join(OPS)}", where="ops", hint=hint
        )


@dataclass
class _Slot:
    """A value to quantise, while its readers are still being collected."""

    role: Role
    axis: int | None
    module: str
    readers: list[tuple[str, int]] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)


class _Placing:
    """One pass over one graph. `run` calls the rules in the order in which they depend on each other."""

    def __init__(self, model: ir.Model, rules: Rules) -> None:
        self.model, self.graph, self.rules = model, model.graph, rules
        self.nodes = list(model.graph)
        self.slots: dict[ir.Value, _Slot] = {}
        self.kept: dict[ir.Node, str] = {}
        skipped = matching(model, rules.skip, field="quantize.skip")
        self.skipped = {node for node in skipped if first_output(node) not in rules.forced}

    def run(self) -> Placement:
        for node in self.nodes:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                raise StageError(
                    "the model already has quantisation nodes", where=first_output(node), hint="use mode: none"
                )
        for node in self._nodes_to_quantize(WEIGHTED):
            self._weighted(node)
        # An Add fuses with a Conv that is quantised, so the layers with weights come first.
        for node in self._nodes_to_quantize(("Add",)):
            self._add(node)
        for node in self._nodes_to_quantize(POOLS):
            if self._is_activation(node.inputs[0]):
                self._want(node, 0, "activation", None, f"input of {node.op_type}")
        # Backwards: a Concat that feeds another Concat is quantised because of the later one.
        for node in reversed(list(self._nodes_to_quantize(("Concat",)))):
            self._concat(node)
        self._share_weights()
        return Placement(tuple(self._wanted()), tuple(self._reasons()))

    def _weighted(self, node: ir.Node) -> None:
        operands = node.inputs[:2]
        constant = [weight_of(v) is not None for v in operands]
        usable = [weight_of(v) is not None or self._is_activation(v) for v in operands]
        if not all(usable):
            self.kept[node] = f"its inputs are not all float16, bfloat16 or float32 ({_dtypes(node)})"
        elif all(constant):
            self.kept[node] = "both inputs are constant"
        elif constant[1]:
            self._weight_on_the_right(node)
        elif node.op_type in ("Conv", "ConvTranspose"):
            self.kept[node] = "its weights are computed, not constant"
        elif constant[0]:
            self._want(node, 1, "activation", None, f"input of {node.op_type}")
            self._want(node, 0, "weight", None, f"weight of {node.op_type}, on its left side")
        elif self.rules.attention:
            for index in (0, 1):
                self._want(node, index, "activation", None, f"input of {node.op_type} with two activations")
        else:
            self.kept[node] = "both inputs are activations (attention: true quantises them)"

    def _weight_on_the_right(self, node: ir.Node) -> None:
        if self.rules.per_channel:
            reason = _uneven_groups(node) or _uneven_stack(node)
            if reason:
                self.kept[node] = reason
                return
        self._want(node, 0, "activation", None, f"input of {node.op_type}")
        self._want(node, 1, "weight", channel_axis(node), f"weight of {node.op_type}{_shared_scales(node)}")

    def _add(self, node: ir.Node) -> None:
        convs = [self._fusing_conv(v) for v in node.inputs]
        inputs = [v for v in node.inputs if v is not None]
        activations = [v for v in inputs if self._is_activation(v)]
        if not any(convs):
            if len(activations) == len(inputs):
                self.kept[node] = "no quantised Conv leads to this Add alone, so it cannot fuse into one"
            elif activations and not any(self._is_quantized_product(v) for v in inputs):
                self.kept[node] = "adds a constant"
        elif any(weight_of(v) is not None for v in inputs):
            self.kept[node] = "adds a constant"
        elif any(self._stays_float(v.producer()) for v in inputs):
            self.kept[node] = "a layer that it adds stays float"
        elif _broadcasts(*inputs):
            self.kept[node] = "broadcasts, so it cannot fuse into the Conv"
        else:
            # Of two Convs the deeper one runs last: it fuses, the other's output is there by then.
            _, fused = max((self._depths[conv], i) for i, conv in enumerate(convs) if conv is not None)
            self._want(node, 1 - fused, "activation", None, "skip input of a residual Add")

    def _stays_float(self, node: ir.Node | None) -> bool:
        return node is not None and first_output(node) in self.rules.keep

    def _concat(self, node: ir.Node) -> None:
        output = node.outputs[0]
        if not self._is_activation(output):
            return  # shape arithmetic
        if output not in self.slots:
            self.kept[node] = "its output is not quantised"
            return
        if not all(self._is_activation(v) for v in node.inputs):
            self.kept[node] = "an input is constant"
            return
        ratio = self._size_ratio(node)
        if ratio > _CONCAT_MAX_RATIO:
            self.kept[node] = f"its inputs differ {ratio:.3g} times in size, so each keeps its own scale"
            return
        for index in range(len(node.inputs)):
            self._want(node, index, "activation", None, "input of a Concat whose output is quantised")
        group = set[str]()
        for value in (*node.inputs, output):
            if value is not None:
                group.add(value.name or "")
                group |= self.slots[value].shared
        for value, slot in self.slots.items():
            if value.name in group:
                slot.shared = group

    def _size_ratio(self, node: ir.Node) -> float:
        """How many times larger the greatest input is than the smallest, among those whose size was measured."""
        amax = [self.rules.amax.get(v.name or "", 0.0) for v in node.inputs if v is not None]
        measured = [a for a in amax if a > 0]
        return max(measured, default=1.0) / min(measured, default=1.0)

    def _want(self, node: ir.Node, index: int, role: Role, axis: int | None, why: str) -> None:
        value = node.inputs[index]
        assert value is not None
        if not self.rules.per_channel:
            axis = None
        slot = self.slots.setdefault(value, _Slot(role, axis, module_of(node)))
        if slot.axis != axis:
            slot.axis = None
            why += ", read along several axes: one scale"
        slot.readers.append((first_output(node), index))
        if why not in slot.why:
            slot.why.append(why)

    def _share_weights(self) -> None:
        """All other readers of a quantised weight read the quantised numbers too, so that no float copy remains."""
        for value, slot in self.slots.items():
            if slot.role != "weight":
                continue
            for use in value.uses():
                reader = (first_output(use.node), use.idx)
                stays = use.node in self.skipped or self._stays_float(use.node)
                folds_away = weight_of(use.node.outputs[0]) is not None
                if not folds_away and not stays and reader not in slot.readers:
                    slot.readers.append(reader)

    def _fusing_conv(self, value: ir.Value | None) -> ir.Node | None:
        """The quantised Conv whose output `value` has this reader alone."""
        if value is None or len(value.uses()) != 1 or value.is_graph_output():
            return None
        node = value.producer()
        if node is None or node.op_type not in ("Conv", "ConvTranspose"):
            return None
        if node.inputs[0] not in self.slots or node in self.kept:
            return None
        return node

    def _is_activation(self, value: ir.Value | None) -> bool:
        return value is not None and weight_of(value) is None and value.dtype in _FLOAT

    def _nodes_to_quantize(self, ops: Sequence[str]) -> Iterator[ir.Node]:
        """The nodes of these operators that may be quantised. Notes the reason for each of the others."""
        for node in self.nodes:
            if node.op_type not in ops or node.domain != "":
                continue
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
        """The length of the longest path from an input to each node, in nodes."""
        depths: dict[ir.Node, int] = {}
        for node in self.nodes:
            longest = 0
            for value in node.inputs:
                producer = value.producer() if value is not None else None
                if producer is not None:
                    longest = max(longest, depths.get(producer, 0))
            depths[node] = longest + 1
        return depths

    def _wanted(self) -> Iterator[Wanted]:
        positions = {value: i for i, value in enumerate(dict.fromkeys(_values(self.graph, self.nodes)))}
        for value, slot in sorted(self.slots.items(), key=lambda item: positions[item[0]]):
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
        quantized = set[str]()
        for slot in self.slots.values():
            quantized.update(reader for reader, _ in slot.readers)
        fused = self._fused(quantized)
        for node in self.nodes:
            reason = self.kept.get(node) or self._lacks_a_rule(node, quantized, fused)
            if reason:
                yield _kept(node, reason)
            for body in subgraphs(node):
                yield from _in_body(node, body)

    def _lacks_a_rule(self, node: ir.Node, quantized: set[str], fused: set[ir.Node]) -> str:
        """Why a node without an int8 rule is listed; empty where it is not worth a line."""
        if first_output(node) in quantized or node.op_type in OPS:
            return ""
        weight = _large_weight(node)
        if weight is not None:
            return f"there is no int8 rule for {node.op_type}, which reads the weight {weight}"
        if node not in fused and self._computes(node):
            return f"there is no int8 rule for {node.op_type}"
        return ""

    def _is_quantized_product(self, value: ir.Value) -> bool:
        """Whether a quantised MatMul or the like computes the value: a constant added to it is its bias."""
        node = value.producer()
        if node is None or node.op_type not in WEIGHTED:
            return False
        return node.inputs[0] in self.slots and node not in self.kept

    def _fused(self, quantized: set[str]) -> set[ir.Node]:
        """Activation functions right after a quantised layer, which compute as part of it."""
        fused = set[ir.Node]()
        for node in self.nodes:
            if node.op_type not in _ACTIVATIONS or not node.inputs or node.inputs[0] is None:
                continue
            producer = node.inputs[0].producer()
            if producer is None:
                continue
            if producer in fused or (first_output(producer) in quantized and producer not in self.kept):
                fused.add(node)
        return fused

    def _computes(self, node: ir.Node) -> bool:
        """Whether the node computes new floating-point numbers from activations, rather than moving them."""
        if node.op_type in OPS or node.op_type in _MOVES:
            return False
        reads = any(self._is_activation(v) for v in node.inputs)
        return reads and any(self._is_activation(v) for v in node.outputs)


def _kept(node: ir.Node, reason: str) -> Kept:
    return Kept(name=first_output(node), op=node.op_type, module=module_of(node), reason=reason)


def _broadcasts(a: ir.Value, b: ir.Value) -> bool:
    """Whether the shapes surely differ. Two symbolic sizes with different names may still be equal."""
    if a.shape is None or b.shape is None:
        return False
    if len(a.shape) != len(b.shape):
        return True
    for axis in range(len(a.shape)):
        size_a, size_b = dim(a, axis), dim(b, axis)
        if (size_a == 1) != (size_b == 1):
            return True
        if isinstance(size_a, int) and isinstance(size_b, int) and size_a != size_b:
            return True
    return False


def _in_body(owner: ir.Node, body: ir.Graph) -> Iterator[Kept]:
    for node in body:
        if node.op_type in WEIGHTED or _large_weight(node) is not None:
            yield _kept(
                node, f"it is inside the body of {owner.op_type} {first_output(owner)}, where ranges are not observed"
            )
        for inner in subgraphs(node):
            yield from _in_body(owner, inner)


def channel_axis(node: ir.Node) -> int | None:
    """The output-channel dimension of the weight, input 1; None where one scale has to do for the whole weight."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        depthwise = _groups(node) > 1 and dim(node.inputs[1], 0) == _groups(node)
        return 0 if depthwise else 1
    if node.op_type == "Gemm":
        transposed = node.attributes.get_int("transB", 0)
        return 0 if transposed else 1
    # onnxruntime's MatMulInteger takes one scale per channel only for weights with two axes. It fails to load others.
    weight = weight_of(node.inputs[1])
    if weight is None or weight.ndim != 2:
        return None
    return 1


def _groups(node: ir.Node) -> int:
    groups: int = node.attributes.get_int("group", 1)
    return groups


def _shared_scales(node: ir.Node) -> str:
    """The remark on a grouped ConvTranspose, whose axis 1 holds one output channel of every group."""
    if node.op_type != "ConvTranspose" or _groups(node) == 1 or channel_axis(node) != 1:
        return ""
    return f", each scale shared by its {_groups(node)} groups"


def _uneven_groups(node: ir.Node) -> str:
    """Why a grouped ConvTranspose stays float: output channels that would share a scale differ too much in size."""
    weight = weight_of(node.inputs[1])
    if not _shared_scales(node) or weight is None or weight.shape[0] % _groups(node):
        return ""
    grouped = np.abs(weight.astype(np.float64)).reshape(_groups(node), -1, *weight.shape[1:])
    greatest = grouped.max(axis=(1, *range(3, grouped.ndim)), initial=0.0)  # (groups, outputs / group)
    ratio = max((_spread(channels) for channels in greatest.T), default=1.0)
    if ratio <= _CHANNEL_MAX_RATIO:
        return ""
    return f"its {_groups(node)} groups would share scales along axis 1, and their channels differ {ratio:.3g} times"


def _uneven_stack(node: ir.Node) -> str:
    """Why a product with a stack of matrices stays float: its channels would share one scale and differ too much."""
    weight = weight_of(node.inputs[1])
    if node.op_type != "MatMul" or weight is None or weight.ndim < 3:
        return ""
    ratio = _spread(np.abs(weight.astype(np.float64)).max(axis=tuple(range(weight.ndim - 1)), initial=0.0))
    if ratio <= _CHANNEL_MAX_RATIO:
        return ""
    scales = f"its weight has {weight.ndim} axes, for which onnxruntime takes one scale"
    return f"{scales}, and its channels differ {ratio:.3g} times"


def _spread(sizes: npt.NDArray[np.float64]) -> float:
    """How many times larger the greatest size is than the smallest above 0; 1 where there is none."""
    used = sizes[sizes > 0]
    return float(used.max() / used.min()) if used.size else 1.0


def _large_weight(node: ir.Node) -> str | None:
    for value in node.inputs:
        array = weight_of(value)
        if value is not None and array is not None and array.ndim > 1 and array.size >= _LARGE_WEIGHT:
            return value.name
    return None


def _values(graph: ir.Graph, nodes: Iterable[ir.Node]) -> Iterator[ir.Value]:
    """Every value, in topological order; values may come several times."""
    yield from graph.inputs
    for node in nodes:
        for value in node.inputs:
            if value is not None:
                yield value
        yield from node.outputs


def _dtypes(node: ir.Node) -> str:
    return ", ".join(str(v.dtype) for v in node.inputs[:2] if v is not None)
