"""The measuring end of a joint graph: each kind of measure is a few nodes that reduce a pair to scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper, parser

from layerline.compare.tensor_distance import (
    GAP,
    GREAT_MASK,
    HALF_LOWEST,
    HALF_MASK,
    LARGE,
    LEAST_MASK,
    NEAR,
    Distance,
)
from layerline.compare.topk_indices import Pointer

SUMS = ("aa", "bb", "ee", "l1")
# Rows are summed in float32 and the rows' sums in float64: half the time of float64 throughout, and as good as that
# while the squares stay within float32's range, which `trusted` tells. The last axis is short, so no sum is long. One
# Cast a pair: with thousands of them in a graph onnxruntime takes seconds to open it.
_ROWS = """last = Constant <value = int64[1] {{-1}}> ()
 first = Constant <value = int64[1] {{0}}> ()
 table = Constant <value = int64[2] {{-1, 4}}> ()
 d = Sub (a, b)
 e = Abs (d)
 {rows}
 row = Concat <axis = -1> (aa, bb, ee, l1)
 wide = Cast <to = 11> (row)
 flat = Reshape (wide, table)
 sums = {total}
 peak = ReduceMax <keepdims = 0> (e)
 shape_a = Shape (a)
 shape_b = Shape (b)"""
_ROW = {"aa": ("SumSquare", "a"), "bb": ("SumSquare", "b"), "ee": ("SumSquare", "d"), "l1": ("Sum", "e")}
ROW_COLUMNS = ("sums", "peak", "shape_a", "shape_b")
# Up to so many elements (most are shapes) both sides are handed over, and numpy takes the same measures: each node that
# reduces takes time to set up.
_SMALL = 64
_LONG = (onnx.TensorProto.INT64, onnx.TensorProto.UINT64)
FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
SMALLEST = 1e-35
"""Mean square from which on float32 rounds a square as it rounds any number: below 1e-38 digits go missing."""

# Float64 throughout: float32 squares overflow at 1.8e19, and ‖a‖ - ‖b‖ needs every digit where the two are close.
_HEAD = "x = Cast <to = 11> (a)\n y = Cast <to = 11> (b)\n shape_a = Shape (a)\n shape_b = Shape (b)"
_SUMS = """aa = ReduceSumSquare <keepdims = 0> (u)
 bb = ReduceSumSquare <keepdims = 0> (v)
 ee = ReduceSumSquare <keepdims = 0> (e)
 l1 = ReduceSum <keepdims = 0> (e)
 peak = ReduceMax <keepdims = 0> (e)"""
COLUMNS = (*SUMS, "peak", "shape_a", "shape_b")
_PLAIN = f"""{_HEAD}
 u = Identity (x)
 v = Identity (y)
 d = Sub (u, v)
 e = Abs (d)
 {_SUMS}"""
# Integers past 2^53 collapse in float64; two that differ must never look equal.
_INT64 = f"""{_HEAD}
 u = Identity (x)
 v = Identity (y)
 d = Sub (u, v)
 f = Abs (d)
 same = Equal (a, b)
 differ = Not (same)
 least = Cast <to = 11> (differ)
 e = Max (f, least)
 {_SUMS}"""
# Over the elements both sides have finite and no mask hides, with the others counted; for pairs that hold others, known
# from the graph or found on a feed.
COUNTS = ("bad", "nonfinite_a", "nonfinite_b", "one_sided", "masked")
MASKED_COLUMNS = (*COLUMNS, *COUNTS)
# `distance.hidden` as nodes. Greater and Less alone: LessOrEqual came with opset 12.
_HIDDEN = f"""least = Constant <value = double {{-{LEAST_MASK}}}> ()
 great = Constant <value = double {{{GREAT_MASK}}}> ()
 lowest = Constant <value = double {{{HALF_LOWEST}}}> ()
 half = Constant <value = double {{{HALF_MASK}}}> ()
 gap = Constant <value = double {{{GAP}}}> ()
 near = Constant <value = double {{{NEAR}}}> ()
 two = Constant <value = double {{2.0}}> ()
 ten = Constant <value = double {{10.0}}> ()
 ln_ten = Constant <value = double {{{math.log(10.0)!r}}}> ()
 size = Abs (x)
 not_low = Greater (x, least)
 low = Not (not_low)
 not_high = Less (size, great)
 high = Not (not_high)
 far = Or (low, high)
 finite = Not (bad_m)
 not_far = Not (far)
 rest = And (finite, not_far)
 rest_size = Where (rest, size, zero)
 rest_peak = ReduceMax <keepdims = 0> (rest_size)
 rest_f = Cast <to = 11> (rest)
 rest_any = ReduceMax <keepdims = 0> (rest_f)
 has_rest = Greater (rest_any, zero)
 rest_twice = Mul (rest_peak, two)
 rounding = Mul (size, near)
 slack = Add (rest_twice, rounding)
 ln_size = Log (size)
 log_size = Div (ln_size, ln_ten)
 power = Round (log_size)
 power_of_ten = Pow (ten, power)
 off_ten = Sub (size, power_of_ten)
 off_ten_by = Abs (off_ten)
 no_ten = Greater (off_ten_by, slack)
 off_half = Sub (size, lowest)
 off_half_by = Abs (off_half)
 no_half = Greater (off_half_by, slack)
 neither = And (no_ten, no_half)
 no_mask = And (neither, not_high)
 edge = Mul (rest_peak, gap)
 inside = Less (size, edge)
 off = Sub (x, y)
 off_by = Abs (off)
 unlike = Greater (off_by, rounding)
 sign = Sign (x)
 along = Mul (sign, y)
 a_above = Less (size, half)
 b_above = Less (along, half)
 not_clamped = Or (a_above, b_above)
 differs = And (unlike, not_clamped)
 shown_ab = Or (no_mask, inside)
 shown = Or (shown_ab, differs)
 covered = Not (shown)
 far_finite = And (far, finite)
 far_alone = And (far_finite, has_rest)
 masked_m = And (far_alone, covered)
 out_m = Or (bad_m, masked_m)"""
_COUNT = "{0}_f = Cast <to = 11> ({0}_m)\n {0} = ReduceSum <keepdims = 0> ({0}_f)"
_MASKED = f"""{_HEAD}
 nan_a = IsNaN (x)
 inf_a = IsInf (x)
 nonfinite_a_m = Or (nan_a, inf_a)
 nan_b = IsNaN (y)
 inf_b = IsInf (y)
 nonfinite_b_m = Or (nan_b, inf_b)
 bad_m = Or (nonfinite_a_m, nonfinite_b_m)
 nans = And (nan_a, nan_b)
 equal = Equal (x, y)
 same = Or (nans, equal)
 differ = Not (same)
 one_sided_m = And (bad_m, differ)
 zero = Constant <value = double {{0.0}}> ()
 {_HIDDEN}
 u = Where (out_m, zero, x)
 v = Where (out_m, zero, y)
 d = Sub (u, v)
 e = Abs (d)
 {_SUMS}
 {" ".join(_COUNT.format(c) for c in COUNTS)}"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A value of the reference and the one of the candidate it is compared with.

    Attributes:
        a: name in the reference.
        b: name in the candidate.
        dtype_a: element type in the reference, as in TensorProto.
        dtype_b: element type in the candidate.
        rank: number of axes, where known.
        size: number of elements, where known and the same on both sides.
        pointer: what it points at, for a value that holds indices; `axis` counts from the front.
    """

    a: str
    b: str
    dtype_a: int
    dtype_b: int
    rank: int = 0
    size: int | None = None
    pointer: Pointer | None = None

    @property
    def is_float(self) -> bool:
        """Whether both sides hold floating point numbers, which masks may have been added to."""
        return self.pointer is None and {self.dtype_a, self.dtype_b} <= {*FLOATS, onnx.TensorProto.DOUBLE}

    @property
    def small(self) -> bool:
        """Whether both sides are handed over as they are."""
        known = self.pointer is None and self.size is not None and self.size <= _SMALL
        return known and onnx.TensorProto.BFLOAT16 not in (self.dtype_a, self.dtype_b)  # numpy has no name for it


def trusted(pair: Pair, measured: Distance) -> bool:
    """Whether the plain sums of a pair are good as they are: finite, clear of float32's lower end, without a mask."""
    if not math.isfinite(measured.aa + measured.bb + measured.ee):
        return False
    if pair.is_float and measured.aa >= LARGE * max(measured.count, 1):
        return False
    return measured.peak == 0.0 or min(measured.aa, measured.ee) >= SMALLEST * measured.count


