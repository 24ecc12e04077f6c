"""Which inputs of a node are quantised, operator by operator, by the rules of a target (`targets.py`).

Each rule is a function of one node. It returns the inputs to quantise and, where the node stays float, the reason.
TensorRT's rules are the default:

- The inputs of layers with weights are quantised (Conv, ConvTranspose, Gemm, MatMul), never their outputs: the next
  layer's Q is behind the activation function, so that Conv + ReLU can fuse. Biases stay float.
- A residual Add has its skip input quantised, not the output of the Conv that it fuses with.
- A Concat whose output is quantised has all inputs quantised with the output's scale.
- Average pooling may run in int8. MaxPool, Reshape, Transpose and the like need nothing: TensorRT moves Q/DQ past them.

Source: NVIDIA TensorRT documentation, "Working with Quantized Types", Q/DQ layer-placement recommendations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.calib.plan import Role, Wanted, readers_of
from layerline.graph.analysis.ir_queries import dim, first_output, name_of, names, rank
from layerline.graph.quantization.channel_axes import channel_axis, shared_scales, summed_axis, uneven
from layerline.graph.quantization.kept_reasons import FUSED, is_activation
from layerline.graph.quantization.naming import matching, module_of
from layerline.graph.quantization.targets import FORMATS, OPS, TARGETS, WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of

# Inputs of a Concat that share an integer scale may differ this much in size: the smallest loses three of eight bits.
_CONCAT_MAX_RATIO = 8.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The user's choices, and what calibration says about single values and nodes."""

    target: str = "tensorrt"  # the runtime that it is for, of TARGETS
    format: str = "int8"  # of layers for which `formats` has none, of FORMATS
    formats: Mapping[str, str] = field(default_factory=dict)  # of single layers, by the node's first output
    int4_block: int = FORMATS["int4"].block  # numbers of an int4 weight that share a scale
    dynamic: bool = False  # nvfp4 layers read quantised activations too
    ops: Sequence[str] = OPS  # operators to quantise, of OPS
    # what stays float: value or node names, module paths (with everything below them), or globs of either
    skip: Sequence[str] = ()
    per_channel: bool = True  # one scale per output channel of a weight, not one per weight
    attention: bool = False  # quantise MatMuls of two activations too
    # greatest |x| of activations, where measured. Inputs of a Concat that differ much keep their own scales.
    amax: Mapping[str, float] = field(default_factory=dict)
    # nodes that stay float, because int8 loses too much there or because the user says so: the reason, by the node's
    # first output
    keep: Mapping[str, str] = field(default_factory=dict)
    forced: Collection[str] = frozenset()  # first outputs of nodes that `skip` does not hold

    @property
    def opset(self) -> int:
        """The least opset that has the types of all formats."""
        return max(FORMATS[name].opset for name in (self.format, *self.formats.values()))


# What a rule says of one node: the inputs to quantise, and why it is listed among what stays float, or "".
NodeOutcome = tuple[list[Wanted], str]


def want(
    node: ir.Node, index: int, role: Role, dtype: str, why: str, axis: int | None = None, block: int = 0
) -> Wanted:
    """One input of a node, as that node alone wants it."""
    return Wanted(
        name=name_of(node.inputs[index]) or "",
        role=role,
        module=module_of(node),
        dtype=dtype,
        axis=axis,
        block=block,
        readers=((first_output(node), index),),
        why=why,
    )


class Context:
    """What the rules read beside a node: the graph with inferred types, the user's choices and the target."""

    def __init__(self, model: ir.Model, rules: Rules) -> None:
        self.graph = model.graph
        self.nodes = list(model.graph)
        self.rules = rules
        self.target = TARGETS[rules.target]
        skipped = matching(model, rules.skip, field="quantize.skip")
        self._skipped = {node for node in skipped if first_output(node) not in rules.forced}

    def reason_to_leave(self, node: ir.Node) -> str:
        """Why the user's choices leave a node float; empty where they don't."""
        if node in self._skipped:
            return "skip"
        reason = self.rules.keep.get(first_output(node), "")
        if not reason and node.op_type not in self.rules.ops:
            reason = f"ops leaves {node.op_type} out"
        return reason

    def stays_float(self, node: ir.Node) -> bool:
        """Whether nothing that a node reads is quantised for it, whatever its operator."""
        return node in self._skipped or first_output(node) in self.rules.keep

    def format_of(self, node: ir.Node) -> str:
        return self.rules.formats.get(first_output(node), self.rules.format)

    def refusal(self, node: ir.Node, name: str) -> str:
        """Why the target does not take a node in a format; empty where it does."""
        formats = self.target.formats.get(node.op_type, ())
        if name in formats:
            return ""
        takes = " and ".join(formats) or "float"
        return f"{self.rules.target} takes {node.op_type} in {takes}, not in {name}"

    def activation(self, node: ir.Node, index: int, name: str, why: str) -> Wanted:
        """An activation in the type that a format has for it."""
        dtype = FORMATS[name].activation
        if name == "int8" and self.target.asymmetric:
            dtype = "uint8"
        return want(node, index, "activation", dtype, why)

    @functools.cached_property
    def depths(self) -> dict[ir.Node, int]:
        """The length of the longest path from an input to each node, in nodes."""
        depths: dict[ir.Node, int] = {}
        for node in self.nodes:
            longest = 0
            producers = [value.producer() for value in node.inputs if value is not None]
            for producer in producers:
                if producer is not None:
                    longest = max(longest, depths.get(producer, 0))
            depths[node] = longest + 1
        return depths


