"""Files of every kind that `pipe` reads, as strangers may send them: a few fields, keys or bytes of whole ones changed.

Each text that is put into a file tries to be code of Python, of a shell or of YAML, or a path that leads elsewhere.
Code that runs makes a file `PWNED`.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from tests.fuzz.world import CANARY

Draw = st.DrawFn
_CALL = f'__import__("os").system("touch {CANARY}")'
_SHELL = f"touch {CANARY}"
TEXTS = [
    f'x"""+str({_CALL})+"""', f"x'''+str({_CALL})+'''", f'"; {_CALL}; "', f"'+{_CALL}+'", f"{{{_CALL}}}",
    f"\n{_CALL}\n", f"#\n{_CALL}", f"$({_SHELL})", f"`{_SHELL}`", f"; {_SHELL}",
    f"!!python/object/apply:os.system ['{_SHELL}']",
    "\\N", "\\x", "\\", "x\\\n", "%s{0}{data}", "[bold]x[/bold]", ":bug:", "<script>alert(1)</script>", "</script>",
    "n\ntask: other.py", "n\nimport-onnx: {tolerance: 1e9}", "x: y", "x #y", "- x", "*x", "&x", "!x", "<<", "~", "null",
    "x\x85task: other.py", "x\u2028y", "x\u202ey", "\x1b[2J", "\x1b]0;x\x07", "x\0y", "x\ry", "\x7f", "\x9b", "\ufeff",
    "../outside/victim", "../../outside/victim", "../victim", "/etc/passwd", "/dev/zero", "link/victim", "queue.py",
    "json.py", "__pycache__/x.pyc", ".", "..", "a/b", "C:\\x", "p/pipe.yaml", "task.py", "pipe.yaml", ".layerline/x",
    "9" * 5000, "-1", "²", "1_0", "0x10", "nan", "inf", "x" * 5000, "größe", "大小", "x", "y", "w", "conv", "batch",
    "on", "1e3", "",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 4, 7, 8, 16, 40, 64, 255, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
texts = st.sampled_from(TEXTS) | st.text(max_size=8)
numbers = st.sampled_from(NUMBERS)
floats = st.sampled_from([0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan")])


@st.composite
def flipped(draw: Draw, content: bytes) -> bytes:
    """Bytes of which some are others, are gone or there twice, or are cut off."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(out) - 1, 0)))
        how = draw(st.sampled_from(["set", "cut", "drop", "insert", "repeat"]))
        if how == "set" and out:
            out[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del out[at:]
        elif how == "drop":
            del out[at : at + draw(st.integers(1, 9))]
        elif how == "insert":
            strange = draw(st.sampled_from([b"\xff" * 12, b"\0" * 8, b"\x80", b"((((", b"[" * 100]))
            out[at:at] = strange * draw(st.sampled_from([1, 1, 50]))
        else:
            out[at:at] = out[at : at + 64]
    return bytes(out)


# ONNX

_PLAIN = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3,6,6] x) => (float[n,2] y) {
  c = Conv <pads = [1,1,1,1]> (x, w, b)  r = Relu (c)  p = GlobalAveragePool (r)  f = Flatten (p)  y = Softmax (f) }"""
_BODIES = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y) {
  s = ReduceMax <keepdims = 0> (x)  zero = Constant <value = float {0.0}> ()  big = Greater (s, zero)
  a = If (big) <then_branch = t () => (float[n,4] q) { q = Add (x, v) },
                else_branch = e () => (float[n,4] q) { q = Neg (x) }>
  y = Loop (rounds, yes, a) <body = l (int64 i, bool c, float[n,4] k) => (bool again, float[n,4] o) {
    o = Mul (k, v)  again = Identity (c) }> }"""
_FUNCTION = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[n,4] x) => (float[n,4] y) {
  h = own.twice <alpha: float = 2.0> (x)  y = own.twice (h) }
