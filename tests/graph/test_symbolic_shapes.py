"""What shape tensors hold, by name; the wrong answer here is a wrong constant in someone's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerline.graph.analysis import shape_inference
from layerline.graph.analysis.shape_inference import ShapeSymbols
from layerline.graph.analysis.symbolic_sizes import is_size, sizes
from tests.forms import proto
from tests.graph.fusing import normal, parse, prove, run


def elements(body: str, signature: str = "(float[batch, seq, 6] x) => (int64[] y)", **tensors: Any) -> object:
    model = ir.serde.deserialize_model(parse(signature, body, **tensors))
    shape_inference.infer(model)
    return ShapeSymbols().of(model.graph.outputs[0])


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


SIZES = st.lists(st.sampled_from(["a", "b", "c", 2, 3, 5]), min_size=1, max_size=5)


@settings(deadline=None)
@given(SIZES, SIZES)
def test_joining_and_splitting_axes_gives_them_back(first: list[int | str], rest: list[int | str]) -> None:
    """A Reshape joins the axes, then one splits off the known ones by -1: the rest is the product of the others."""
    signature = f"(float[{', '.join(map(str, [*first, *rest]))}] x) => (float[] y)"
    body = f"j = Reshape(x, flat) s = Shape <end = {len(first)}>(x) t = Concat <axis = 0>(s, flat) y = Reshape(j, t)"
    model = ir.serde.deserialize_model(parse(signature, body, flat=np.array([-1])))
    shape_inference.infer(model)
    [y] = model.graph.outputs
    assert y.shape is not None
    numbers = {"a": 7, "b": 11, "c": 13}
    known_sizes = [numbers.get(str(size), size) for size in rest]
    last = y.shape[len(first)]
    if isinstance(last, ir.SymbolicDim):
        last = last.evaluate(numbers)
    assert last == int(np.prod(known_sizes, dtype=object))
    assert [str(size) for size in sizes(y) or ()][:-1] == [str(size) for size in first]


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
    ("name", "whole"),
    [
        ("a", "4*a"),
        ("decoder_input_ids.45_dim_1", "4*decoder_input_ids.45_dim_1"),
        ("batch-size", "4*'batch-size'"),
        ("a - b", "4*'a - b'"),
        ("9**9**9**9", "4*'9**9**9**9'"),
        ("²", "4*'²'"),
        ("9" * 5000, "unk__"),
    ],
)
def test_any_text_may_be_the_name_of_a_size(name: str, whole: str) -> None:
    """A file's own text is one name and no expression; the file gets its name back."""
    named = parse("(float[n, 4] x) => (float[] y)", "y = Reshape(x, flat)", flat=np.array([-1]))
    named.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
    model = ir.serde.deserialize_model(named)
    shape_inference.infer(model)
    [size] = sizes(model.graph.outputs[0]) or ()
    assert str(size).startswith(whole)
    done = prove(named, {"x": normal(2, 4)})
    assert proto(done.model).graph.input[0].type.tensor_type.shape.dim[0].dim_param == name


def test_name_with_a_minus_is_not_a_difference() -> None:
    """ "a-b" of one input is no difference of the sizes of two others."""
    body = "s = Shape(x) t = Shape(z) d = Sub(s, t) y = Expand(one, d)"
    proto = parse("(float[a] x, float[b] z, float[c] w) => (float[] y)", body, one=np.ones(1, np.float32))
    proto.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "a - b"
    model = ir.serde.deserialize_model(proto)
    shape_inference.infer(model)
    assert sizes(model.graph.outputs[0]) != sizes(model.graph.inputs[2])


def test_unknown_sizes_get_names_of_their_own() -> None:
    model = ir.serde.deserialize_model(
        parse("(float[N, M] x, int64[2] s) => (float[] y)", "a = Reshape(x, s) y = Relu(a)")
    )
    shape_inference.infer(model)
    first, second = sizes(model.graph.outputs[0]) or ()
    assert len({first, second, "N", "M"}) == 4


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_of_old_exporters_that_mean_any(size: int) -> None:
    proto = parse("(float[4, 3] x) => (float[] y)", "y = Relu(x)")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    model = ir.serde.deserialize_model(proto)
    shape_inference.infer(model)
    first, second = sizes(model.graph.outputs[0]) or ()
    assert first == sizes(model.graph.inputs[0])[0] and isinstance(first, str) and second == 3


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


