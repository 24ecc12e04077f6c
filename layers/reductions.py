"""The measuring end of a joint graph: each kind of measure is one ONNX function that reduces a pair to scalars."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper, parser

from layerline.layers.indices import Pointer

DOMAIN = "layerline"

# Float64 throughout: float32 squares overflow at 1.8e19, and ‖a‖ - ‖b‖ needs every digit where the two are close.
_HEAD = "x = Cast <to = 11> (a)\n y = Cast <to = 11> (b)\n shape_a = Shape (a)\n shape_b = Shape (b)"
_SUMS = """aa = ReduceSumSquare <keepdims = 0> (u)
 bb = ReduceSumSquare <keepdims = 0> (v)
 ee = ReduceSumSquare <keepdims = 0> (e)
 l1 = ReduceSum <keepdims = 0> (e)
 peak = ReduceMax <keepdims = 0> (e)"""
COLUMNS = ("aa", "bb", "ee", "l1", "peak", "shape_a", "shape_b")
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
# Over the elements both sides have finite, with the others counted; a second pass, for feeds that need it.
MASKED_COLUMNS = (*COLUMNS, "bad", "nonfinite_a", "nonfinite_b", "one_sided")
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
 u = Where (bad_m, zero, x)
 v = Where (bad_m, zero, y)
 d = Sub (u, v)
 e = Abs (d)
 {_SUMS}
 {" ".join(_COUNT.format(c) for c in MASKED_COLUMNS[-4:])}"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A value of the reference and the one of the candidate it is compared with.

    Attributes:
        a: name in the reference.
        b: name in the candidate.
        dtype_a: element type in the reference, as in TensorProto.
        dtype_b: element type in the candidate.
        pointer: what it points at, for a value that holds indices; `axis` counts from the front.
    """

    a: str
    b: str
    dtype_a: int
    dtype_b: int
    pointer: Pointer | None = None


class Measures:
    """Grows the measuring end of a joint graph; each kind of measure is one local function, written once."""

    def __init__(self, opset: int, masked: bool) -> None:
        self.opset, self.masked = opset, masked
        self.nodes: list[onnx.NodeProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.functions: dict[str, onnx.FunctionProto] = {}

    def add(self, tag: str, pair: Pair, other: str) -> None:
        a, b, integer = pair.a, other, pair.dtype_a == pair.dtype_b == onnx.TensorProto.INT64
        if pair.pointer is not None:
            a, b = (self._pointed_at(f"{tag}/{side}", pair.pointer, x) for side, x in (("a", a), ("b", b)))
            integer = False
        columns = MASKED_COLUMNS if self.masked else COLUMNS
        kind, body = ("Masked", _MASKED) if self.masked else ("Integer", _INT64) if integer else ("Plain", _PLAIN)
        self._call(kind, "a, b", columns, body, [a, b], [f"{tag}/{c}" for c in columns])
        self.outputs += [helper.make_empty_tensor_value_info(f"{tag}/{c}") for c in columns]

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
        if kind not in self.functions:
            head = f'<domain: "{DOMAIN}", opset_import: ["" : {self.opset}]>'
            text = f"{head}\n{kind} ({takes}) => ({', '.join(gives)}) {{\n {body}\n}}"
            self.functions[kind] = parser.parse_function(text)
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=DOMAIN))