<domain: "own", opset_import: ["" : 17]> twice <alpha: float = 1.0> (a) => (o) {
  d = Constant <value_float: float = @alpha> ()  e = Mul (a, d)  o = Add (e, a) }"""
_SHAPES = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, int64[n] ids) => (float[n,k] y) {
  e = Gather (table, ids)  s = Shape (x)  f = ConstantOfShape (s)  q = Concat <axis = 1> (e, x, f)
  i = Range (begin, stop, step)  j = Cast <to = 1> (i)  m = ReduceMax <keepdims = 0> (j)  y = Add (q, m) }"""


def _model(text: str, **stored: Any) -> onnx.ModelProto:
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items())
    return model


def _outside() -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[400], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "1600")):
        weight.external_data.add(key=key, value=value)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 400]) for n in ("x", "y")]
    node = helper.make_node("Add", ["x", "w"], ["y"], "add")
    graph = helper.make_graph([node], "g", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


OUTSIDE = {"w.bin": np.arange(400, dtype="f").tobytes(), "queue.py": f"{_CALL}\n".encode() * 40}
_ROUNDS = {"rounds": np.int64(2), "yes": np.True_, "v": np.ones(4, "f")}
_RANGE = {"begin": np.int64(0), "stop": np.int64(3), "step": np.int64(1), "one": np.ones(1, "i8")}
MODELS = [
    _model(_PLAIN, w=np.ones((2, 3, 3, 3), "f"), b=np.ones(2, "f")),
    _model(_BODIES, **_ROUNDS),
    _model(_FUNCTION),
    _model(_SHAPES, table=np.ones((5, 4), "f"), **_RANGE),
    _outside(),
]


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


@st.composite
def models(draw: Draw) -> bytes:
    """A model with some fields of its graph, bodies, functions, tensors and types changed; or with bytes changed."""
    model = copy.deepcopy(draw(st.sampled_from(MODELS)))
    if draw(st.integers(0, 5)) == 0:
        return draw(flipped(model.SerializeToString()))
    for _ in range(draw(st.integers(1, 3))):
        places = [m for m in _messages(model) if m.DESCRIPTOR.fields]
        place = draw(st.sampled_from(places))
        _change(draw, place, places)
    return model.SerializeToString()


def _change(draw: Draw, message: Message, others: list[Message]) -> None:
    field = draw(st.sampled_from([f for f, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)))
    if draw(st.integers(0, 3)) == 0:
        field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if field.is_repeated:
        _change_list(draw, getattr(message, field.name), field, others)
    elif field.message_type is not None:
        same = [m for m in others if m.DESCRIPTOR is field.message_type]
        message.ClearField(field.name)
        if same and draw(st.booleans()):
            getattr(message, field.name).CopyFrom(copy.deepcopy(draw(st.sampled_from(same))))
    elif draw(st.integers(0, 4)) == 0:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(draw, field))


def _change_list(draw: Draw, items: Any, field: Any, others: list[Message]) -> None:
    how = draw(st.sampled_from(["drop", "twice", "new", "swap"]))
    at = draw(st.integers(0, max(len(items) - 1, 0)))
    if how == "drop" and len(items):
        del items[at]
    elif how == "twice" and len(items):
        items.extend([copy.deepcopy(items[at])] * draw(st.sampled_from([1, 1, 40])))
    elif how == "swap" and len(items) > 1:
        kept = [copy.deepcopy(i) for i in items]
        kept[at], kept[0] = kept[0], kept[at]
        del items[:]
        items.extend(kept)
    elif field.message_type is None:
        value = _value(draw, field)
        if len(items) and draw(st.booleans()):
            items[at] = value
        else:
            items.append(value)
    elif same := [m for m in others if m.DESCRIPTOR is field.message_type]:
        items.append(copy.deepcopy(draw(st.sampled_from(same))))


def _value(draw: Draw, field: Any) -> Any:
    kinds = field.cpp_type
    if kinds == field.CPPTYPE_STRING:
        value = draw(texts)
        encoded = value.encode("utf-8", "replace")
        return encoded if field.type == field.TYPE_BYTES else encoded.decode()
    if kinds in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return draw(floats)
    if kinds == field.CPPTYPE_ENUM:
        return draw(st.sampled_from([v.number for v in field.enum_type.values]))
    number = draw(numbers | st.integers(0, 30))
    if kinds == field.CPPTYPE_INT32:
        return max(min(number, 2**31 - 1), -(2**31))
    return max(number, 0) if kinds == field.CPPTYPE_UINT64 else number


