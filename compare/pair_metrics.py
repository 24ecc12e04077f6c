"""The measuring end of a joint graph: a few nodes that reduce each pair of values to the sums of a `Distance`.

Small pairs, and those with NaN, Inf or a mask, are handed over as they are: `tensor_distance` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx import parser

from layerline.compare.tensor_distance import LARGE, Distance, diff_arrays
from layerline.compare.topk_indices import Pointer
from layerline.graph.analysis.assembly import Assembly
from layerline.graph.analysis.ir_queries import first_output, name_of

# Rows are summed in float32 and the rows' sums in float64: half the time of float64 throughout, and as good as that
# while the squares stay within float32's range, which `trusted` tells. The last axis is short, so no sum is long. One
# Cast a pair: with thousands of them in a graph onnxruntime takes seconds to open it.
_ROWS = """last = Constant <value = int64[1] {{-1}}> ()
 first = Constant <value = int64[1] {{0}}> ()
 table = Constant <value = int64[2] {{-1, 4}}> ()
 d = Sub (a, b)
 e = Abs (d)
 aa = {square_a}
 bb = {square_b}
 ee = {square_d}
 l1 = {sum_e}
 row = Concat <axis = -1> (aa, bb, ee, l1)
 wide = Cast <to = 11> (row)
 flat = Reshape (wide, table)
 sums = {total}
 peak = ReduceMax <keepdims = 0> (e)
 shape_a = Shape (a)
 shape_b = Shape (b)"""
# Float64 throughout, where a side is no float, or a scalar without an axis to sum along.
_PLAIN = """x = Cast <to = 11> (a)
 y = Cast <to = 11> (b)
 d = Sub (x, y)
 {error}
 aa = ReduceSumSquare <keepdims = 0> (x)
 bb = ReduceSumSquare <keepdims = 0> (y)
 ee = ReduceSumSquare <keepdims = 0> (e)
 l1 = ReduceSum <keepdims = 0> (e)
 peak = ReduceMax <keepdims = 0> (e)
 shape_a = Shape (a)
 shape_b = Shape (b)"""
# Integers past 2^53 collapse in float64; two that differ must never look equal.
_INTEGER_ERROR = """f = Abs (d)
 same = Equal (a, b)
 differ = Not (same)
 least = Cast <to = 11> (differ)
 e = Max (f, least)"""
_CHANNELS = """ x = Cast <to = 11> (a)
 y = Cast <to = 11> (b)
 z = Cast <to = 11> (alone)
 d = Sub (x, y)
 f = Sub (x, z)
 e = Abs (f)"""
# How many elements differ, of how many.
_DIFFERING = """same = Equal (a, b)
 differ = Not (same)
 e = Cast <to = 11> (differ)
 size = Size (a)
 aa = Cast <to = 11> (size)
 bb = Cast <to = 11> (size)
 ee = ReduceSum <keepdims = 0> (e)
 l1 = ReduceSum <keepdims = 0> (e)
 peak = ReduceMax <keepdims = 0> (e)
 shape_a = Shape (a)
 shape_b = Shape (b)"""
_SUMS = ("aa", "bb", "ee", "l1")
_ENDS = ("peak", "shape_a", "shape_b")
# Up to so many elements (most are shapes) both sides are handed over: each node that reduces takes time to set up.
_SMALL = 64
_LONG = (ir.DataType.INT64, ir.DataType.UINT64)
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_ANY_FLOAT = FLOATS | {ir.DataType.DOUBLE}
# Mean square from which on float32 rounds a square as it rounds any number: below 1e-38 digits go missing.
SMALLEST = 1e-35


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A value of the reference and the one of the candidate it is compared with."""

    a: str  # name in the reference
    b: str  # name in the candidate
    dtype_a: int  # element type in the reference, as ONNX numbers them
    dtype_b: int  # element type in the candidate
    rank: int = 0  # number of axes, where known
    size: int | None = None  # number of elements, where known and the same on both sides
    pointer: Pointer | None = None  # what it points at, for a value that holds indices; `axis` counts from the front
    counted: bool = False  # whether its elements only count as equal or different: numbers of classes have no distance

    @property
    def is_float(self) -> bool:
        """Whether both sides hold floating point numbers, which masks may have been added to."""
        return self.pointer is None and {self.dtype_a, self.dtype_b} <= _ANY_FLOAT

    @property
    def small(self) -> bool:
        """Whether both sides are handed over for their size."""
        return self.pointer is None and self.size is not None and self.size <= _SMALL


