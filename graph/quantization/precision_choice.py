"""Which nodes may compute in half precision, and why the others must not.

The operator's own schema says which of its inputs and outputs can be half (a Resize's scales and an int64 K never are).
On top of that a node stays in float32 when half would give other numbers:

- it sums, exponentiates or normalises (softmax, layer norm, reductions, exp);
- a constant it reads, or a value seen in calibration, is too large for half or vanishes in it (masks of -3.4e38, an
  epsilon of 1e-12);
- it works on such values: from a reduction or an epsilon float32 goes on through elementwise operators up to the
  division that ends the normalisation, from a mask up to the softmax, and from a sine back to its angle;
- it may add a mask to what a softmax reads;
- it reads an image at computed positions (GridSample, RoiAlign);
- it computes with integers alone (positions, sizes, masks): half has no odd numbers from 2048 on, bfloat16 from 256 on.

Nothing is clamped: what half cannot hold is not put into half.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant, optional_input, parent, subgraphs
from layerline.graph.quantization.naming import matching


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SOFTMAX = _ops("Softmax LogSoftmax")
_MASKS = _ops("Add Sub Where")
_ANGLES = _ops("Sin Cos Tan")
_REDUCES = _ops(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum ReduceSumSquare CumSum Exp"
)
_NORMALISES = _SOFTMAX | _ops(
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization RMSNormalization LRN "
    "LpNormalization MeanVarianceNormalization Hardmax"
)
# Half has 11 bits for a position: a quarter of a pixel in an image of 1,024.
_PLACES = _ops("GridSample RoiAlign")
_PRECISE = _REDUCES | _NORMALISES | _ANGLES | _PLACES | _ops("Log Softplus")
_MOVES = _ops(
    "Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Identity Slice Split Concat Gather GatherElements "
    "GatherND Pad Shape Size DepthToSpace SpaceToDepth TopK Dropout Cast"
)
_BOUNDED = _ops("Sigmoid Tanh HardSigmoid Erf Softsign Sign Softmax Hardmax")
_ELEMENTWISE = _BOUNDED | _ops(
    "Add Sub Mul Div Pow Sqrt Reciprocal Neg Abs Max Min Sum Mean Clip Where Relu LeakyRelu Exp Log"
)
# What jumps where a position reaches a bound.
_STEPS = _ops("Floor Ceil Round Mod Equal Less LessOrEqual Greater GreaterOrEqual")


@dataclass(frozen=True, kw_only=True)
class HalfLimits:
    """The range of a half-precision type."""

    # finite values seen, or stored, above this stay float32. For values seen in calibration half of it counts: other
    # inputs may reach further.
    greatest: float
    least: float  # its smallest normal number; a tensor whose every element is below it stays float32.


LIMITS = {
    ir.DataType.FLOAT16: HalfLimits(greatest=65504.0, least=2.0**-14),
    ir.DataType.BFLOAT16: HalfLimits(greatest=(2 - 2.0**-7) * 2.0**127, least=2.0**-126),
}


def half_slots(node: ir.Node, half: ir.DataType, opset: int) -> tuple[frozenset[int], bool]:
    """The input positions of a node that can be half, and whether all its float32 outputs then are."""
    schema = _schema(node.op_type, node.domain, opset)
    if schema is None or subgraphs(node):
        return frozenset(), False
    half_type = f"tensor({half.name.lower()})"
    allowed = {c.type_param_str for c in schema.type_constraints if half_type in c.allowed_type_strs}
    input_types = {index: t for index, t in _float32_slots(node.inputs, schema.inputs) if t in allowed}
    if node.op_type == "Resize":
        # The schema allows a half region of interest, but no runtime takes it.
        input_types.pop(1, None)
    output_types = {t for _, t in _float32_slots(node.outputs, schema.outputs)}
    return frozenset(input_types), output_types <= set(input_types.values())


def float32_nodes(
    model: ir.Model, half: ir.DataType, amax: Mapping[str, float], skip: Sequence[str] = ()
) -> dict[ir.Node, str]:
    """The nodes of the main graph that stay in float32, each with its reason.

    The reason is empty for nodes that only move float32 values on.

    Args:
        amax: greatest |x| measured, by value name; values may be missing.
        skip: names of values or nodes, module paths, or globs that stay in float32.
    """
    choice = _Float32Choice(model, half, amax, skip)
    # First the nodes that stay float32 whatever is around them.
    for node in choice.nodes:
        reason = choice.own_reason(node)
        if reason is not None:
            choice.kept[node] = reason
    choice.propagate_backwards()
    choice.propagate_forwards()
    choice.keep_quantizers()
    return choice.kept


class _Float32Choice:
    """Three passes over one graph. Each adds nodes to `kept`, those that stay in float32."""

    def __init__(self, model: ir.Model, half: ir.DataType, amax: Mapping[str, float], skip: Sequence[str]) -> None:
        self.nodes = list(model.graph)
        self.half = half
        self.opset = model.opset_imports.get("", 1)
        self.single = {v for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT}
        self.limits = LIMITS[half]
        self.type = half.name.lower()
        self.amax = amax
        self.skipped = matching(model, skip, field="quantize.skip")
        self.kept: dict[ir.Node, str] = {}
        self._greatest: dict[ir.Value, float | None] = {}

    def propagate_backwards(self) -> None:
        """Keeps nodes that compute an angle, squares that are summed, or a mask before a softmax."""
        # By node: the sine, softmax or sampling that its result reaches.
        angle_of: dict[ir.Node, str] = {n: n.outputs[0].name or "" for n in self.nodes if n.op_type in _ANGLES}
        softmax_of: dict[ir.Node, str] = {n: n.outputs[0].name or "" for n in self.nodes if n.op_type in _SOFTMAX}
        place_of: dict[ir.Node, str] = {n: n.outputs[0].name or "" for n in self.nodes if n.op_type in _PLACES}
        for node in reversed(self.nodes):
            for value in node.inputs:
                source = value.producer() if value is not None else None
                if source is None:
                    continue
                # A small relative error of a large angle is a large error of its sine.
                if node in angle_of and source.op_type in _ELEMENTWISE | _MOVES | {"MatMul", "Einsum"}:
                    angle_of[source] = angle_of[node]
                    self.kept.setdefault(source, f"its result is the angle of {angle_of[node]}")
                elif node in place_of and (node.op_type not in _PLACES or value is node.inputs[1]):
                    if source.op_type in _ELEMENTWISE | _MOVES:
                        place_of[source] = place_of[node]
                        self.kept.setdefault(source, f"its result is a position in {place_of[node]}")
                # A mask of -1e9 overflows half, and softmax needs the sum with it.
                elif node in softmax_of and source.op_type in _MASKS | _MOVES:
                    softmax_of[source] = softmax_of[node]
                    reason = ""
                    if source.op_type in _MASKS:
                        reason = f"it may add a mask before the softmax {softmax_of[node]}"
                    self.kept.setdefault(source, reason)
                elif node.op_type in _REDUCES and _is_square(source):
                    self.kept.setdefault(source, f"its squares are summed by {node.op_type} {node.outputs[0].name}")

    def propagate_forwards(self) -> None:
        """Keeps nodes that work on values that half would spoil, and nodes that only move float32 values."""
        # What integers and constants alone decide, until it meets an activation.
        counts: set[ir.Value] = set()
        # By value: the sum or epsilon (delicate), or the mask (huge), that it comes from.
        delicate: dict[ir.Value, str] = {}
        huge: dict[ir.Value, str] = {}
        for node in self.nodes:
            read = [v for v in node.inputs if v is not None]
            from_huge = _first_of(huge, read)
            from_delicate = _first_of(delicate, read)
            is_count = self._counts(node, read, counts)
            if is_count:
                counts.update(node.outputs)
            if from_huge is not None:
                self.kept.setdefault(node, f"it works on {from_huge}, which can exceed the range of {self.type}")
            elif from_delicate is not None and node.op_type in _ELEMENTWISE:
                self.kept.setdefault(node, f"it works on {from_delicate}, which needs float32")
            elif is_count:
                # The Cast or Range that starts it is kept already.
                self.kept.setdefault(node, f"it computes with integers, which {self.type} rounds")
            elif node.op_type in _MOVES and self._moves_single(read):
                self.kept.setdefault(node, "")
            if node not in self.kept:
                continue
            self.single.update(node.outputs)
            # A bounded operator (sigmoid, softmax) ends what is huge, a division what is delicate.
            spreads = node.op_type in _ELEMENTWISE | _MOVES
            name = node.outputs[0].name or ""
            constants = [self._constant(v) or 0.0 for v in read]
            reaches_beyond = any(c > self.limits.greatest for c in constants)
            if (reaches_beyond or (from_huge and spreads)) and node.op_type not in _BOUNDED:
                huge.update(dict.fromkeys(node.outputs, from_huge or name))
            adds_epsilon = any(0 < c < self.limits.least for c in constants)
            starts = node.op_type in _REDUCES or adds_epsilon
            if (starts or (from_delicate and spreads)) and not _ends_normalisation(node):
                delicate.update(dict.fromkeys(node.outputs, from_delicate or name))

    def _counts(self, node: ir.Node, read: Sequence[ir.Value], counts: Collection[ir.Value]) -> bool:
        """Whether a node makes floats of integers, or computes with such floats and constants alone."""
        if node.op_type == "Range":
            return True
        if node.op_type == "Cast" and read:
            return read[0].dtype is not None and not read[0].dtype.is_floating_point()
        floats = [value for value in read if value.dtype == ir.DataType.FLOAT and constant(value) is None]
        if node.op_type not in _ELEMENTWISE | _MOVES | _REDUCES | _STEPS:
            return False
        return bool(floats) and all(value in counts for value in floats)

    def keep_quantizers(self) -> None:
        """Keeps Q/DQ whose readers are all float32: a Cast behind them would hide them from the layer they are for."""
        # DequantizeLinear comes before the QuantizeLinear that only it reads.
        for node in reversed(self.nodes):
            if node.op_type not in ("DequantizeLinear", "QuantizeLinear"):
                continue
            readers = node.outputs[0].consumers()
            if readers and all(reader in self.kept for reader in readers):
                self.kept.setdefault(node, "")

    def own_reason(self, node: ir.Node) -> str | None:
        """Why a node must stay float32 by itself; None where it need not, "" where that is not worth a line."""
        if node in self.skipped:
            return "skip"
        half_inputs, outputs_are_half = half_slots(node, self.half, self.opset)
        if not outputs_are_half:
            # A Range or a Cast makes float32 from other types: it loses nothing, so it needs no line in the report.
            reads_float = any(v is not None and v.dtype == ir.DataType.FLOAT for v in node.inputs)
            if reads_float and node.op_type != "Cast":
                return f"{node.op_type} has no {self.type} form here"
            return ""
        # A Scatter that reduces sums up as well, and onnxruntime has no kernel for that in half.
        if node.op_type in _PRECISE or node.attributes.get_string("reduction", "none") != "none":
            return f"{node.op_type} needs float32's range or precision"
        for index in sorted(half_inputs):
            reason = self._unfit_constant(node.inputs[index])
            if reason is not None:
                return reason
        for value in (*node.inputs, *node.outputs):
            reason = self._unfit(value)
            if reason is not None:
                return reason
        return None

    def _unfit_constant(self, value: ir.Value | None) -> str | None:
        greatest = self._constant(value)
        if value is None or greatest is None:
            return None
        if greatest > self.limits.greatest:
            return f"constant {value.name} reaches {greatest:.4g}; {self.type} ends at {self.limits.greatest:.4g}"
        if 0 < greatest < self.limits.least:
            return f"constant {value.name} is {greatest:.4g}, which {self.type} does not resolve"
        return None

    def _unfit(self, value: ir.Value | None) -> str | None:
        if value is None or value.dtype != ir.DataType.FLOAT:
            return None
        amax = self._measured(value)
        if amax > self.limits.greatest / 2:
            return f"{value.name} reached {amax:.4g}; {self.type} ends at {self.limits.greatest:.4g}"
        if 0 < amax < self.limits.least:
            return f"{value.name} never exceeded {amax:.4g}, which {self.type} does not resolve"
        return None

    def _measured(self, value: ir.Value) -> float:
        """Greatest |x| measured; of a value behind Q/DQ, that of what was quantised. 0 where none was."""
        measured: ir.Value | None = value
        dequantize = parent(value, "DequantizeLinear")
        if dequantize is not None:
            stored = self._stored(dequantize)
            if stored is not None:
                return stored
            quantize = parent(dequantize.inputs[0], "QuantizeLinear")
            if quantize is not None:
                measured = quantize.inputs[0]
        if measured is None or measured.name is None:
            return 0.0
        return self.amax.get(measured.name, 0.0)

    def _stored(self, dequantize: ir.Node) -> float | None:
        """Greatest |x| that a weight stored as integers stands for; None of anything that is computed."""
        numbers = constant(dequantize.inputs[0])
        scales = constant(dequantize.inputs[1])
        if numbers is None or scales is None or not numbers.size or not scales.size:
            return None
        zeros = constant(optional_input(dequantize, 2))
        if zeros is None or not zeros.size:
            zeros = np.zeros(1)
        # No more than the greatest scale times the greatest distance from a zero point: channels need not be told
        # apart here. An int8 number is up to 255 from its zero point.
        wide, origins = numbers.astype(np.float64), zeros.astype(np.float64)
        span = max(wide.max() - origins.min(), origins.max() - wide.min())
        return float(span * np.abs(scales.astype(np.float64)).max())

    def _moves_single(self, read: Sequence[ir.Value]) -> bool:
        moved = [v for v in read if v.dtype == ir.DataType.FLOAT and constant(v) is None]
        return bool(moved) and all(v in self.single for v in moved)

    def _constant(self, value: ir.Value | None) -> float | None:
        """Greatest finite |x| of a float32 constant; None for anything else."""
        if value is None or value.dtype != ir.DataType.FLOAT:
            return None
        if value not in self._greatest:
            array = constant(value)
            greatest = None
            if array is not None:
                greatest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
            self._greatest[value] = greatest
        return self._greatest[value]


def _first_of(origins: Mapping[ir.Value, str], values: Sequence[ir.Value]) -> str | None:
    for value in values:
        if value in origins:
            return origins[value]
    return None


def _ends_normalisation(node: ir.Node) -> bool:
    """Whether the node divides, or multiplies by a reciprocal, which ends a normalisation."""
    return node.op_type == "Div" or (node.op_type == "Mul" and not _is_square(node))


def _is_square(node: ir.Node) -> bool:
    return node.op_type == "Pow" or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1])


def _float32_slots(values: Sequence[ir.Value | None], formal: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Positions of the float32 values among a node's inputs or outputs, with the type parameter of each."""
    for index, value in enumerate(values):
        if value is not None and value.dtype == ir.DataType.FLOAT:
            # The last formal parameter may be variadic: all further values are its.
            yield index, formal[min(index, len(formal) - 1)].type_str


@functools.cache
def _schema(op: str, domain: str, opset: int) -> Any:
    if domain != "":
        return None
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None
