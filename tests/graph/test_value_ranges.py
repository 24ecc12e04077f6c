"""How large numbers can get: a bound that is wrong by anything lets NaN through."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerline.graph.analysis import shape_inference
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.analysis.value_ranges import ValueRanges
from layerline.graph.io.ir_convert import as_ir
from tests.graph.fusing import parse, run

LARGEST = float(np.finfo(np.float32).max)
TABLE = np.array([[1, -2], [0.5, 3]], np.float32)


def bound(body: str, signature: str = "(int64[N] i, float[N, 2] x) => (float[] y)", **tensors: object) -> float:
    model = ir.serde.deserialize_model(parse(signature, body, 20, **{"table": TABLE, **tensors}))
    shape_inference.infer(model)
    [y] = model.graph.outputs
    return ValueRanges(model.graph, finite=True).magnitude(y)


@pytest.mark.parametrize(
    ("body", "least", "most"),
    [
        ("y = Gather(table, i)", 3, 3),
        ("g = Gather(table, i) y = Add(g, table)", 6, 6.001),
        ("g = Gather(table, i) y = MatMul(g, table)", 18, 40),
        ("g = Gather(table, i) y = Gemm <alpha = 2.0, transB = 1>(g, table, table)", 39, 80),
        ("g = Gather(table, i) y = LayerNormalization <axis = 1>(g, scale)", 2**0.5, 3),
        ("g = Gather(table, i) y = Div(g, tenth)", 30, 30.001),
        ("c = Cast <to = 1>(i) y = Sigmoid(c)", 1, 1),
        ("c = Cast <to = 1>(i) y = Mul(c, tenth)", 2.0**64 / 10, 2.0**64 / 9),
        ("g = Gather(table, i) s = Softmax <axis = -1>(g) t = Transpose(g) y = MatMul(s, g2)", 4, 8.1),
    ],
)
def test_bounds(body: str, least: float, most: float) -> None:
    extra = {"scale": np.ones(2, np.float32), "tenth": np.float32(0.1), "g2": 4 * np.eye(2, dtype=np.float32)}
    assert least <= bound(body, **extra) <= most


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x)",
        "y = Sigmoid(x)",
        "y = MatMul(x, table)",
        "y = Softmax(x)",
        "y = LayerNormalization(x, one)",
        "y = Mul(x, zero)",
        "g = Gather(table, i) y = Add(g, x)",
        "g = Gather(table, i) y = Sqrt(g)",
        "g = Gather(table, i) y = Log(g)",
        "g = Gather(table, i) y = Div(g, zero)",
        "g = Gather(table, i) y = Div(g, g)",
        "g = Gather(table, i) y = Exp(g)",
        "g = Gather(large, i) y = Add(g, large)",
        "g = Gather(large, i) y = Mul(g, g)",
        "g = Gather(large, i) y = MatMul(g, large)",
        "g = Gather(large, i) y = LayerNormalization(g, one)",
        "g = Gather(large, i) y = LayerNormalization <epsilon = 0.0>(table, one)",
        "g = Gather(nan, i) y = Relu(g)",
        "g = Gather(inf, i) y = Tanh(g)",
        "c = Cast <to = 10>(large) g = Gather(c, i) y = Cast <to = 1>(g)",
        "c = Cast <to = 1>(i) d = Mul(c, c) e = Mul(d, d) y = Mul(e, e)",
    ],
)
def test_what_may_be_nan_or_infinite_has_no_bound(body: str) -> None:
    extra = {"one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32), "large": np.full((2, 2), LARGEST, "f")}
    assert bound(body, **extra, nan=TABLE * np.float32(np.nan), inf=TABLE + np.float32(np.inf)) == math.inf


def test_the_most_negative_number_takes_in_ordinary_ones_and_not_itself() -> None:
    """What masks are made of: -3.4e38 - 1000 is -3.4e38 again; twice -3.4e38 is -inf."""
    low = np.full((2, 2), -LARGEST, np.float32)
    assert bound("g = Gather(table, i) y = Add(g, low)", low=low) == LARGEST
    assert bound("g = Gather(table, i) h = Add(g, low) y = Add(h, low)", low=low) == math.inf


OPS = ["Add({a}, {b})", "Sub({a}, {b})", "Mul({a}, {b})", "MatMul({a}, table)", "Softmax <axis = -1>({a})", "Tanh({a})",
       "LayerNormalization({a}, one)", "Gelu({a})", "Where(c, {a}, {b})", "Max({a}, {b})", "Transpose({a})",
       "Div({a}, one)", "Relu({a})", "Neg({a})"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_no_number_is_beyond_its_bound(steps: list[tuple[str, int, int]]) -> None:
    names, body = ["g"], "g = Gather(table, i) "
    for count, (op, a, b) in enumerate(steps):
        body += f"v{count} = {op.format(a=names[a % len(names)], b=names[b % len(names)])} "
        names.append(f"v{count}")
    tensors = {"table": TABLE * 7, "one": np.ones(2, np.float32), "c": np.array([True, False])}
    signature = "(int64[2] i) => (float[] y)"
    largest = bound(f"{body} y = Identity({names[-1]})", signature, **tensors)
    for i in ([0, 1], [1, 1]):
        found = run(parse(signature, f"{body} y = Identity({names[-1]})", 20, **tensors), {"i": np.array(i)})["y"]
        assert not np.isfinite(largest) or np.abs(found).max() <= largest
        assert np.isfinite(found).all() or largest == math.inf


@pytest.mark.parametrize(
    ("body", "weights", "expected"),
    [
        ("y = Softmax (x)", {}, 1),
        ("y = Tanh (x)", {}, 1),
        ("y = HardSigmoid (x)", {}, 1),
        ("y = Clip (x, a, b)", {"a": 0, "b": 6}, 6),
        ("y = Clip (x, a, b)", {"a": -8, "b": 6}, 8),
        ("c = Clip (x, a, b) y = HardSigmoid (c)", {"a": 0, "b": 6}, 1),
        ("r = Relu (x) y = Min (r, a)", {"a": 6}, 6),
        ("y = Min (x, a)", {"a": 6}, math.inf),
        ("y = Clip (x, a)", {"a": 0}, math.inf),
        ("s = Sigmoid (x) t = Tanh (z) y = Mul (s, t)", {}, 1),
        ("s = Sigmoid (x) y = Sub (one, s)", {"one": 1}, 1),
        ("s = Sigmoid (x) y = Mul (s, x)", {}, math.inf),
        ("s = Softmax (x) t = Transpose (s) y = Concat <axis = 0> (t, t)", {}, 1),
        ("s = Sigmoid (x) y = Add (s, three)", {"three": 3}, 4),
        ("y = Relu (x)", {}, math.inf),
        ("y = Exp (x)", {}, math.inf),
    ],
)
def test_what_operators_bound_by_construction(body: str, weights: dict[str, float], expected: float) -> None:
    signature = "(float[n, 4] x, float[n, 4] z) => (float[n, 4] y)"
    tensors = {name: np.float32(number) for name, number in weights.items()}
    graph = as_ir(parse(signature, body, 20, **tensors))
    infer_types(graph)
    assert ValueRanges(graph.graph, finite=False).magnitude(graph.graph.outputs[0]) == expected