def layer_with_weights(context: Context, node: ir.Node, _: Sequence[Wanted]) -> NodeOutcome:
    """A Conv, ConvTranspose, Gemm or MatMul: its activation and its weight."""
    left, right = node.inputs[:2]
    left_is_weight, right_is_weight = weight_of(left) is not None, weight_of(right) is not None
    if not (left_is_weight or is_activation(left)) or not (right_is_weight or is_activation(right)):
        dtypes = ", ".join(str(value.dtype) for value in (left, right) if value is not None)
        return [], f"its inputs are not all float16, bfloat16 or float32 ({dtypes})"
    if left_is_weight and right_is_weight:
        return [], "both inputs are constant"
    name = context.format_of(node)
    refusal = context.refusal(node, name)
    if refusal:
        return [], refusal
    if FORMATS[name].block:
        return _weight_in_blocks(context, node, name)
    why = f"input of {node.op_type}"
    if right_is_weight:
        return _weight_on_the_right(context, node, name)
    if node.op_type in ("Conv", "ConvTranspose"):
        return [], "its weights are computed, not constant"
    if left_is_weight:
        weight = want(node, 0, "weight", FORMATS[name].weight, f"weight of {node.op_type}, on its left side")
        return [context.activation(node, 1, name, why), weight], ""
    if context.rules.attention:
        why += " with two activations"
        return [context.activation(node, index, name, why) for index in (0, 1)], ""
    return [], "both inputs are activations (attention: true quantises them)"


def _weight_on_the_right(context: Context, node: ir.Node, name: str) -> NodeOutcome:
    dtype = FORMATS[name].weight
    axis = None
    if context.rules.per_channel:
        axis = channel_axis(node)
        # A float type keeps small channels beside large ones.
        reason = uneven(node) if "int" in dtype else ""
        if reason:
            return [], reason
    activation = context.activation(node, 0, name, f"input of {node.op_type}")
    return [activation, want(node, 1, "weight", dtype, f"weight of {node.op_type}{shared_scales(node)}", axis)], ""


def _weight_in_blocks(context: Context, node: ir.Node, name: str) -> NodeOutcome:
    """A weight in blocks along the axis that is summed; the activation stays float, but for dynamic nvfp4."""
    dtype, block = FORMATS[name].weight, FORMATS[name].block
    if name == "int4":
        block = context.rules.int4_block
    axis, weight = summed_axis(node), weight_of(node.inputs[1])
    if axis is None or weight is None:
        return [], f"{name} takes a weight of two axes on the right side of a product"
    if weight.shape[axis] % block:
        return [], f"it sums {weight.shape[axis]} products, no multiple of the {block} of a block"
    wanted = [want(node, 1, "weight", dtype, f"weight of {node.op_type}, in blocks", axis, block)]
    # TensorRT's operator takes two or three axes.
    axes = rank(node.inputs[0])
    is_plain = axes in (2, 3) and not node.attributes.get_int("transA", 0)
    if context.rules.dynamic and name == "nvfp4" and axes is not None and is_plain:
        why = f"input of {node.op_type}, in blocks, while running"
        wanted.append(want(node, 0, "activation", dtype, why, axes - 1, block))
    return wanted, ""


