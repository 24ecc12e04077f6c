"""What shape tensors hold, by name; the wrong answer here is a wrong constant in someone's model."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.graph import shapes
from layerline.graph.symbolic import Symbols, is_size, product, quotient, sizes
from tests.graph.fusing import parse


def elements(body: str, signature: str = "(float[batch, seq, 6] x) => (int64[] y)", **tensors: object) -> object:
    model = ir.serde.deserialize_model(parse(signature, body, **tensors))
    shapes.infer(model)
    return Symbols().of(model.graph.outputs[0])


ONE, TWO, ZERO = np.array(1), np.array([2]), np.array([0])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Shape(x)", ("batch", "seq", 6)),
        ("y = Shape <start = 1>(x)", ("seq", 6)),
        ("y = Shape <start = -1>(x)", (6,)),
        ("s = Shape(x) y = Gather(s, one)", ("seq",)),
        ("s = Shape(x) y = Slice(s, zero, two)", ("batch", "seq")),
        ("s = Shape(x) y = Slice(s, two, zero, zero, minus)", (6, "seq")),
        ("s = Shape(x) a = Gather(s, two) y = Mul(a, two)", (12,)),
        ("s = Shape(x) a = Gather(s, zero) y = Mul(a, two)", ("2*batch",)),
        ("s = Shape(x) a = Gather(s, zero) b = Mul(a, two) y = Div(b, two)", ("batch",)),
        ("s = Shape(x) a = Gather(s, zero) y = Sub(a, a)", (0,)),
        ("s = Shape(x) y = ReduceProd <keepdims = 1>(s)", ("6*batch*seq",)),
        ("s = Shape(x) e = Equal(s, minus) y = Where(e, two, s)", ("batch", "seq", 6)),
        ("s = Shape(x) c = Cast <to = 9>(two) y = Cast <to = 7>(c)", (1,)),
        ("y = Size(x)", ("6*batch*seq",)),
        ("s = Shape(x) a = Gather(s, zero) y = Concat <axis = 0>(a, two, a)", ("batch", 2, "batch")),
    ],
)
def test_elements(body: str, expected: tuple[object, ...]) -> None:
    assert elements(body, one=ONE, two=TWO, zero=ZERO, minus=np.array([-1])) == expected


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(x) a = Gather(s, zero) e = Equal(a, two) y = Where(e, two, zero)",
        "y = Cast <to = 7>(f)",
        "s = Shape(x) r = Unsqueeze(s, zero) y = ReduceMax <keepdims = 0>(r)",
    ],
)
def test_what_cannot_be_known_is_not_claimed(body: str) -> None:
    assert elements(body, two=TWO, zero=ZERO, f=np.array([0.5], np.float32)) is None


def test_difference_may_be_negative() -> None:
    found = elements("s = Shape(x) a = Gather(s, zero) y = Sub(a, two)", two=TWO, zero=ZERO)
    assert isinstance(found, tuple)
    assert not is_size(found[0])


@given(
    st.lists(st.sampled_from(["a", "b", "c", 2, 3, 5]), max_size=6),
    st.lists(st.sampled_from(["a", "b", 2, 3]), max_size=3),
)
def test_quotient_undoes_product(first: list[int | str], second: list[int | str]) -> None:
    numbers = {"a": 7, "b": 11, "c": 13}

    def value(items: list[int | str]) -> int:
        return int(np.prod([numbers.get(str(i), i) for i in items], dtype=object))

    assert quotient([product([*first, *second])], second) == product(first)
    parts = str(product(first)).split("*")
    assert value([int(p) if p.isdecimal() else p for p in parts]) == value(first)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Reshape(x, to)", ("?", 3)),
        ("s = Shape(x) y = Expand(one, s)", ("batch", "seq", 6)),
        ("s = Shape(x) y = ConstantOfShape(s)", ("batch", "seq", 6)),
        ("s = Shape(x) n = Gather(s, i) y = Range(i, n, j)", ("batch",)),
        ("y = Slice(x, zero, end, one)", ("batch", "seq", 6)),
        ("y = Slice(x, zero, two, one)", ("batch", "?", 6)),
        ("y = Relu(x)", ("batch", "seq", 6)),
        ("y = Transpose(x)", (6, "seq", "batch")),
        ("a = Reshape(x, flat) y = Reshape(a, back)", ("?", 6)),
    ],
)
def test_shapes(body: str, expected: tuple[object, ...]) -> None:
    given = {"to": [-1, 3], "zero": [0], "end": [2**62], "one": [1], "two": [2], "flat": [-1], "back": [-1, 6]}
    tensors = {k: np.array(v) for k, v in given.items()} | {"i": np.array(0), "j": np.array(1)}
    model = ir.serde.deserialize_model(parse("(float[batch, seq, 6] x) => (float[] y)", body, **tensors))
    shapes.infer(model)
    found = sizes(model.graph.outputs[0])
    assert found is not None
    assert len(found) == len(expected)
    assert all(e in ("?", f) for e, f in zip(expected, found, strict=True)), found


def test_unknown_sizes_get_names_of_their_own() -> None:
    model = ir.serde.deserialize_model(
        parse("(float[N, M] x, int64[2] s) => (float[] y)", "a = Reshape(x, s) y = Relu(a)")
    )
    shapes.infer(model)
    assert sizes(model.graph.outputs[0]) == ("a#0", "a#1")


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_of_old_exporters_that_mean_any(size: int) -> None:
    proto = parse("(float[4, 3] x) => (float[] y)", "y = Relu(x)")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    model = ir.serde.deserialize_model(proto)
    shapes.infer(model)
    assert sizes(model.graph.outputs[0]) == ("x#0", 3)
