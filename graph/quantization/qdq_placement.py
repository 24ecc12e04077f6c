"""Where Q/DQ belongs in one graph, by the rules of a target (`targets.py`). TensorRT's rules are the default:

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

import onnx_ir as ir

from layerline.calib.plan import Kept, Role, Wanted
from layerline.graph.analysis.ir_queries import copied, dim, first_output, rank
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.quantization.channel_axes import channel_axis, shared_scales, summed_axis, uneven
from layerline.graph.quantization.kept_reasons import FUSED, is_activation, listed
from layerline.graph.quantization.naming import matching, module_of
from layerline.graph.quantization.targets import FORMATS, OPS, POOLS, TARGETS, WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.nearest import did_you_mean

_RECURRENT = ("LSTM", "GRU", "RNN")
# Inputs of a Concat that share an integer scale may differ this much in size: the smallest loses three of eight bits.
_CONCAT_MAX_RATIO = 8.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The user's choices, and what calibration says about single values and nodes.

    Attributes:
        target: the runtime that it is for, of TARGETS.
        format: of layers for which `formats` has none, of FORMATS.
        formats: of single layers, by the node's first output.
        int4_block: numbers of an int4 weight that share a scale.
        dynamic: nvfp4 layers read quantised activations too.
        ops: operators to quantise, of OPS.
        skip: what stays float: value or node names, module paths (with everything below them), or globs of either.
        per_channel: one scale per output channel of a weight, not one per weight.
        attention: quantise MatMuls of two activations too.
        amax: greatest |x| of activations, where measured. Inputs of a Concat that differ much keep their own scales.
        keep: nodes that stay float, because int8 loses too much there or because the user says so: the reason, by the
            node's first output.
        forced: first outputs of nodes that `skip` does not hold.
    """

    target: str = "tensorrt"
    format: str = "int8"
    formats: Mapping[str, str] = field(default_factory=dict)
    int4_block: int = FORMATS["int4"].block
    dynamic: bool = False
    ops: Sequence[str] = OPS
    skip: Sequence[str] = ()
    per_channel: bool = True
    attention: bool = False
    amax: Mapping[str, float] = field(default_factory=dict)
    keep: Mapping[str, str] = field(default_factory=dict)
    forced: Collection[str] = frozenset()

    @property
    def opset(self) -> int:
        """The least opset that has the types of all formats."""
        return max(FORMATS[name].opset for name in (self.format, *self.formats.values()))


@dataclass(frozen=True)
class Placement:
    """The values to quantise, in topological order, and the nodes with weights or a rule that stay float."""

    wanted: tuple[Wanted, ...]
    kept: tuple[Kept, ...]

    @property
    def activations(self) -> list[str]:
        """Names of the values whose ranges calibration has to observe."""
        return list(dict.fromkeys(item.name for item in self.wanted if item.role == "activation"))


def place(model: ir.Model, rules: Rules | None = None) -> Placement:
    """Applies the rules to a float model.

    Raises:
        ConfigError: an operator without a rule, or a skip pattern that matches nothing.
        StageError: the model has quantisation nodes already.
    """
    if rules is None:
        rules = Rules()
    check_ops(rules.ops)
    typed = copied(model)
    infer_types(typed)
    return _Placing(typed, rules).run()


def products(model: ir.Model) -> list[str]:
    """First outputs of all nodes that multiply matrices, subgraphs included: the nodes that int8 speeds up."""
    multiplying = (*WEIGHTED, *_RECURRENT)
    return [first_output(node) for node in model.graph.all_nodes() if node.op_type in multiplying and node.domain == ""]


