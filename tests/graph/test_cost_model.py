"""The cost of an assignment, added up by hand."""

import numpy as np
import pytest

from layerline.graph.quantization.cost_model import CostModel
from tests.forms import as_ir
from tests.stages.test_quantize import model

NET = """g (float[n, 3, 6, 6] x) => (float[n, 5] y) {
  c = Conv <pads = [1, 1, 1, 1]> (x, w)
  r = Relu (c)
  p = GlobalAveragePool (r)
  f = Flatten (p)
  y = Gemm <transB = 1> (f, v)
}"""
COSTS = CostModel(
    as_ir(model(NET, w=np.zeros((4, 3, 3, 3), np.float32), v=np.zeros((5, 4), np.float32))),
    {"x": 108, "c": 144, "r": 144, "p": 4, "f": 4, "y": 5},
)
CONV_MACS, GEMM_MACS = 144 * 27, 5 * 4


def test_everything_float():
    # Each value that a node reads is written once and read once; y is read by nobody.
    values = 2 * (108 + 144 + 144 + 4 + 4) * 4
    weights = (108 + 20) * 4
    assert COSTS.cost({}) == pytest.approx(values + weights + (CONV_MACS + GEMM_MACS) / 64)


@pytest.mark.parametrize(("name", "size", "macs"), [("int8", 1, 256), ("fp16", 2, 128)])
def test_a_layer_in_a_smaller_format(name, size, macs):
    saved = COSTS.cost({}) - COSTS.cost({"c": name})
    assert saved == pytest.approx((4 - size) * (2 * 108 + 108) + CONV_MACS * (1 / 64 - 1 / macs))


def test_a_value_that_is_read_in_two_formats_is_written_twice():
    branches = model(
        "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul (x, w) b = MatMul (x, w) y = Add (a, b) }",
        w=np.zeros((4, 4), np.float32),
    )
    costs = CostModel(as_ir(branches), {"x": 1000, "a": 1000, "b": 1000})
    both = costs.cost({"a": "int8", "b": "int8"})
    # b in float32: its read, its weight and its products cost more. x is written in float32 too, and read to be int8.
    more = 3 * 1000 + 3 * 16 + 4 * 1000 * (1 / 64 - 1 / 256) + (4 + 4) * 1000
    assert costs.cost({"a": "int8"}) - both == pytest.approx(more)


def test_a_layer_in_int8_beside_a_float_reader_of_its_value_costs_more_than_it_saves():
    branches = model(
        "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul (x, w) y = Add (a, x) }", w=np.zeros((4, 4), np.float32)
    )
    costs = CostModel(as_ir(branches), {"x": 1000, "a": 1000})
    saved = costs.cost({}) - costs.cost({"a": "int8"})
    # Its read, weight and products get cheaper. But x is read once more in float32, and written in int8 as well.
    assert saved == pytest.approx(3 * 1000 + 3 * 16 + 4 * 1000 * (1 / 64 - 1 / 256) - (4 + 1) * 1000)
    assert saved < 0
