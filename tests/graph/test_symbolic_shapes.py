"""What shape tensors hold, by name; the wrong answer here is a wrong constant in someone's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.graph.analysis import shape_inference
from layerline.graph.analysis.size_algebra import is_size, product, quotient, sizes
from layerline.graph.analysis.symbolic_shapes import Symbols
from tests.graph.fusing import normal, parse, prove, run


def elements(body: str, signature: str = "(float[batch, seq, 6] x) => (int64[] y)", **tensors: Any) -> object:
    model = ir.serde.deserialize_model(parse(signature, body, **tensors))
    shape_inference.infer(model)
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
    shape_inference.infer(model)
    found = sizes(model.graph.outputs[0])
    assert found is not None
    assert len(found) == len(expected)
    assert all(e in ("?", f) for e, f in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("items", "whole"),
    [
        (["a + 1"], "a + 1"),
        (["a + 1", 1], "a + 1"),
        (["a + 1", "b"], "(a + 1)*b"),
        (["(3*h + 1)", "batch"], "(3*h + 1)*batch"),
        (["(((h - 1)//4)) + 1", "(((w - 1)//4)) + 1"], "((((h - 1)//4)) + 1)*((((w - 1)//4)) + 1)"),
        (["2*((h//4))", 3], "6*((h//4))"),
        (["h//2", 2], "2*(h//2)"),
        (["Min(64, 2*seq)", 2], "2*Min(64, 2*seq)"),
        (["/Shape_0#0", 4], "4*/Shape_0#0"),
        (["²", 4], "4*²"),
        (["9" * 5000, 4], f"4*{'9' * 5000}"),
    ],
)
def test_a_sum_is_one_factor(items: list[int | str], whole: str) -> None:
    assert product(items) == whole
    for item in items:
        rest = list(items)
        rest.remove(item)
        # What its own exporter wrote in brackets, or without, may come back the other way.
        assert str(quotient([whole], [item])).strip("()") == str(product(rest)).strip("()")


def test_sizes_that_differ_have_names_that_differ() -> None:
    assert product(["(3*h + 1)", "batch"]) != product(["(3*batch*h + 1)"])
    assert product(["a + 1", "b"]) != product(["a + 1*b"])
    assert quotient(["(3*h + 1)"], [3]) is None and quotient(["2*h + 1"], [2]) is None


def test_unknown_sizes_get_names_of_their_own() -> None:
    model = ir.serde.deserialize_model(
        parse("(float[N, M] x, int64[2] s) => (float[] y)", "a = Reshape(x, s) y = Relu(a)")
    )
    shape_inference.infer(model)
    assert sizes(model.graph.outputs[0]) == ("a#0", "a#1")


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_of_old_exporters_that_mean_any(size: int) -> None:
    proto = parse("(float[4, 3] x) => (float[] y)", "y = Relu(x)")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    model = ir.serde.deserialize_model(proto)
    shape_inference.infer(model)
    assert sizes(model.graph.outputs[0]) == ("x#0", 3)


WRAPS = [
    ("(int32[1] y)", "s = Shape(x) c = Cast <to = 6>(s) y = Mul(c, k)", {"k": np.array([100000], np.int32)}),
    ("(int32[1] y)", "s = Shape(x) c = Cast <to = 6>(s) d = Mul(c, c) y = Add(d, c)", {}),
    ("(int32[1] y)", "s = Shape(x) c = Cast <to = 6>(s) y = Sub(k, c)", {"k": np.array([-(2**31)], np.int32)}),
    ("(int32[1] y)", "s = Shape(x) q = Mul(s, s) c = Cast <to = 6>(q) y = Identity(c)", {}),
    ("(int64[1] y)", "s = Shape(x) q = Mul(s, s) c = Cast <to = 6>(q) y = Cast <to = 7>(c)", {}),
    ("(int64[1] y)", "s = Shape(x) y = Mul(s, k)", {"k": np.array([2**62])}),
    ("(int64[1] y)", "s = Shape(x) y = Add(s, k)", {"k": np.array([2**63 - 1])}),
    ("(int64[1] y)", "s = Shape(x) y = Sub(k, s)", {"k": np.array([-(2**63)])}),
    ("(int64[1] y)", "s = Shape(x) c = Concat <axis = 0>(s, k, k) y = ReduceProd(c)", {"k": np.array([2**31])}),
    ("(int32[1] y)", "s = Shape(x) b = Cast <to = 9>(s) y = Cast <to = 6>(b)", {}),
    ("(int64[1] y)", "s = Shape(x) b = Cast <to = 3>(s) y = Cast <to = 7>(b)", {}),
    ("(int64[1] y)", "s = Shape(x) b = Cast <to = 2>(s) y = Cast <to = 7>(b)", {}),
    ("(int64[1] y)", "s = Shape(x) b = Cast <to = 13>(s) y = Cast <to = 7>(b)", {}),
]  # fmt: skip


@pytest.mark.parametrize(("output", "body", "tensors"), WRAPS)
@pytest.mark.parametrize("size", ["100000", "N"])
def test_integers_wrap_as_they_do_in_the_runtime(output: str, body: str, tensors: dict[str, Any], size: str) -> None:
    model = parse(f"(float[{size}] x) => {output}", body, **tensors)
    done = prove(model, {"x": normal(100000)})
    for count in (100000, 70000) if size == "N" else (100000,):
        feed = {"x": np.zeros(count, np.float32)}
        np.testing.assert_array_equal(run(done.model, feed)["y"], run(model, feed)["y"])


@pytest.mark.parametrize(
    ("body", "known"),
    [
        ("c = Cast <to = 6>(s) d = Mul(c, k) e = Div(d, k) y = Cast <to = 7>(e)", False),
        ("c = Cast <to = 6>(s) y = Cast <to = 7>(c)", True),
        ("d = Mul(s, two) e = Div(d, two) y = Identity(e)", True),
        ("d = Mul(s, large) e = Div(d, large) y = Identity(e)", False),
        ("d = Mul(s, s) c = Cast <to = 6>(d) y = Cast <to = 7>(c)", False),
    ],
)
def test_product_that_may_wrap_is_not_followed_by_name(body: str, known: bool) -> None:
    """n * 100000 / 100000 is n in int64, and in int32 only while n is small."""
    given = {"k": np.array([100000], np.int32), "two": np.array([2]), "large": np.array([2**40])}
    found = elements(f"s = Shape(x) {body}", "(float[n] x) => (int64[] y)", **given)
    assert (found == ("n",)) is known


@pytest.mark.parametrize(("attributes", "expected"), [("", ("2*n",)), (", noop_with_empty_axes = 1", ("n", 2))])
def test_reduction_over_no_axes(attributes: str, expected: tuple[object, ...]) -> None:
    body = f"s = Shape(x) y = ReduceProd <keepdims = 0{attributes}>(s)"
    assert elements(body, "(float[n, 2] x) => (int64[] y)", opset=18) == expected
