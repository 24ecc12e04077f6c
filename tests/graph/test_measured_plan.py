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