def trusted(pair: Pair, measured: Distance) -> bool:
    """Whether a pair's sums in the graph are good as they are: finite, clear of float32's lower end, without a mask."""
    if not math.isfinite(measured.aa + measured.bb + measured.ee):
        return False
    if pair.is_float and measured.aa >= LARGE * max(measured.count, 1):
        return False
    return measured.peak == 0.0 or min(measured.aa, measured.ee) >= SMALLEST * measured.count


def distance(outputs: Mapping[str, Any], tag: str) -> Distance:
    """The distance of a pair from what a joint graph gave for it; zero for a pair that it does not measure."""
    if f"{tag}/a" in outputs:
        return diff_arrays(outputs[f"{tag}/a"], outputs[f"{tag}/b"])
    if f"{tag}/peak" not in outputs:
        return Distance()
    shape_a = tuple(outputs[f"{tag}/shape_a"].tolist())
    shape_b = tuple(outputs[f"{tag}/shape_b"].tolist())
    if shape_a != shape_b:
        return Distance(mismatch=f"shape {shape_a} against {shape_b}")
    sums = outputs.get(f"{tag}/sums")
    if sums is None:
        sums = [outputs[f"{tag}/{name}"] for name in _SUMS]
    aa, bb, ee, l1 = map(float, sums)
    peak = max(float(outputs[f"{tag}/peak"]), 0.0)  # the maximum over no element is -inf
    return Distance(count=math.prod(shape_a), aa=aa, bb=bb, ee=ee, l1=l1, peak=peak)


