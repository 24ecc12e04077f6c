"""Plans are compared at the outputs: by hand, and with numbers that are not finite."""

import math

import numpy as np
import pytest
from onnx import parser

from layerline.graph.io.ir_convert import as_ir
from layerline.graph.quantization.measured_plan import OutputReference


def _model(body):
    return as_ir(
        parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\nm (float[4] x) => (float[4] y) {{{body}}}')
    )


EXACT = _model("y = Identity(x)")
FEED = [{"x": np.array([1.0, 2.0, 2.0, 4.0], np.float32)}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = Constant<value_float=0.9>() y = Mul(x, c)", 20.0),  # 25 over 0.25
        ("y = Identity(x)", math.inf),
        ("c = Constant<value_floats=[0.0, 1.0, 1.0, 1.0]>() y = Div(x, c)", -math.inf),
        ("c = Constant<value_float=-1.0>() n = Mul(x, c) y = Log(n)", -math.inf),
    ],
)
def test_what_is_not_finite_on_one_side_is_never_better(body: str, expected: float) -> None:
    assert OutputReference(EXACT, FEED).least_db(_model(body)) == pytest.approx(expected, abs=1e-5)


def test_what_is_not_finite_on_both_sides_is_left_out() -> None:
    feed = [{"x": np.array([1.0, np.inf, np.nan, 2.0], np.float32)}]
    scaled = _model("c = Constant<value_float=0.9>() y = Mul(x, c)")
    assert OutputReference(EXACT, feed).least_db(scaled) == pytest.approx(20.0, abs=1e-5)


@pytest.mark.parametrize("end", ["Softmax(s)", "Sigmoid(s)", "LogSoftmax(s)"])
def test_scores_count_in_place_of_probabilities(end: str) -> None:
    # Probabilities of 0 and 1 hide that the scores of the two samples are 10 % and 1 % off, 20 dB and 40 dB. The mean
    # is 30 dB, and both together have 10 log10((800^2 + 90^2) / (80^2 + 0.9^2)) = 20.054 dB.
    feed = [{"x": np.array([[800.0, -800.0], [-90.0, 90.0]], np.float32)}]
    header = '<ir_version: 10, opset_import: ["" : 20]>\nm (float[2, 2] x) => (float[2, 2] y)'
    exact, scaled = (
        as_ir(parser.parse_model(f"{header} {{ {constant} s = Mul(x, c) z = {end} y = Identity(z) }}"))
        for constant in (
            "c = Constant<value_float=1.0>()",
            "c = Constant<value = float[2, 1] {0.9, 0.99}>()",
        )
    )
    assert OutputReference(exact, feed).least_db(scaled) == pytest.approx((30.0 + 20.054) / 2, abs=1e-3)


def test_a_choice_at_the_end_is_judged_by_its_scores() -> None:
    feed = [{"x": np.array([[1.0, 2.0]], np.float32)}]
    header = '<ir_version: 10, opset_import: ["" : 20]>\nm (float[1, 2] x) => (int64[1] y)'
    exact, scaled = (
        as_ir(
            parser.parse_model(
                f"{header} {{ c = Constant<value_float={factor}>() s = Mul(x, c) y = ArgMax<axis=1, keepdims=0>(s) }}"
            )
        )
        for factor in (1.0, 0.9)
    )
    assert OutputReference(exact, feed).least_db(scaled) == pytest.approx(20.0, abs=1e-3)


def test_a_graph_input_is_no_score() -> None:
    feed = [{"x": np.array([0.0, 0.0, 0.0, 0.0], np.float32)}]
    halved = _model("h = Constant<value_float=0.9>() p = Softmax(x) y = Mul(p, h)")
    assert OutputReference(_model("y = Softmax(x)"), feed).least_db(halved) == pytest.approx(20.0, abs=1e-3)


def test_what_is_not_finite_in_the_reference_alone_is_left_out() -> None:
    feed = [{"x": np.array([1.0, 0.0, 2.0, -1.0], np.float32)}]
    finite = "l = Log(x) n = Neg(l) d = Sub(l, l) lost = IsNaN(d) y = Where(lost, x, n)"
    # Logarithms of 0 and below are not compared. The sign of log 2 is wrong, an error of twice its size.
    assert OutputReference(_model("y = Log(x)"), feed).least_db(_model(finite)) == pytest.approx(-6.0206, abs=1e-3)
