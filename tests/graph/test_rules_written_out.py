"""GELU, normalisations, softmax and hard swish, written out in the ways people and exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.graph.fusing import fired, normal, ops, parse, prove, reason

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
    [node] = done.model.graph.node
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


@pytest.mark.parametrize("root", ["r = Sqrt(v) n = Div(x, r)", "r = Sqrt(v) i = Reciprocal(r) n = Mul(x, i)"])
def test_rms_norm(root: str) -> None:
    body = f"q = Pow(x, two) w = ReduceMean(q, axes) v = Add(w, eps) {root} y = Mul(gamma, n)"
    model = parse("(float[N, 3, 5] x) => (float[N, 3, 5] y)", body, 23, axes=np.array([-1]), gamma=normal(5), **SCALARS)
    done = prove(model, {"x": normal(2, 3, 5)})
    assert ops(done.model) == ["RMSNormalization"]


@pytest.mark.parametrize("axis", [1, -1])
def test_softmax(axis: int) -> None:
    body = f"m = ReduceMax <axes = [{axis}]>(x) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s)"
    model = parse("(float[N, 3, 5] x) => (float[N, 3, 5] y)", body, a=np.array([axis]))
    assert ops(prove(model, {"x": 20 * normal(2, 3, 5)}).model) == ["Softmax"]


def test_softmax_without_its_maximum_stays() -> None:
    body = "e = Exp(x) s = ReduceSum(e, a) y = Div(e, s)"
    done = prove(parse("(float[N, 3, 5] x) => (float[N, 3, 5] y)", body, a=np.array([-1])), {"x": normal(2, 3, 5)})
    assert ops(done.model) == ["Exp", "ReduceSum", "Div"]
    assert "doesn't take off the maximum" in reason(done, "softmax")


SCORES = "s = MatMul(q, k) z = Add(s, mask)"
REST = "p = Softmax <axis = -1>(z) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)"
SIGNATURE = "(float[N, 4, 8] q, float[N, 8, 4] k, float[N, 4, 8] v) => (float[N, 4, 8] y)"
FEED = {"q": normal(2, 4, 8), "k": normal(2, 8, 4, seed=1), "v": normal(2, 4, 8, seed=2)}
LEAST = np.finfo(np.float32).min


def test_guard_goes_where_the_mask_is_finite() -> None:
    mask = np.where(np.tri(4, dtype=bool), 0, LEAST).astype(np.float32)
    model = parse(SIGNATURE, f"{SCORES} {REST}", mask=mask, zero=np.float32(0))
    assert "IsNaN" not in ops(prove(model, FEED).model)


@pytest.mark.parametrize("low", [-np.inf, LEAST])
def test_guard_stays_where_a_row_can_be_masked_whole(low: float) -> None:
    """By a mask of -inf, or by two of the most negative number, which add up to it."""
    mask = np.zeros((4, 4), np.float32)
    mask[1] = low
    scores = SCORES if np.isinf(low) else SCORES.replace("z =", "z0 =") + " z = Add(z0, mask)"
    done = prove(parse(SIGNATURE, f"{scores} {REST}", mask=mask, zero=np.float32(0)), FEED)
    assert "IsNaN" in ops(done.model)
    assert "may be -inf" in reason(done, "softmax-nan-guard")


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
