"""What each layer adds to the outputs: estimated from one graph, against the layer quantised alone."""

from dataclasses import replace

import numpy as np
import pytest

from layerline.backends.light import split
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.compare.compare_models import compare
from layerline.graph.quantization import qdq
from layerline.graph.quantization.qdq_placement import place
from layerline.parity.sensitivity import measure
from tests.stages.test_quantize import model

RNG = np.random.default_rng(5)
X = RNG.standard_normal((64, 8)).astype(np.float32)
W = {name: RNG.standard_normal((8, 8)).astype(np.float32) for name in ("u", "v", "w")}
CHAIN = "a = MatMul (x, u) r = Relu (a) b = MatMul (r, v) y = MatMul (b, w)"
BRANCHES = "a = MatMul (x, u) b = MatMul (x, v) m = Mul (a, b) y = MatMul (m, w)"


@pytest.mark.parametrize("body", [CHAIN, BRANCHES])
def test_the_estimate_is_that_of_a_layer_quantised_alone_within_3_db(body):
    net = model(f"g (float[n, 8] x) => (float[n, 8] y) {{ {body} }}", **W)
    plan = qdq.plan(net, place(net), ranges(net), "minmax")
    whole = measure(split(net), qdq.apply(net, plan), [{"x": X}], ["a", "b", "y"])
    assert whole.elements["x"] == X.size and whole.elements["y"] == X.size
    for layer, effect in whole.effects.items():
        [row] = compare(net, qdq.apply(net, only(plan, layer)), [{"x": X}], pairs={})
        assert effect.output_db == pytest.approx(row.sqnr_db, abs=3), layer


def only(plan, layer):
    """The plan in which this layer alone is int8."""
    values = [replace(v, readers=tuple(r for r in v.readers if r[0] == layer)) for v in plan.values]
    return QuantPlan(values=tuple(v for v in values if v.readers), kept=())


def ranges(net):
    session = OnnxRuntime().open(net, [name for node in net.graph.node for name in node.output])
    histograms = {}
    for name, array in ({"x": X} | session.run({"x": X})).items():
        histograms[name] = Histogram()
        histograms[name].update(array)
    return histograms
