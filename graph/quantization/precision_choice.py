"""Which nodes may compute in half precision, and why the others must not.

The operator's own schema says which of its inputs and outputs can be half (a Resize's scales and an int64 K never are).
On top of that a node stays in float32 when half would give other numbers:

- it sums, exponentiates or normalises (softmax, layer norm, reductions, exp);
- a constant it reads, or a value seen in calibration, is too large for half or vanishes in it (masks of -3.4e38, an
  epsilon of 1e-12);
- it works on such values: from a reduction or an epsilon float32 goes on through elementwise operators up to the
  division that ends the normalisation, from a mask up to the softmax, and from a sine back to its angle;
- it may add a mask to what a softmax reads.

Nothing is clamped: what half cannot hold is not put into half.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant, subgraphs
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
_PRECISE = _REDUCES | _NORMALISES | _ANGLES | _ops("Log Softplus")
_MOVES = _ops(
    "Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Identity Slice Split Concat Gather GatherElements "
    "GatherND Pad Shape Size DepthToSpace SpaceToDepth TopK Dropout Cast"
)
_BOUNDED = _ops("Sigmoid Tanh HardSigmoid Erf Softsign Sign Softmax Hardmax")
_ELEMENTWISE = _BOUNDED | _ops(
    "Add Sub Mul Div Pow Sqrt Reciprocal Neg Abs Max Min Sum Mean Clip Where Relu LeakyRelu Exp Log"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a half type can hold.

    Attributes:
        greatest: finite values seen, or stored, above this stay float32. For values seen in calibration half of it
            counts: other inputs may reach further.
        least: its smallest normal number; a tensor whose every element is below it stays float32.
    """

    greatest: float
    least: float


LIMITS = {
    ir.DataType.FLOAT16: Limits(greatest=65504.0, least=2.0**-14),
    ir.DataType.BFLOAT16: Limits(greatest=(2 - 2.0**-7) * 2.0**127, least=2.0**-126),
}


def half_slots(node: ir.Node, half: ir.DataType, opset: int) -> tuple[frozenset[int], bool]:
    """The input positions of a node that can be half, and whether all its float32 outputs then are."""
    schema = _schema(node.op_type, node.domain, opset)
    if schema is None or subgraphs(node):
        return frozenset(), False
    allowed = {
        c.type_param_str for c in schema.type_constraints if f"tensor({half.name.lower()})" in c.allowed_type_strs
    }
    takes = {i: t for i, v, t in _typed(node.inputs, schema.inputs) if t in allowed}
    if node.op_type == "Resize":
        # The region of interest may be half by its schema; no runtime takes it.
        takes.pop(1, None)
    gives = [t for _, _, t in _typed(node.outputs, schema.outputs)]
    return frozenset(takes), all(t in takes.values() for t in gives)


def float32_nodes(
    model: ir.Model, half: ir.DataType, amax: Mapping[str, float], skip: Sequence[str] = ()
) -> dict[ir.Node, str]:
    """The nodes of the main graph that stay in float32, with the reason; the empty reason means "it only follows".

    Args:
        model: with inferred types.
        half: FLOAT16 or BFLOAT16.
        amax: greatest |x| seen, by value name, as far as known.
        skip: names of values or nodes, module paths, or globs that stay in float32.
    """
    deciding = _Deciding(model, half, amax, skip)
    deciding.by_themselves()
    deciding.backwards()
    deciding.forwards()
    return deciding.kept


