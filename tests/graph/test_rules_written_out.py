"""GELU, normalisations, softmax and hard swish, written out in the ways people and exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from layerline.graph.fusion.rules.activations import MOST_OPENED, product
from tests.forms import proto
from tests.graph.fusing import fired, normal, ops, parse, prove, reason, run

SCALARS = {
    "half": np.float32(0.5),
    "one": np.float32(1),
    "root2": np.float32(np.sqrt(2)),
    "inv_root2": np.float32(1 / np.sqrt(2)),
    "cubic": np.float32(0.044715),
    "root_2_pi": np.float32(np.sqrt(2 / np.pi)),
    "three": np.float32(3),
    "two": np.float32(2),
    "eps": np.float32(1e-5),
}
ERF = "d = Div(x, root2) e = Erf(d) a = Add(e, one)"
TANH = "p = Pow(x, three) q = Mul(cubic, p) s = Add(x, q) t = Mul(s, root_2_pi) u = Tanh(t) a = Add(one, u)"
FACTORED = """xx = Mul(x, x) q = Mul(xx, cubic) s = Add(one, q) t0 = Mul(x, root_2_pi) t = Mul(t0, s) u = Tanh(t)
              a = Add(u, one)"""


@pytest.mark.parametrize(
    "body",
    [
        f"{ERF} m = Mul(x, a) y = Mul(m, half)",
        f"{ERF} m = Mul(half, a) y = Mul(m, x)",
        f"h = Mul(x, half) {ERF} y = Mul(h, a)",
        f"{ERF} m = Mul(a, x) y = Div(m, two)",
        "d = Mul(x, inv_root2) e = Erf(d) a = Add(one, e) h = Mul(x, half) y = Mul(a, h)",
        f"{TANH} h = Mul(x, half) y = Mul(h, a)",
        f"{TANH} m = Mul(a, x) y = Mul(half, m)",
        f"{TANH.replace('p = Pow(x, three)', 'xx = Mul(x, x) p = Mul(xx, x)')} h = Mul(x, half) y = Mul(h, a)",
        f"{FACTORED} h = Mul(x, half) y = Mul(h, a)",
    ],
)
def test_gelu(body: str) -> None:
    done = prove(parse("(float[N, 9] x) => (float[N, 9] y)", body, opset=20, **SCALARS), {"x": 3 * normal(4, 9)})
    [node] = proto(done.model).graph.node
    assert node.op_type == "Gelu"
    assert {a.name: a.s.decode() for a in node.attribute} == {"approximate": "tanh" if "Tanh" in body else "none"}


@pytest.mark.parametrize(
    ("body", "opset", "why"),
    [
        (f"{ERF} m = Mul(x, a) y = Mul(m, half)", 17, "opset 17 doesn't have"),
        (f"{ERF} m = Mul(x, a) y = Mul(m, half) z = Relu(e)", 20, "Erf output e has another consumer z"),
        (f"{ERF} m = Mul(x, a) y = Mul(m, one)", 20, ""),
        (f"{ERF.replace('root2', 'two')} m = Mul(x, a) y = Mul(m, half)", 20, ""),
        (f"w = Relu(x) {ERF} m = Mul(w, a) y = Mul(m, half)", 20, ""),
    ],
)
def test_what_is_not_quite_a_gelu_stays(body: str, opset: int, why: str) -> None:
    model = parse("(float[N, 9] x) => (float[N, 9] y)", body, opset=opset, **SCALARS)
    if "z =" in body:
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["N", 9]))
    done = prove(model, {"x": normal(4, 9)})
    assert "Erf" in ops(done.model)
    assert not why or why in reason(done, "gelu")


def variance(axes: list[int], opset: int, square: str = "q = Mul(d, d)") -> str:
    """d = x - mean(x) and v = mean(d²) + eps."""
    m, w = (f"ReduceMean({v}, axes)" if opset >= 18 else f"ReduceMean <axes = {axes}>({v})" for v in "xq")
    return f"m = {m} d = Sub(x, m) {square} w = {w} v = Add(w, eps)"


ROOTS = [
    "r = Sqrt(v) n = Div(d, r)",
    "r = Sqrt(v) i = Reciprocal(r) n = Mul(d, i)",
    "r = Sqrt(v) i = Div(one, r) n = Mul(i, d)",
    "i = Pow(v, minus_half) n = Mul(i, d)",
]


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("square", ["q = Mul(d, d)", "q = Pow(d, two)"])
@pytest.mark.parametrize("axes", [[-1], [1, 2]])
def test_layer_norm(opset: int, root: str, square: str, axes: list[int]) -> None:
    shape = (5,) if axes == [-1] else (3, 5)
    given = {"axes": np.array(axes)} if opset >= 18 else {}
    body = f"{variance(axes, opset, square)} {root} s = Mul(n, gamma) y = Add(beta, s)"
    given |= {"minus_half": np.float32(-0.5), "gamma": normal(*shape), "beta": normal(*shape, seed=1), **SCALARS}
    done = prove(parse("(float[N, 3, 5] x) => (float[N, 3, 5] y)", body, opset, **given), {"x": normal(2, 3, 5)})
    assert ops(done.model) == ["LayerNormalization"]
    assert fired(done) >= {"layer-norm", "norm-affine"}


@pytest.mark.parametrize(
    ("axes", "kind", "opset", "why"),
    [
        ([1], "float", 17, "not over the last ones"),
        ([-1], "float16", 17, "sums in float32"),
        ([-1], "float", 16, "opset 16 doesn't"),
    ],
)
def test_other_normalisations_stay(axes: list[int], kind: str, opset: int, why: str) -> None:
    dtype = np.float16 if kind == "float16" else np.float32
    body = f"{variance(axes, 17)} r = Sqrt(v) y = Div(d, r)"
    model = parse(f"({kind}[N, 3, 5] x) => ({kind}[N, 3, 5] y)", body, opset=opset, eps=dtype(1e-3))
    done = prove(model, {"x": normal(2, 3, 5, dtype=dtype)})
    assert "Div" in ops(done.model)
    assert why in reason(done, "layer-norm")


@pytest.mark.parametrize("shape", [(3, 1), (1, 1, 1, 5)])
def test_scale_that_widens_stays_outside_the_norm(shape: tuple[int, ...]) -> None:
    model = parse("(float[N, 3, 5] x) => (float[] y)", "n = LayerNormalization(x, gamma) y = Mul(n, k)",
                  gamma=normal(5), k=normal(*shape))  # fmt: skip
    done = prove(model, {"x": normal(2, 3, 5)})
    assert ops(done.model) == ["LayerNormalization", "Mul"]
    assert "of shape" in reason(done, "norm-affine")


GUARD = "p = Softmax <axis = -1>(z) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, e)"
EMBEDDED = "e = Gather(table, i) t = Transpose <perm = [0, 2, 1]>(e) s = MatMul(e, t)"
LEAST = np.finfo(np.float32).min


def guarded(
    scores: str, signature: str = "(int64[N, 4] i) => (float[N, 4, 8] y)", **tensors: object
) -> onnx.ModelProto:
    return parse(signature, f"{scores} {GUARD}", table=normal(50, 8), zero=np.float32(0), **tensors)


TOKENS = {"i": np.array([[0, 3, 7, 49]])}


@pytest.mark.parametrize("norm", ["", "x = LayerNormalization(e0, g)"])
def test_guard_goes_where_nothing_can_be_nan(norm: str) -> None:
    """Tokens in, and a mask that is finite."""
    mask = np.where(np.tri(4, dtype=bool), 0, LEAST).astype(np.float32)
    scores = f"{EMBEDDED} z = Add(s, mask)"
    if norm:
        scores = scores.replace("e = Gather", "e0 = Gather").replace("t = ", f"{norm.replace('x =', 'e =')} t = ")
    done = prove(guarded(scores, mask=mask, g=normal(8)), TOKENS)
    assert "IsNaN" not in ops(done.model)


@pytest.mark.parametrize("mask", [-np.inf, LEAST, np.nan])
def test_guard_stays_where_a_row_can_be_masked_whole(mask: float) -> None:
    """By a mask of -inf, or by two of the most negative number, which add up to it."""
    rows = np.zeros((4, 4), np.float32)
    rows[1] = mask
    scores = f"{EMBEDDED} {'z0 = Add(s, mask) z = Add(z0, mask)' if mask == LEAST else 'z = Add(s, mask)'}"
    done = prove(guarded(scores, mask=rows), TOKENS)
    assert "IsNaN" in ops(done.model)
    assert "z of w may be NaN or infinite" in reason(done, "softmax-nan-guard")


@pytest.mark.parametrize("scores", ["z = MatMul(e, t)", "a = Sigmoid(e) z = MatMul(a, t)", "a = Tanh(e) z = Mul(a, a)"])
def test_guard_stays_behind_inputs_that_may_hold_anything(scores: str) -> None:
    """NaN, and numbers whose products overflow: ordinary feeds prove nothing about them."""
    signature = "(float[N, 4, 4] e) => (float[N, 4, 4] y)"
    model = guarded(f"t = Transpose <perm = [0, 2, 1]>(e) {scores}", signature)
    done = prove(model, {"e": normal(2, 4, 4)})
    assert "may be NaN or infinite" in reason(done, "softmax-nan-guard")
    odd = normal(1, 4, 4)
    odd[0, 0, 0] = np.nan
    for feed in ({"e": odd}, {"e": np.full((1, 4, 4), 3e38, np.float32) * np.sign(normal(4, 4))}):
        np.testing.assert_allclose(run(done.model, feed)["y"], run(model, feed)["y"], rtol=1e-5)


HARD = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)}


@pytest.mark.parametrize(
    ("body", "opset", "expected"),
    [
        ("m = Mul(x, c) y = Div(m, six)", 14, ["HardSwish"]),
        ("m = Mul(x, c) y = Div(m, six)", 12, ["HardSigmoid", "Mul"]),
        ("g = Div(c, six) y = Mul(g, x)", 17, ["HardSwish"]),
        ("y = Div(c, six)", 14, ["HardSigmoid"]),
    ],
)
def test_hard_swish(body: str, opset: int, expected: list[str]) -> None:
    body = f"a = Add(x, three) c = Clip(a, zero, six) {body}"
    model = parse("(float[N, 5] x) => (float[N, 5] y)", body, opset=opset, **HARD)
    assert ops(prove(model, {"x": 4 * normal(7, 5)}).model) == expected


def test_clip_of_other_bounds_is_no_hard_swish() -> None:
    body = "a = Add(x, three) c = Clip(a, zero, three) m = Mul(x, c) y = Div(m, six)"
    model = parse("(float[N, 5] x) => (float[N, 5] y)", body, **HARD)
    assert ops(prove(model, {"x": 4 * normal(7, 5)}).model) == ["Add", "Clip", "Mul", "Div"]


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("body", ["m = Mul(c, c) y = Div(m, six)", "m = Mul(c, w) y = Div(m, six)"])
def test_hard_sigmoid_of_something_else_is_no_hard_swish(body: str, opset: int) -> None:
    """clip(x + 3, 0, 6) times itself, or times another value."""
    model = parse("(float[N, 5] x) => (float[N, 5] y)", f"w = Abs(x) a = Add(x, three) c = Clip(a, zero, six) {body}",
                  opset=opset, **HARD)  # fmt: skip
    done = prove(model, {"x": 4 * normal(7, 5)})
    assert "Clip" in ops(done.model)
    assert not done.undone


WIDE = (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("rule", "body", "wide"),
    [
        ("gelu", f"{ERF} m = Mul(x, a) y = Mul(m, half)", "half"),
        ("gelu", f"{ERF} m = Mul(x, a) y = Mul(m, half)", "root2"),
        ("gelu", f"{TANH} h = Mul(x, half) y = Mul(h, a)", "cubic"),
        ("hard-swish", "a = Add(x, three) c = Clip(a, zero, six) m = Mul(x, c) y = Div(m, six)", "three"),
        ("hard-swish", "a = Add(x, three) c = Clip(a, zero, six) y = Div(c, six2)", "six2"),
        ("layer-norm", f"{variance([-1], 20)} r = Sqrt(v) y = Div(d, r)", "eps"),
        ("layer-norm", f"{variance([-1], 20)} r = Sqrt(v) i = Div(one, r) y = Mul(d, i)", "one"),
    ],
)
@pytest.mark.parametrize("size", ["3", "M"])
def test_constant_with_more_axes_than_x_widens_the_result(rule: str, body: str, wide: str, size: str) -> None:
    tensors = SCALARS | HARD | {"axes": np.array([-1]), "six2": np.float32(6)}
    tensors |= {wide: np.full(WIDE, tensors[wide], np.float32)}
    done = prove(parse(f"(float[N, {size}, 5] x) => (float[] y)", body, 20, **tensors), {"x": normal(2, 3, 5)})
    assert rule not in fired(done)
    assert "y has shape" in reason(done, rule)


def test_norm_whose_statistics_are_read_stays() -> None:
    model = parse("(float[N, 8] x) => (float[N, 8] y, float[N, 1] m)", "n, m = LayerNormalization(x, g) y = Mul(n, k)",
                  g=normal(8), k=np.float32(2))  # fmt: skip
    done = prove(model, {"x": normal(2, 8)})
    assert ops(done.model) == ["LayerNormalization", "Mul"]
    assert "second output m of LayerNormalization n is used" in reason(done, "norm-affine")


def test_scale_of_a_norm_that_would_overflow_stays() -> None:
    model = parse("(float[N, 8] x) => (float[N, 8] y)", "n = LayerNormalization(x, g) y = Mul(n, k)",
                  g=np.full(8, 1e-30, np.float32) * np.float32(1e-8), k=np.float32(2))  # fmt: skip
    assert ops(prove(model, {"x": normal(2, 8)}).model) == ["LayerNormalization"]
    large = parse("(float[N, 8] x) => (float[N, 8] y)", "n = LayerNormalization(x, g) y = Mul(n, k)",
                  g=np.full(8, 1e20, np.float32), k=np.float32(1e20))  # fmt: skip
    done = prove(large, {"x": np.zeros((2, 8), np.float32)})
    assert "would overflow float32" in reason(done, "norm-affine")


def test_products_are_taken_apart_so_far_only() -> None:
    """A chain of n squares has 2^n factors, and one of n constants is deeper than Python's recursion limit."""
    squares = ir.Value(name="x")
    scaled = squares
    half = ir.Node("", "Constant", [], attributes=[ir.AttrFloat32("value_float", 0.5)]).outputs[0]
    for _ in range(2000):
        squares = ir.Node("", "Mul", [squares, squares]).outputs[0]
        scaled = ir.Node("", "Mul", [half, scaled]).outputs[0]
    assert len(product(squares)[1]) == MOST_OPENED + 1
    assert (product(scaled)[0], len(product(scaled)[1])) == (0.5**MOST_OPENED, 1)