def check_ops(ops: Sequence[str]) -> None:
    """Refuses operators that have no rule.

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
    block: int = 0
    readers: list[tuple[str, int]] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)


class _Placing:
    """One pass over one graph. `run` calls the rules in the order in which they depend on each other."""

    def __init__(self, model: ir.Model, rules: Rules) -> None:
        self.model, self.graph, self.rules = model, model.graph, rules
        self.target = TARGETS[rules.target]
        self.nodes = list(model.graph)
        self.slots: dict[tuple[ir.Value, str, int | None], _Slot] = {}
        self.kept: dict[ir.Node, str] = {}
        # Layers with weights that are quantised.
        self.layers = set[ir.Node]()
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
            if is_activation(node.inputs[0]) and not self._refused(node, self._format(node)):
                self._want_activation(node, 0, self._format(node), f"input of {node.op_type}")
        for node in self.nodes:
            if node.op_type in self.target.outputs and self._reads_int8(node):
                self._output(node)
        # Backwards: a Concat that feeds another Concat is quantised because of the later one.
        for node in reversed(list(self._nodes_to_quantize(("Concat",)))):
            self._concat(node)
        self._share_weights()
        quantized = {reader for slot in self.slots.values() for reader, _ in slot.readers}
        kept = listed(self.nodes, self.kept, quantized, self.target, self.rules.format)
        return Placement(tuple(self._wanted()), tuple(kept))

    def _format(self, node: ir.Node) -> str:
        return self.rules.formats.get(first_output(node), self.rules.format)

    def _refused(self, node: ir.Node, name: str) -> bool:
        """Notes that the target does not take the node in this format, if so."""
        formats = self.target.formats.get(node.op_type, ())
        if name in formats:
            return False
        takes = " and ".join(formats) or "float"
        self.kept[node] = f"{self.rules.target} takes {node.op_type} in {takes}, not in {name}"
        return True

    def _weighted(self, node: ir.Node) -> None:
        operands = node.inputs[:2]
        constant = [weight_of(v) is not None for v in operands]
        usable = [weight_of(v) is not None or is_activation(v) for v in operands]
        name = self._format(node)
        if not all(usable):
            self.kept[node] = f"its inputs are not all float16, bfloat16 or float32 ({_dtypes(node)})"
        elif all(constant):
            self.kept[node] = "both inputs are constant"
        elif self._refused(node, name):
            return
        elif FORMATS[name].block:
            self._in_blocks(node, name)
        elif constant[1]:
            self._weight_on_the_right(node, name)
        elif node.op_type in ("Conv", "ConvTranspose"):
            self.kept[node] = "its weights are computed, not constant"
        elif constant[0]:
            self._want_activation(node, 1, name, f"input of {node.op_type}")
            self._want(node, 0, "weight", FORMATS[name].weight, None, f"weight of {node.op_type}, on its left side")
        elif self.rules.attention:
            for index in (0, 1):
                self._want_activation(node, index, name, f"input of {node.op_type} with two activations")
        else:
            self.kept[node] = "both inputs are activations (attention: true quantises them)"
        if node not in self.kept:
            self.layers.add(node)

    def _weight_on_the_right(self, node: ir.Node, name: str) -> None:
        dtype = FORMATS[name].weight
        # A float type keeps small channels beside large ones.
        if self.rules.per_channel and "int" in dtype:
            reason = uneven(node)
            if reason:
                self.kept[node] = reason
                return
        self._want_activation(node, 0, name, f"input of {node.op_type}")
        axis = channel_axis(node) if self.rules.per_channel else None
        self._want(node, 1, "weight", dtype, axis, f"weight of {node.op_type}{shared_scales(node)}")

    def _in_blocks(self, node: ir.Node, name: str) -> None:
        """A weight in blocks along the axis that is summed; the activation stays float."""
        entry = FORMATS[name]
        block = self.rules.int4_block if name == "int4" else entry.block
        axis, weight = summed_axis(node), weight_of(node.inputs[1])
        if axis is None or weight is None:
            self.kept[node] = f"{name} takes a weight of two axes on the right side of a product"
        elif weight.shape[axis] % block:
            self.kept[node] = f"it sums {weight.shape[axis]} products, no multiple of the {block} of a block"
        else:
            self._want(node, 1, "weight", entry.weight, axis, f"weight of {node.op_type}, in blocks", block)
            # TensorRT's operator takes two or three axes.
            axes = rank(node.inputs[0])
            if self.rules.dynamic and name == "nvfp4" and axes in (2, 3) and not node.attributes.get_int("transA", 0):
                why = f"input of {node.op_type}, in blocks, while running"
                self._want(node, 0, "activation", entry.weight, axes - 1, why, block)

    def _add(self, node: ir.Node) -> None:
        convs = [self._fusing_conv(v) for v in node.inputs]
        inputs = [v for v in node.inputs if v is not None]
        activations = [v for v in inputs if is_activation(v)]
        if not any(convs):
            if len(activations) == len(inputs):
                self.kept[node] = "no quantised Conv leads to this Add alone, so it cannot fuse into one"
            elif activations and not any(v.producer() in self.layers for v in inputs):
                self.kept[node] = "adds a constant"
        elif any(weight_of(v) is not None for v in inputs):
            self.kept[node] = "adds a constant"
        elif any(self._stays_float(v.producer()) for v in inputs):
            self.kept[node] = "a layer that it adds stays float"
        elif _broadcasts(*inputs):
            self.kept[node] = "broadcasts, so it cannot fuse into the Conv"
        else:
            # Of two Convs the deeper one runs last: it fuses, the other's output is there by then.
            _, fused, conv = max((self._depths[conv], i, conv) for i, conv in enumerate(convs) if conv is not None)
            if not self._refused(node, self._format(conv)):
                if self.target.add_inputs == 2:
                    self._want_activation(node, fused, self._format(conv), "input of a residual Add")
                self._want_activation(node, 1 - fused, self._format(conv), "skip input of a residual Add")

    def _stays_float(self, node: ir.Node | None) -> bool:
        return node is not None and first_output(node) in self.rules.keep

    def _concat(self, node: ir.Node) -> None:
        output = node.outputs[0]
        if not is_activation(output):
            return  # shape arithmetic
        dtypes = [dtype for value, dtype, _ in self.slots if value is output]
        if not dtypes:
            self.kept[node] = "its output is not quantised"
            return
        if not all(is_activation(v) for v in node.inputs):
            self.kept[node] = "an input is constant"
            return
        ratio = self._size_ratio(node)
        for dtype in dtypes:
            if self.target.concat_shares and "int" in dtype and ratio > _CONCAT_MAX_RATIO:
                self.kept[node] = f"its inputs differ {ratio:.3g} times in size, so each keeps its own scale"
                continue
            for index in range(len(node.inputs)):
                self._want(node, index, "activation", dtype, None, "input of a Concat whose output is quantised")
            if self.target.concat_shares:
                self._share([*node.inputs, output], dtype)

    def _share(self, values: Sequence[ir.Value | None], dtype: str) -> None:
        """Puts the values, and all that share a scale with one of them, into one group."""
        group = set[str]()
        for value in values:
            if value is not None:
                group.add(value.name or "")
                group |= self.slots[value, dtype, None].shared
        for (value, other, _), slot in self.slots.items():
            if value.name in group and other == dtype:
                slot.shared = group

    def _size_ratio(self, node: ir.Node) -> float:
        """How many times larger the greatest input is than the smallest, among those whose size was measured."""
        amax = [self.rules.amax.get(v.name or "", 0.0) for v in node.inputs if v is not None]
        measured = [a for a in amax if a > 0]
        return max(measured, default=1.0) / min(measured, default=1.0)

    def _want_activation(self, node: ir.Node, index: int, name: str, why: str) -> None:
        dtype = FORMATS[name].activation
        if name == "int8" and self.target.asymmetric:
            dtype = "uint8"
        self._want(node, index, "activation", dtype, None, why)

    def _reads_int8(self, node: ir.Node) -> bool:
        """Whether an activation that the node reads is quantised for it."""
        reader = first_output(node)
        slots = [slot for (_, dtype, _), slot in self.slots.items() if dtype in ("int8", "uint8")]
        return any(slot.role == "activation" and reader in dict(slot.readers) for slot in slots)

    def _output(self, node: ir.Node) -> None:
        """Quantises what the node computes, behind an activation function, for all that read it."""
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) == 1 and uses[0].node.op_type in FUSED and not value.is_graph_output():
            value = uses[0].node.outputs[0]
        for use in list(value.uses()):
            if use.node.graph is not self.graph or use.node in self.skipped or self._stays_float(use.node):
                continue
            # The targets with quantised outputs have uint8 activations, with one scale for the whole value.
            slot = self.slots.get((value, "uint8", None))
            if slot is None or (first_output(use.node), use.idx) not in slot.readers:
                self._want_activation(use.node, use.idx, "int8", f"output of {node.op_type}")

    def _want(
        self, node: ir.Node, index: int, role: Role, dtype: str, axis: int | None, why: str, block: int = 0
    ) -> None:
        value = node.inputs[index]
        assert value is not None
        # A weight is stored once, unless its blocks lie along another axis.
        key = value, dtype, axis if block else None
        slot = self.slots.setdefault(key, _Slot(role, axis, module_of(node), block))
        if slot.axis != axis:
            slot.axis = None
            why += ", read along several axes: one scale"
        slot.readers.append((first_output(node), index))
        if why not in slot.why:
            slot.why.append(why)

    def _share_weights(self) -> None:
        """All other readers of a quantised weight read the quantised numbers too, so that no float copy remains.

        Four bits are too few for a table that is looked up as well.
        """
        for (value, _, _), slot in self.slots.items():
            if slot.role != "weight" or slot.block:
                continue
            quantized = {reader for (v, _, _), other in self.slots.items() if v is value for reader in other.readers}
            for use in value.uses():
                reader = (first_output(use.node), use.idx)
                stays = use.node in self.skipped or self._stays_float(use.node)
                folds_away = weight_of(use.node.outputs[0]) is not None
                if not folds_away and not stays and reader not in quantized:
                    slot.readers.append(reader)

    def _fusing_conv(self, value: ir.Value | None) -> ir.Node | None:
        """The quantised Conv whose output `value` has this reader alone."""
        if value is None or len(value.uses()) != 1 or value.is_graph_output():
            return None
        node = value.producer()
        if node is None or node.op_type not in ("Conv", "ConvTranspose") or node not in self.layers:
            return None
        return node

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
        for (value, dtype, _), slot in sorted(self.slots.items(), key=lambda item: positions[item[0][0]]):
            yield Wanted(
                name=value.name or "",
                role=slot.role,
                module=slot.module,
                dtype=dtype,
                axis=slot.axis,
                block=slot.block,
                shared=tuple(sorted(slot.shared - {value.name or ""})),
                readers=tuple(slot.readers),
                why="; ".join(slot.why),
            )


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