class Measures:
    """Grows the measuring end of a joint graph.

    Each kind of measure is written down once, as a function, and stamped out, but for its constants, which all share:
    functions that the runtime inlines run after everything else, and keep every value alive until then.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._kinds: dict[str, onnx.FunctionProto] = {}

    def add(self, tag: str, pair: Pair, other: str, *, masked: bool) -> None:
        a, b = pair.a, other
        if pair.pointer is not None:
            a, b = (self._pointed_at(f"{tag}/{side}", pair.pointer, x) for side, x in (("a", a), ("b", b)))
        if pair.small:
            for side, value in (("a", a), ("b", b)):
                self.nodes.append(helper.make_node("Identity", [value], [f"{tag}/{side}"]))
                self.outputs.append(helper.make_empty_tensor_value_info(f"{tag}/{side}"))
            return
        kind, body = ("Masked", _MASKED) if masked else self._kind(pair)
        columns = {"Masked": MASKED_COLUMNS, "Rows": ROW_COLUMNS}.get(kind, COLUMNS)
        if kind == "Rows":
            a, b = (self._float32(f"{tag}/{x}", x, t) for x, t in ((a, pair.dtype_a), (b, pair.dtype_b)))
        self._call(kind, "a, b", columns, body, [a, b], [f"{tag}/{c}" for c in columns])
        self.outputs += [helper.make_empty_tensor_value_info(f"{tag}/{c}") for c in columns]

    def _kind(self, pair: Pair) -> tuple[str, str]:
        if pair.pointer is None and pair.dtype_a == pair.dtype_b and pair.dtype_a in _LONG:
            return "Integer", _INT64
        if pair.pointer is None and pair.rank and {pair.dtype_a, pair.dtype_b} <= FLOATS:
            rows = "\n ".join(f"{out} = {self._reduce(op, x, 'last', 1)}" for out, (op, x) in _ROW.items())
            return "Rows", _ROWS.format(rows=rows, total=self._reduce("Sum", "flat", "first", 0))
        return "Plain", _PLAIN

    def _reduce(self, op: str, value: str, axis: str, keep: int) -> str:
        # The axes moved from an attribute to an input: of ReduceSum at 13, of the others at 18.
        if self.opset >= (13 if op == "Sum" else 18):
            return f"Reduce{op} <keepdims = {keep}> ({value}, {axis})"
        return f"Reduce{op} <axes = [{ {'last': -1, 'first': 0}[axis] }], keepdims = {keep}> ({value})"

    def _float32(self, name: str, value: str, dtype: int) -> str:
        if dtype == onnx.TensorProto.FLOAT:
            return value
        self.nodes.append(helper.make_node("Cast", [value], [f"{name}/float32"], to=onnx.TensorProto.FLOAT))
        return f"{name}/float32"

    def _pointed_at(self, name: str, pointer: Pointer, index: str) -> str:
        body = f"""axis = Constant <value = int64[1] {{{pointer.axis}}}> ()
 next = Constant <value = int64[1] {{{pointer.axis + 1}}}> ()
 first = Constant <value = int64[1] {{0}}> ()
 last = Constant <value = int64[1] {{{2**62}}}> ()
 free = Constant <value = int64[1] {{-1}}> ()
 shape = Shape (data)
 before = Slice (shape, first, axis)
 after = Slice (shape, next, last)
 target = Concat <axis = 0> (before, free, after)
 wide = Cast <to = 7> (index)
 shaped = Reshape (wide, target)
 values = GatherElements <axis = {pointer.axis}> (data, shaped)"""
        self._call(f"PointedAt{pointer.axis}", "data, index", ("values",), body, [pointer.data, index], [name])
        return name

    def _call(
        self, kind: str, takes: str, gives: tuple[str, ...], body: str, inputs: list[str], outputs: list[str]
    ) -> None:
        if kind not in self._kinds:
            head = f'<domain: "layerline", opset_import: ["" : {self.opset}]>'
            text = f"{head}\n{kind} ({takes}) => ({', '.join(gives)}) {{\n {body}\n}}"
            self._kinds[kind] = function = parser.parse_function(text)
            self._stamp([n for n in function.node if n.op_type == "Constant"], {}, f"layerline/{kind}")
        function = self._kinds[kind]
        names = {n.output[0]: f"layerline/{kind}/{n.output[0]}" for n in function.node if n.op_type == "Constant"}
        names |= zip((*function.input, *function.output), (*inputs, *outputs), strict=True)
        self._stamp([n for n in function.node if n.op_type != "Constant"], names, outputs[0])

    def _stamp(self, nodes: Sequence[onnx.NodeProto], names: Mapping[str, str], prefix: str) -> None:
        for node in nodes:
            stamped = onnx.NodeProto()
            stamped.CopyFrom(node)
            stamped.input[:] = [names.get(n, f"{prefix}/{n}") for n in node.input]
            stamped.output[:] = [names.get(n, f"{prefix}/{n}") for n in node.output]
            self.nodes.append(stamped)
