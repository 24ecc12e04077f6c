"""Two models in one ONNX graph that reduces every pair of values to a few scalars: nothing is dumped, nothing grows.

The nodes of the candidate are copied in beside the reference's under a prefix, sharing its inputs and every equal
initializer. A third copy, where asked for, reads the reference's values wherever the candidate has a value of that
name: it shows the error that each layer makes by itself. ONNX Runtime frees a value once its reductions have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx
from onnx import helper, parser

from layerline.layers.indices import Pointer

# Names of the candidate, and of the copy that is fed the reference's values.
B, ISOLATED = "b//", "i//"
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


def joint(
    a: onnx.ModelProto, b: onnx.ModelProto, pairs: Iterable[Pair], *, masked: bool, isolated: bool
) -> onnx.ModelProto:
    """The graph that runs both; its outputs are `<i>/<column>` and, where isolated, `<i>/<column>/isolated`."""
    pairs, shared, functions = list(pairs), _shared(a, b), {(f.domain, f.name) for f in b.functions}
    extra = [i for i in _inputs(b) if i.name not in {j.name for j in a.graph.input}]
    same = {i.name: i.name for i in _inputs(b)} | {t.name: B + t.name for t in b.graph.initializer} | shared
    nodes = [*a.graph.node, *copied(b.graph.node, B, same, functions)]
    initializers = [*a.graph.initializer, *_prefixed(b, shared)]
    measured = [(str(i), p, same.get(p.b, B + p.b)) for i, p in enumerate(pairs)]
    if isolated:
        fed, casts = feeds_of(pairs)
        nodes += casts + copied(b.graph.node, ISOLATED, same | fed, functions)
        defined = {o for n in b.graph.node for o in n.output}
        measured += [
            (f"{i}/isolated", p, ISOLATED + p.b if p.b in defined else same.get(p.b, B + p.b))
            for i, p in enumerate(pairs)
            if p.pointer is None
        ]
    opset = next(o.version for o in a.opset_import if o.domain in {"", "ai.onnx"})
    measures = _Measures(opset, masked)
    for tag, pair, other in measured:
        measures.add(tag, pair, other)
    graph = helper.make_graph(
        [*nodes, *measures.nodes], "compare", [*a.graph.input, *extra], measures.outputs, initializers
    )
    graph.sparse_initializer.extend(a.graph.sparse_initializer)
    opsets = {o.domain: o for o in (*a.opset_import, *b.opset_import, helper.make_opsetid(DOMAIN, 1))}
    model = helper.make_model(graph, opset_imports=list(opsets.values()), ir_version=max(a.ir_version, b.ir_version, 8))
    model.functions.extend([*a.functions, *_renamed_functions(b, functions), *measures.functions.values()])
    return model


def isolated_model(b: onnx.ModelProto, pairs: Iterable[Pair]) -> onnx.ModelProto:
    """The candidate with every paired value read from an input of the value's name in the reference, prefixed `a//`."""
    pairs = list(pairs)
    fed, casts = feeds_of(pairs, "a//")
    same = {i.name: i.name for i in b.graph.input} | {t.name: t.name for t in b.graph.initializer}
    taps = [helper.make_tensor_value_info("a//" + p.a, p.dtype_a, None) for p in pairs]
    made = {o for n in b.graph.node for o in n.output}
    outputs = [helper.make_empty_tensor_value_info(ISOLATED + p.b) for p in pairs if p.b in made]
    model = onnx.ModelProto()
    model.CopyFrom(b)
    del model.graph.node[:], model.graph.output[:], model.graph.value_info[:]
    model.graph.node.extend([*casts, *copied(b.graph.node, ISOLATED, same | fed, set())])
    model.graph.input.extend(taps)
    model.graph.output.extend(outputs)
    return model


def feeds_of(pairs: Iterable[Pair], prefix: str = "") -> tuple[dict[str, str], list[onnx.NodeProto]]:
    """What stands for each candidate value when it is fed by the reference: names, and casts where the types differ."""
    fed: dict[str, str] = {}
    casts: list[onnx.NodeProto] = []
    for pair in pairs:
        if pair.b in fed:
            continue
        fed[pair.b] = prefix + pair.a
        if pair.dtype_a != pair.dtype_b:
            fed[pair.b] = f"cast//{pair.a}"
            casts.append(helper.make_node("Cast", [prefix + pair.a], [fed[pair.b]], to=pair.dtype_b))
    return fed, casts


def copied(
    nodes: Iterable[onnx.NodeProto], prefix: str, renamed: Mapping[str, str], functions: set[tuple[str, str]]
) -> list[onnx.NodeProto]:
    """Copies of the nodes, subgraphs included: names they write get the prefix, names they read are looked up first."""

    def read(name: str) -> str:
        return renamed.get(name, prefix + name) if name else ""

    def write(name: str) -> str:
        return prefix + name if name else ""

    return [_copied_node(n, read, write, functions) for n in nodes]


def _copied_node(
    node: onnx.NodeProto, read: Callable[[str], str], write: Callable[[str], str], functions: set[tuple[str, str]]
) -> onnx.NodeProto:
    out = onnx.NodeProto()
    out.CopyFrom(node)
    out.ClearField("metadata_props")
    out.name = write(node.name)
    out.input[:] = [read(x) for x in node.input]
    out.output[:] = [write(x) for x in node.output]
    if (node.domain, node.op_type) in functions:
        out.op_type = B + node.op_type
    for attribute in out.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            inner = [_copied_node(n, read, write, functions) for n in graph.node]
            for item in (*graph.input, *graph.initializer):
                item.name = write(item.name)
            defined = {o for n in inner for o in n.output} | {i.name for i in (*graph.input, *graph.initializer)}
            for item in graph.output:
                # A branch may also return a value of the outer scope as it is.
                item.name = write(item.name) if write(item.name) in defined else read(item.name)
            del graph.node[:], graph.value_info[:]
            graph.node.extend(inner)
    return out


def _renamed_functions(b: onnx.ModelProto, functions: set[tuple[str, str]]) -> list[onnx.FunctionProto]:
    out = []
    for function in b.functions:
        copy = onnx.FunctionProto()
        copy.CopyFrom(function)
        copy.name = B + function.name
        del copy.node[:]
        copy.node.extend(_copied_node(n, lambda x: x, lambda x: x, functions) for n in function.node)
        out.append(copy)
    return out


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    constants = {t.name for t in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in constants]


def _shared(a: onnx.ModelProto, b: onnx.ModelProto) -> dict[str, str]:
    """Initializers of `b` that `a` has too, whatever their names."""
    known = {_content(t): t.name for t in a.graph.initializer}
    return {t.name: known[_content(t)] for t in b.graph.initializer if _content(t) in known}


def _content(tensor: onnx.TensorProto) -> tuple[int, tuple[int, ...], bytes]:
    data = tensor.raw_data
    if not data:
        nameless = onnx.TensorProto()
        nameless.CopyFrom(tensor)
        nameless.name = ""
        data = nameless.SerializeToString(deterministic=True)
    return tensor.data_type, tuple(tensor.dims), data


def _prefixed(b: onnx.ModelProto, shared: Mapping[str, str]) -> list[onnx.TensorProto]:
    out = []
    for tensor in b.graph.initializer:
        if tensor.name not in shared:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = B + tensor.name
            out.append(copy)
    return out


class _Measures:
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