@pytest.mark.parametrize(
    ("signature", "body", "sizes_of_inputs"),
    [
        ("(float[N] x, float[M] z) => (float[] y)", "y = Add(x, z)", [(1, 5), (5, 1), (5, 5)]),
        ("(float[N] x, float[M] z) => (float[] y)", "y = Max(x, z)", [(1, 5), (5, 1)]),
        ("(float[N] x, float[M] z) => (float[] y)", "s = Shape(z) y = Expand(x, s)", [(1, 5), (5, 1)]),
        ("(float[N] x) => (float[] y)", "y = Slice(x, zero, two)", [(1,), (2,), (3,)]),
        ("(float[N] x) => (float[] y)", "y = Slice(x, two, end)", [(1,), (2,), (3,)]),
        ("(float[N, 4] x) => (float[] y)", "y = Squeeze(x)", [(1,), (2,)]),
        ("(float[N, 4] x, float[M] z) => (float[] y)",
         "s = Shape <end = 1>(x) k = Shape(z) t = Sub(s, k) y = Reshape(x, t)", [(2, 3)]),
        ("(float[N] x, int64[2] k) => (float[] y)", "y, z = Split(x, k)", [(3, 2)]),
        ("(float[N] x) => (float[] y)", "k = Identity(parts) y, z = Split(x, k)", [(4,)]),
        ("(float[N, 1, M] x) => (float[] y)", "k = Identity(second) y = Squeeze(x, k)", [(1, 3), (2, 1)]),
        ("(float[1, 1, N, 10] x) => (float[] y)", "y = Resize(x, , scales)", [(5,), (10,)]),
        ("(float[N] x) => (int64[] y)", "n = Size(x) y = Range(one, n, one)", [(0,), (1,), (4,)]),
        ("(float[N] x, bool c) => (float[] y)", ("y = If (c) <then_branch: graph = t () => (float[] a) "
         "{ s = NonZero(x) a = Squeeze(s) }, else_branch: graph = e () => (float[2] b) { b = Expand(x, two) }>"), []),
    ],
)  # fmt: skip
def test_no_more_is_claimed_than_holds_in_every_run(
    signature: str, body: str, sizes_of_inputs: list[tuple[int, ...]]
) -> None:
    """What shape inference takes for granted elsewhere: names that broadcast are equal, slices lie inside."""
    tensors = {"zero": np.array([0]), "two": np.array([2]), "end": np.array([2**62]), "one": np.array(1)}
    tensors |= {"parts": np.array([1, 3]), "second": np.array([1])}
    model = parse(signature, body, 18, **tensors, scales=np.array([1, 1, 1.5, 1.3], np.float32))
    inferred = ir.serde.deserialize_model(model)
    shape_inference.infer(inferred)
    claim = sizes(inferred.graph.outputs[0])
    if not sizes_of_inputs:
        assert claim is None
    for counts in sizes_of_inputs:
        names = dict(zip("NM", counts, strict=False))
        feed = {}
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            feed[value.name] = np.zeros([names.get(d.dim_param, d.dim_value) for d in dims], np.float32)
        if "k" in feed:
            feed["k"] = np.array((*counts[1:], counts[0] - counts[1]))
        actual = run(model, feed)["y"].shape
        for size, got in zip(claim or actual, actual, strict=True):
            assert names.get(str(size), size) == got or str(size).startswith("unk__"), (claim, actual)


def test_an_axis_without_elements_is_known() -> None:
    model = ir.serde.deserialize_model(
        parse(
            "(float[N, 2] x) => (float[] y)",
            "e = Slice(x, none, none) y = Add(e, one)",
            none=np.array([0, 0]),
            one=np.ones((1, 1), np.float32),
        )
    )
    shape_inference.infer(model)
    assert (sizes(model.graph.outputs[0]) or ())[1] == 0