class _Deciding:
    """The three passes over one graph that decide; `kept` grows with each."""

    def __init__(self, model: ir.Model, half: ir.DataType, amax: Mapping[str, float], skip: Sequence[str]) -> None:
        self.nodes, self.half, self.opset = list(model.graph), half, model.opset_imports.get("", 1)
        self.single = {v for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT}
        self.limits, self.type, self.amax = LIMITS[half], half.name.lower(), amax
        self.skipped = matching(model, skip, field="skip")
        self.kept: dict[ir.Node, str] = {}
        self._greatest: dict[ir.Value, float | None] = {}

    def by_themselves(self) -> None:
        """What must stay float32 whatever is around it."""
        for node in self.nodes:
            reason = self._own_reason(node)
            if reason is not None:
                self.kept[node] = reason

    def backwards(self) -> None:
        """What leads to an angle, to squares that are summed, or adds a mask before a softmax."""
        angles: dict[ir.Node, str] = {n: n.outputs[0].name or "" for n in self.nodes if n.op_type in _ANGLES}
        masked: dict[ir.Node, str] = {n: n.outputs[0].name or "" for n in self.nodes if n.op_type in _SOFTMAX}
        for node in reversed(self.nodes):
            for source in (v.producer() for v in node.inputs if v is not None):
                if source is None:
                    continue
                if node in angles and source.op_type in _ELEMENTWISE | _MOVES | {"MatMul", "Einsum"}:
                    angles[source] = angles[node]
                    self.kept.setdefault(source, f"its result is the angle of {angles[node]}")
                elif node in masked and source.op_type in _MASKS | _MOVES:
                    masked[source] = masked[node]
                    reason = f"it may add a mask before the softmax {masked[node]}"
                    self.kept.setdefault(source, "" if source.op_type in _MOVES else reason)
                elif node.op_type in _REDUCES and _is_square(source):
                    self.kept.setdefault(source, f"its squares are summed by {node.op_type} {node.outputs[0].name}")

    def forwards(self) -> None:
        """What works on values that half would spoil, and what only moves float32 values about."""
        delicate: dict[ir.Value, str] = {}
        huge: dict[ir.Value, str] = {}
        for node in self.nodes:
            read = [v for v in node.inputs if v is not None]
            from_huge = next((huge[v] for v in read if v in huge), None)
            from_delicate = next((delicate[v] for v in read if v in delicate), None)
            if from_huge is not None:
                self.kept.setdefault(node, f"it works on {from_huge}, which can exceed the range of {self.type}")
            elif from_delicate is not None and node.op_type in _ELEMENTWISE:
                self.kept.setdefault(node, f"it works on {from_delicate}, which needs float32")
            elif node.op_type in _MOVES and self._moves_single(read):
                self.kept.setdefault(node, "")
            if node not in self.kept:
                continue
            self.single.update(node.outputs)
            spreads, name = node.op_type in _ELEMENTWISE | _MOVES, node.outputs[0].name or ""
            constants = [g for v in read if (g := self._constant(v)) is not None]
            exceeds = any(g > self.limits.greatest for g in constants) or (from_huge and spreads)
            if exceeds and node.op_type not in _BOUNDED:
                huge.update(dict.fromkeys(node.outputs, from_huge or name))
            tiny = any(0 < g < self.limits.least for g in constants)
            if (node.op_type in _REDUCES or tiny or (from_delicate and spreads)) and not _closes(node):
                delicate.update(dict.fromkeys(node.outputs, from_delicate or name))

    def _own_reason(self, node: ir.Node) -> str | None:
        takes, gives = half_slots(node, self.half, self.opset)
        values = [v for v in (*node.inputs, *node.outputs) if v is not None]
        if node in self.skipped:
            return "skip"
        if not gives:
            # A Range or a Cast makes float32 of its own accord; nothing is lost by that.
            single = node.op_type != "Cast" and any(v is not None and v.dtype == ir.DataType.FLOAT for v in node.inputs)
            return f"{node.op_type} has no {self.type} form here" if single else ""
        if node.op_type in _PRECISE:
            return f"{node.op_type} needs float32's range or precision"
        reasons = [*(self._unfit_constant(node.inputs[i]) for i in sorted(takes)), *(self._unfit(v) for v in values)]
        return next((r for r in reasons if r is not None), None)

    def _unfit_constant(self, value: ir.Value | None) -> str | None:
        greatest = self._constant(value)
        if value is None or greatest is None:
            return None
        if greatest > self.limits.greatest:
            return f"constant {value.name} reaches {greatest:.4g}; {self.type} ends at {self.limits.greatest:.4g}"
        if 0 < greatest < self.limits.least:
            return f"constant {value.name} is {greatest:.4g}, which {self.type} does not resolve"
        return None

    def _unfit(self, value: ir.Value) -> str | None:
        seen = self.amax.get(value.name or "", 0.0) if value.dtype == ir.DataType.FLOAT else 0.0
        if seen > self.limits.greatest / 2:
            return f"{value.name} reached {seen:.4g}; {self.type} ends at {self.limits.greatest:.4g}"
        if 0 < seen < self.limits.least:
            return f"{value.name} never exceeded {seen:.4g}, which {self.type} does not resolve"
        return None

    def _moves_single(self, read: Sequence[ir.Value]) -> bool:
        moved = [v for v in read if v.dtype == ir.DataType.FLOAT and constant(v) is None]
        return bool(moved) and all(v in self.single for v in moved)

    def _constant(self, value: ir.Value | None) -> float | None:
        """Greatest finite |x| of a float32 constant; None for anything else."""
        if value is None or value.dtype != ir.DataType.FLOAT:
            return None
        if value not in self._greatest:
            array = constant(value)
            finite = None if array is None else np.abs(array[np.isfinite(array)])
            self._greatest[value] = None if finite is None else float(finite.max(initial=0.0))
        return self._greatest[value]


def _closes(node: ir.Node) -> bool:
    """Whether a normalisation ends here: divided, or multiplied by a reciprocal."""
    return node.op_type == "Div" or (node.op_type == "Mul" and not _is_square(node))


def _is_square(node: ir.Node) -> bool:
    return node.op_type == "Pow" or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1])


def _typed(values: Sequence[ir.Value | None], formal: Sequence[Any]) -> Iterator[tuple[int, ir.Value, str]]:
    """The float32 values among a node's inputs or outputs, with the type their schema gives them."""
    for index, value in enumerate(values):
        if value is not None and value.dtype == ir.DataType.FLOAT:
            # Beyond the last formal parameter lie the further values of a variadic one.
            yield index, value, formal[min(index, len(formal) - 1)].type_str


@functools.cache
def _schema(op: str, domain: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(op, opset, domain) if domain == "" else None
    except onnx.defs.SchemaError:
        return None