# JSON and YAML

values = st.one_of(
    texts, numbers, floats, st.none(), st.booleans(), st.just([]), st.just({}), st.just({"a": [None]}),
    st.sampled_from([10**30, 10**400, "../../../victim", ["x"] * 3, {"": 0}]),
)  # fmt: skip


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value: what it lies in, and its key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _spots(tree[key])


@st.composite
def documents(draw: Draw, document: Any) -> Any:
    """A document with some values replaced, gone, moved, or under another key."""
    out = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        spots = list(_spots(out))
        inside, key = draw(st.sampled_from(spots))
        how = draw(st.sampled_from(["set", "set", "drop", "copy", "key"]))
        if how == "drop" and inside is not out:
            del inside[key]
        elif how == "copy":
            other, name = draw(st.sampled_from(spots))
            inside[key] = copy.deepcopy(other[name])
        elif how == "key" and isinstance(inside, dict):
            inside[draw(texts)] = inside[key]
        else:
            # Lists and dicts of the strategy are the same objects in every example, and later changes may go into them.
            inside[key] = copy.deepcopy(draw(values))
    return out[0]


@st.composite
def records(draw: Draw, text: bytes) -> bytes:
    """A JSON file with values or bytes changed."""
    if draw(st.integers(0, 3)) == 0:
        others = [b"", b"3", b"null", b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"\xff\xfe"]
        return draw(flipped(text) | st.sampled_from(others))
    return json.dumps(draw(documents(json.loads(text))), ensure_ascii=draw(st.booleans())).encode("utf-8", "replace")


_BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
SNIPPETS = [
    _BOMB, "<<: *x\n", "a: &a [*a]\n", "[" * 100_000, "- " * 1000, "? " * 300, "a: 2020-13-45\n", "%YAML 1.1\n---\n",
    "---\n...\n---\n", f"a: !!python/object/apply:os.system ['{_SHELL}']\n", "a: !!python/name:os.system x\n",
    "a: !!binary x\n", "#" + "x" * 200_000, "\t", "\0", "\x1b",
]  # fmt: skip


@st.composite
def yaml(draw: Draw, document: Any) -> bytes:
    """A YAML document with values changed, or text that is put into it."""
    text = json.dumps(draw(documents(document)), allow_nan=True, ensure_ascii=False)
    if draw(st.integers(0, 2)) == 0:
        text = draw(st.sampled_from(SNIPPETS)) + text
    if draw(st.integers(0, 4)) == 0:
        return draw(flipped(text.encode("utf-8", "replace")))
    return text.encode("utf-8", "replace")


@st.composite
def overrides(draw: Draw, keys: list[str]) -> str:
    """An argument of `--set`."""
    short = [text for text in SNIPPETS if len(text) < 100_000]
    key, value = draw(st.sampled_from(keys) | texts), draw(values | st.sampled_from(short))
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}{draw(st.sampled_from(['=', '=', '=', ':', '']))}{text}".replace("\0", "\\0")


# Arrays and checkpoints


@st.composite
def headers(draw: Draw) -> bytes:
    """An .npy file whose header says something else than it holds."""
    strange: list[Any] = [[1] * 40, ["x"], [10**30], [True]]
    shape = draw(st.lists(numbers | st.integers(0, 20), max_size=4) | st.sampled_from(strange))
    kinds = ["<f4", "<i8", "|O", "|S5", "<U9", "<M8[s]", "|V8", "<f2", "<c8", "|b1", "<f16"]
    kind = draw(st.sampled_from(kinds) | texts)
    header = f"{{'descr': {kind!r}, 'fortran_order': {draw(st.booleans())}, 'shape': {tuple(shape)!r}}}"
    header = draw(st.sampled_from([header, header, f"{_CALL}", "(" * 4000, "{" * 300])) + "\n"
    body = draw(st.sampled_from([np.ones((4, 4), "f").tobytes(), b"", pickle.dumps(_Code()), b"\xff" * 64]))
    size = len(header.encode())
    return b"\x93NUMPY\x01\x00" + min(size, 65535).to_bytes(2, "little") + header.encode() + body