def residual_add(context: Context, node: ir.Node, wanted: Sequence[Wanted]) -> NodeOutcome:
    """An Add that fuses into a quantised Conv before it: its other input."""
    readers = readers_of(wanted)
    inputs = [value for value in node.inputs if value is not None]
    activations = [value for value in inputs if is_activation(value)]
    producers = [value.producer() for value in inputs]
    # By the position of their output among the inputs: quantised layers, and the Convs that this Add can fuse into.
    layers: dict[int, ir.Node] = {}
    convs: dict[int, ir.Node] = {}
    for index, producer in enumerate(producers):
        if producer is None or producer.op_type not in WEIGHTED or first_output(producer) not in readers:
            continue
        layers[index] = producer
        read_here_alone = len(inputs[index].uses()) == 1 and not inputs[index].is_graph_output()
        if producer.op_type in ("Conv", "ConvTranspose") and read_here_alone:
            convs[index] = producer
    if not convs and len(activations) == len(inputs):
        return [], "no quantised Conv leads to this Add alone, so it cannot fuse into one"
    if not convs and (layers or not activations):
        return [], ""  # the bias of a quantised MatMul, or shape arithmetic
    if not convs or any(weight_of(value) is not None for value in inputs):
        return [], "adds a constant"
    if any(producer is not None and first_output(producer) in context.rules.keep for producer in producers):
        return [], "a layer that it adds stays float"
    if _broadcasts(*inputs):
        return [], "broadcasts, so it cannot fuse into the Conv"
    # Of two Convs the deeper one runs last: it fuses, the other's output is there by then.
    fused = max(convs, key=lambda index: (context.depths[convs[index]], index))
    name = context.format_of(convs[fused])
    refusal = context.refusal(node, name)
    if refusal:
        return [], refusal
    skip = context.activation(node, 1 - fused, name, "skip input of a residual Add")
    if context.target.add_inputs == 2:
        return [context.activation(node, fused, name, "input of a residual Add"), skip], ""
    return [skip], ""


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


def pool(context: Context, node: ir.Node, _: Sequence[Wanted]) -> NodeOutcome:
    """Average pooling: its input."""
    if not is_activation(node.inputs[0]):
        return [], ""
    name = context.format_of(node)
    refusal = context.refusal(node, name)
    if refusal:
        return [], refusal
    return [context.activation(node, 0, name, f"input of {node.op_type}")], ""


def output(context: Context, node: ir.Node, wanted: Sequence[Wanted]) -> NodeOutcome:
    """A node that reads int8, for a target whose kernels write int8 too: what it computes, for all that read it.

    Behind an activation function it is the output of that which is quantised.
    """
    if node.op_type not in context.target.outputs:
        return [], ""
    int8 = [item for item in wanted if item.role == "activation" and item.dtype in ("int8", "uint8")]
    quantized = {reader for item in int8 for reader in item.readers}
    reads_int8 = any((first_output(node), index) in quantized for index in range(len(node.inputs)))
    if not reads_int8:
        return [], ""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) == 1 and uses[0].node.op_type in FUSED and not value.is_graph_output():
        value = uses[0].node.outputs[0]
    added: list[Wanted] = []
    for use in value.uses():
        is_inner = use.node.graph is context.graph and not context.stays_float(use.node)
        if is_inner and (first_output(use.node), use.idx) not in quantized:
            added.append(context.activation(use.node, use.idx, "int8", f"output of {node.op_type}"))
    return added, ""


def concat(context: Context, node: ir.Node, wanted: Sequence[Wanted]) -> NodeOutcome:
    """A Concat whose output is quantised: all its inputs, in the same types."""
    value = node.outputs[0]
    # Shape arithmetic is no line in the list of what stays float.
    if not is_activation(value):
        return [], ""
    # Blocks along the last axis are quantised by the layer that reads them.
    dtypes = dict.fromkeys(item.dtype for item in wanted if item.name == value.name and not item.block)
    if not dtypes:
        return [], "its output is not quantised"
    if not all(is_activation(each) for each in node.inputs):
        return [], "an input is constant"
    shares = context.target.concat_shares
    ratio = _size_ratio(node, context.rules.amax)
    added: list[Wanted] = []
    reason = ""
    for dtype in dtypes:
        if shares and "int" in dtype and ratio > _CONCAT_MAX_RATIO:
            reason = f"its inputs differ {ratio:.3g} times in size, so each keeps its own scale"
            continue
        why = "input of a Concat whose output is quantised"
        items = [want(node, index, "activation", dtype, why) for index in range(len(node.inputs))]
        if shares:
            group = tuple(names([*node.inputs, value]))
            items = [dataclasses.replace(item, shared=group) for item in items]
        added += items
    return added, reason


def _size_ratio(node: ir.Node, amax: Mapping[str, float]) -> float:
    """How many times larger the greatest input is than the smallest, among those whose size was measured."""
    sizes = [amax.get(name, 0.0) for name in names(node.inputs)]
    measured = [size for size in sizes if size > 0]
    return max(measured, default=1.0) / min(measured, default=1.0)
