"""What operators bound by construction, whatever they are fed."""

import math

import numpy as np
import pytest
from onnx import numpy_helper, parser

from layerline.graph.analysis.element_types import infer_types
from layerline.graph.analysis.value_intervals import intervals, magnitude
from layerline.graph.io.ir_convert import to_ir


def bound(body, **weights):
    """The greatest |y| of a graph in onnx's text form."""
    text = (
        f'<ir_version: 10, opset_import: ["" : 20]>\ng (float[n, 4] x, float[n, 4] z) => (float[n, 4] y) {{ {body} }}'
    )
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(v), k) for k, v in weights.items())
    graph = to_ir(model)
    infer_types(graph)
    return magnitude(intervals(graph.graph)[graph.graph.outputs[0]])


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
        ("y = Min (x, a)", {"a": 6}, None),
        ("y = Clip (x, a)", {"a": 0}, None),
        ("s = Sigmoid (x) t = Tanh (z) y = Mul (s, t)", {}, 1),
        ("s = Sigmoid (x) y = Sub (one, s)", {"one": 1}, 1),
        ("s = Sigmoid (x) y = Mul (s, x)", {}, None),
        ("s = Softmax (x) t = Transpose (s) y = Concat <axis = 0> (t, t)", {}, 1),
        ("s = Sigmoid (x) y = Add (s, three)", {"three": 3}, 4),
        ("y = Relu (x)", {}, None),
        ("y = Exp (x)", {}, None),
    ],
)
def test_bounds(body, weights, expected):
    assert bound(body, **weights) == expected


def test_an_infinite_end_is_no_bound():
    assert magnitude((0.0, math.inf)) is None and magnitude((-2.0, 1.0)) == 2.0