class _Code:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.system, (_SHELL,)


@st.composite
def samples(draw: Draw) -> bytes:
    """An .npz for inputs of four numbers."""
    arrays = {"x": np.ones((4, 4), "f"), "label": np.zeros(4, "i8")}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as archive:
        for name, array in arrays.items():
            held = io.BytesIO()
            np.save(held, array * draw(st.sampled_from([1, 1, 1, np.nan, 1e30])) if name == "x" else array)
            content = draw(headers()) if draw(st.integers(0, 3)) == 0 else held.getvalue()
            named = name if draw(st.integers(0, 3)) else draw(texts)
            if f"{named}.npy" in archive.namelist():
                continue
            archive.writestr(f"{named}{draw(st.sampled_from(['.npy', '.npy', '']))}" or "x", content)
    content = file.getvalue()
    return draw(flipped(content)) if draw(st.integers(0, 2)) == 0 else content


WEIGHTS = {"0.weight": np.arange(8, dtype="f").reshape(2, 4), "0.bias": np.ones(2, "f")}


@st.composite
def safetensors(draw: Draw) -> bytes:
    """A safetensors file whose header says something else than it holds, or with bytes changed."""
    header, at, body = dict[str, Any](), 0, b""
    for name, array in WEIGHTS.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at, body = at + array.nbytes, body + array.tobytes()
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt", "layerline": json.dumps({"lanes": ["x"], "crc": 0})}
    text = draw(records(json.dumps(header).encode()))
    size = draw(st.sampled_from([len(text)] * 6 + NUMBERS))
    content = (size % 2**64).to_bytes(8, "little") + text + body
    return draw(flipped(content)) if draw(st.integers(0, 5)) == 0 else content


@st.composite
def checkpoints(draw: Draw) -> bytes:
    """A file of torch.save, or a bare pickle, with code, other objects, or changed entries and bytes in it."""
    import torch

    state: Any = {n: torch.from_numpy(a.copy()) for n, a in WEIGHTS.items()}
    trees: list[Any] = [state, {"state_dict": state}, {"ema": state, "model": state}, [state], state["0.bias"]]
    tree = draw(st.sampled_from(trees))
    if isinstance(tree, dict) and draw(st.booleans()):
        empty, sparse = torch.zeros(2, device="meta"), torch.eye(2).to_sparse()
        strange: list[Any] = [_Code(), empty, sparse, "x", 10**400, float("nan"), {1: 2}]
        tree = {**tree, draw(texts): draw(st.sampled_from(strange))}
    file = io.BytesIO()
    if draw(st.integers(0, 4)) == 0:
        pickle.dump({**state, "x": _Code()} if draw(st.booleans()) else state, file)
    else:
        torch.save(tree, file, _use_new_zipfile_serialization=draw(st.integers(0, 3)) > 0)
    content = file.getvalue()
    if content.startswith(b"PK") and draw(st.booleans()):
        content = _repacked(draw, content)
    return draw(flipped(content)) if draw(st.integers(0, 2)) == 0 else content


def _repacked(draw: Draw, content: bytes) -> bytes:
    """An archive with one entry changed, renamed, gone or packed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as given, zipfile.ZipFile(file, "w") as out:
        chosen = draw(st.sampled_from(given.namelist()))
        how = draw(st.sampled_from(["bytes", "name", "gone", "packed", "empty"]))
        for entry in given.namelist():
            name, inside, packed = entry, given.read(entry), zipfile.ZIP_STORED
            if entry == chosen and how == "gone":
                continue
            if entry == chosen and how == "bytes":
                inside = draw(flipped(inside))
            elif entry == chosen and how == "name":
                name = f"archive/{draw(texts)}"
            elif entry == chosen and how == "packed":
                inside, packed = inside + b"\0" * 10**6, zipfile.ZIP_DEFLATED
            elif entry == chosen:
                inside = b""
            out.writestr(name, inside, packed)
    return file.getvalue()