class Measures:
    """Grows the measuring end of a joint graph.

    Each kind of measure is written down once, as a function, and stamped out, but for its constants, which all share:
    functions that the runtime inlines run after everything else, and keep every value alive until then.
    """

    def __init__(self, graph: Assembly, opset: int) -> None:
        self.graph = graph
        self.opset = opset
        self.nodes: list[ir.Node] = []
        self.outputs: list[str] = []
        self._kinds: dict[str, ir.Function] = {}

    def add(self, tag: str, pair: Pair, other: str, *, whole: bool) -> None:
        """Measures a pair.

        Args:
            tag: what its outputs are called by.
            other: the candidate's side.
            whole: whether both sides are handed over.
        """
        sides = {"a": (pair.a, pair.dtype_a), "b": (other, pair.dtype_b)}
        if pair.pointer is not None:
            for side, (name, _) in sides.items():
                sides[side] = (self._pointed_at(f"{tag}/{side}", pair.pointer, name), ir.DataType.DOUBLE)
        rows = pair.pointer is None and pair.rank > 0 and {pair.dtype_a, pair.dtype_b} <= FLOATS
        for side, (name, dtype) in sides.items():
            # numpy has no bfloat16.
            if dtype == ir.DataType.BFLOAT16 or (rows and dtype != ir.DataType.FLOAT):
                wide = f"{tag}/{side}/float32"
                self.nodes.append(self.graph.node("Cast", [name], wide, to=int(ir.DataType.FLOAT)))
                sides[side] = (wide, ir.DataType.FLOAT)
        names = [name for name, _ in sides.values()]
        columns: Sequence[str] = (*_SUMS, *_ENDS)
        if whole or pair.small:
            columns = ("a", "b")
            for name, column in zip(names, columns, strict=True):
                self.nodes.append(self.graph.node("Identity", [name], f"{tag}/{column}"))
        elif rows:
            columns = ("sums", *_ENDS)
            self._call("Rows", "a, b", columns, self._rows(), names, tag)
        elif pair.counted:
            self._call("Differing", "a, b", columns, _DIFFERING, names, tag)
        elif pair.pointer is None and pair.dtype_a == pair.dtype_b and pair.dtype_a in _LONG:
            self._call("Integer", "a, b", columns, _PLAIN.format(error=_INTEGER_ERROR), names, tag)
        else:
            self._call("Plain", "a, b", columns, _PLAIN.format(error="e = Abs (d)"), names, tag)
        self.outputs += [f"{tag}/{column}" for column in columns]

    def hand_over(self, name: str, value: str, dtype: int) -> None:
        """Makes a value an output as it is; numpy has no bfloat16, so that becomes float32."""
        if dtype == ir.DataType.BFLOAT16:
            self.nodes.append(self.graph.node("Cast", [value], name, to=int(ir.DataType.FLOAT)))
        else:
            self.nodes.append(self.graph.node("Identity", [value], name))
        self.outputs.append(name)

    def by_channel(self, tag: str, pair: Pair, others: tuple[str, str], axis: int) -> None:
        """Measures a pair of floats along an axis: a vector a column, over all other axes.

        Args:
            others: the candidate's side, and the same computed from the reference's values.
        """
        axes = [place for place in range(pair.rank) if place != axis]
        columns = {"aa": "SumSquare (x)", "ee": "SumSquare (d)", "own": "SumSquare (f)"}
        columns |= {"peak": "Max (e)", "least": "Min (x)", "greatest": "Max (x)"}
        body = f"axes = Constant <value = int64[{len(axes)}] {{{', '.join(map(str, axes))}}}> ()\n"
        body += _CHANNELS
        for column, text in columns.items():
            op, _, value = text.partition(" ")
            body += f"\n {column} = {self._reduce(op, value.strip('()'), 'axes', axes, 0)}"
        inputs = [pair.a, *others]
        self._call(f"Channels{pair.rank}of{axis}", "a, b, alone", list(columns), body, inputs, tag)
        self.outputs += [f"{tag}/{column}" for column in columns]

    def _rows(self) -> str:
        squares = {f"square_{value}": self._reduce("SumSquare", value, "last", [-1], 1) for value in ("a", "b", "d")}
        sum_e = self._reduce("Sum", "e", "last", [-1], 1)
        return _ROWS.format(**squares, sum_e=sum_e, total=self._reduce("Sum", "flat", "first", [0], 0))

    def _reduce(self, op: str, value: str, axes: str, numbers: list[int], keep: int) -> str:
        # The axes moved from an attribute to an input: of ReduceSum at 13, of the others at 18.
        if self.opset >= (13 if op == "Sum" else 18):
            return f"Reduce{op} <keepdims = {keep}> ({value}, {axes})"
        return f"Reduce{op} <axes = {numbers}, keepdims = {keep}> ({value})"

    def _pointed_at(self, tag: str, pointer: Pointer, index: str) -> str:
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
 elements = GatherElements <axis = {pointer.axis}> (data, shaped)
 values = Cast <to = 11> (elements)"""
        self._call(f"PointedAt{pointer.axis}", "data, index", ["values"], body, [pointer.data, index], tag)
        return f"{tag}/values"

    def _call(self, kind: str, takes: str, gives: Sequence[str], body: str, inputs: list[str], tag: str) -> None:
        """Stamps out a function; its outputs are `<tag>/<name>`, and its constants stand in the graph once."""
        prefix = f"layerline/{kind}"
        if kind not in self._kinds:
            head = f'<domain: "layerline", opset_import: ["" : {self.opset}]>'
            text = f"{head}\n{kind} ({takes}) => ({', '.join(gives)}) {{\n {body}\n}}"
            self._kinds[kind] = ir.serde.deserialize_function(parser.parse_function(text))
            self._stamp([node for node in self._kinds[kind] if node.op_type == "Constant"], {}, prefix)
        function = self._kinds[kind]
        names: dict[str | None, str] = {}
        for node in function:
            if node.op_type == "Constant":
                names[first_output(node)] = f"{prefix}/{first_output(node)}"
        names |= zip(map(name_of, function.inputs), inputs, strict=True)
        names |= {value.name: f"{tag}/{value.name}" for value in function.outputs}
        self._stamp([node for node in function if node.op_type != "Constant"], names, f"{tag}/{kind}")

    def _stamp(self, nodes: Sequence[ir.Node], names: Mapping[str | None, str], prefix: str) -> None:
        def renamed(name: str) -> str:
            return names.get(name, f"{prefix}/{name}")

        self.nodes += [self.graph.copy(node, renamed, renamed) for node in nodes]
