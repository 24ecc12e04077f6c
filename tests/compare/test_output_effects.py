"""What each layer alone does to the outputs, against the model in which it alone is quantised."""

import math
from dataclasses import replace

import numpy as np
import pytest

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import Histogram
from layerline.calib.plan import QuantPlan
from layerline.compare import output_effects
from layerline.compare.compare_models import compare
from layerline.compare.output_effects import effects, gains
from layerline.graph.quantization import qdq
from layerline.graph.quantization.qdq_placement import place
from tests.forms import as_ir
from tests.stages.test_quantize import model

RNG = np.random.default_rng(5)
X = RNG.standard_normal((64, 8)).astype(np.float32)
W = {name: RNG.standard_normal((8, 8)).astype(np.float32) for name in ("u", "v", "w")}
CHAIN = "a = MatMul (x, u) r = Relu (a) b = MatMul (r, v) y = MatMul (b, w)"
TWO_OUTPUTS = f"{CHAIN} "
BRANCHES = "a = MatMul (x, u) b = MatMul (x, v) m = Mul (a, b) y = MatMul (m, w)"


@pytest.mark.parametrize("body", [CHAIN, BRANCHES, TWO_OUTPUTS])
@pytest.mark.parametrize("nodes", [4000, 1])
def test_the_effect_is_the_error_of_the_outputs_with_the_layer_quantised_alone(body, nodes, monkeypatch):
    monkeypatch.setattr(output_effects, "_NODES", nodes)
    net = model(
        f"g (float[n, 8] x) => (float[n, 8] y{', float[n, 8] r' if body == TWO_OUTPUTS else ''}) {{ {body} }}", **W
    )
    plan = qdq.make_plan(as_ir(net), place(as_ir(net)), ranges(net), "minmax")
    shares = effects(net, qdq.apply(as_ir(net), plan), [{"x": X}], ["y", "b", "a"])
    assert list(shares) == ["y", "b", "a"]
    for layer, share in shares.items():
        rows = compare(net, qdq.apply(as_ir(net), only(plan, layer)), [{"x": X}], pairs={})
        assert share == pytest.approx(sum(row.rel_l2**2 for row in rows), rel=1e-6), layer


@pytest.mark.parametrize("body", [CHAIN, BRANCHES, TWO_OUTPUTS])
@pytest.mark.parametrize("nodes", [4000, 1])
def test_the_gain_is_that_of_the_outputs_with_this_layer_alone_left_float(body, nodes, monkeypatch):
    monkeypatch.setattr(output_effects, "_NODES", nodes)
    outputs = f"float[n, 8] y{', float[n, 8] r' if body == TWO_OUTPUTS else ''}"
    net = model(f"g (float[n, 8] x) => ({outputs}) {{ {body} }}", **W)
    plan = qdq.make_plan(as_ir(net), place(as_ir(net)), ranges(net), "minmax")

    def noise(left_float):
        values = [replace(v, readers=tuple(r for r in v.readers if r[0] != left_float)) for v in plan.values]
        without = QuantPlan(values=tuple(v for v in values if v.readers), kept=())
        rows = compare(net, qdq.apply(as_ir(net), without), [{"x": X}], pairs={})
        return sum(row.rel_l2**2 for row in rows)

    by_layer = gains(net, qdq.apply(as_ir(net), plan), [{"x": X}], ["y", "b", "a"])
    assert list(by_layer) == ["y", "b", "a"]
    for layer, gain in by_layer.items():
        assert gain == pytest.approx(10 * math.log10(noise("") / noise(layer)), abs=1e-4), layer


@pytest.mark.parametrize("whole", [False, True])
def test_an_output_of_indices_counts_by_the_share_that_differs(whole, monkeypatch):
    if whole:  # as where a float output has NaN
        monkeypatch.setattr(output_effects, "trusted", lambda *_: False)
    body = "a = {} (x) k = ArgMax <axis = 1, keepdims = 0> (a) c = Cast <to = 6> (k) d = Greater (a, x) y = Mul (a, t)"
    types = "int32[n] c, bool[n, 8] d, float[n, 8] y"
    text = f"g (float[n, 8] x) => ({types}) {{{{ {body} }}}}"
    net, other = (model(text.format(op), t=np.float32(2)) for op in ("Relu", "Abs"))
    relu, magnitude = np.maximum(X, 0), np.abs(X)
    labels = (relu.argmax(1) != magnitude.argmax(1)).mean()
    greater = ((relu > X) != (magnitude > X)).mean()
    floats = ((relu - magnitude) ** 2).sum() / (relu**2).sum()
    shares = effects(net, other, [{"x": X}], ["a"])
    assert shares["a"] == pytest.approx(labels + greater + floats, rel=1e-5) and labels > 0
    # Whatever is restored behind it, the indices stay those of the other operator.
    assert gains(net, other, [{"x": X}], ["a", "y"]) == {"a": math.inf, "y": pytest.approx(0.0, abs=1e-6)}


def test_outputs_of_two_types_are_compared():
    body = "a = {} (x) h = Cast <to = {}> (a) k = ArgMax <axis = 1, keepdims = 0> (a) c = Cast <to = {}> (k)"
    half = model("g (float[n, 8] x) => (float16[n, 8] h, int32[n] c) { " + body.format("Relu", 10, 6) + " }")
    full = model("g (float[n, 8] x) => (float[n, 8] h, int64[n] c) { " + body.format("Abs", 1, 7) + " }")
    relu, magnitude = np.maximum(X, 0), np.abs(X)
    labels = (relu.argmax(1) != magnitude.argmax(1)).mean()
    share = ((relu - magnitude) ** 2).sum() / (relu**2).sum()
    assert effects(half, full, [{"x": X}], ["a"])["a"] == pytest.approx(labels + share, rel=1e-2)
    assert gains(half, full, [{"x": X}], ["a"])["a"] > 60  # rounding to half precision is left
    assert effects(full, half, [{"x": X}], ["a"])["a"] == pytest.approx(
        labels + ((relu - magnitude) ** 2).sum() / (magnitude**2).sum(), rel=1e-2
    )


def test_outputs_that_numpy_measures_are_handed_over_for_few_layers_at_a_time(monkeypatch):
    net = model(f"g (float[n, 8] x) => (float[n, 8] y) {{ {CHAIN} }}", **W)
    quantized = qdq.apply(as_ir(net), qdq.make_plan(as_ir(net), place(as_ir(net)), ranges(net), "minmax"))
    expected = effects(net, quantized, [{"x": X}], ["y", "b", "a"])
    handed_over = []
    graph = output_effects.effects_graph

    def counted(*arguments, **options):
        made = graph(*arguments, **options)
        handed_over.append(sum(output.name.endswith("/b") for output in made.graph.outputs))
        return made

    monkeypatch.setattr(output_effects, "effects_graph", counted)
    monkeypatch.setattr(output_effects, "trusted", lambda *_: False)
    monkeypatch.setattr(output_effects, "HANDED_OVER", 2 * X.nbytes)
    assert effects(net, quantized, [{"x": X}], ["y", "b", "a"]) == pytest.approx(expected, rel=1e-5)
    assert handed_over == [0, 2, 1]


def test_an_output_with_nan_gives_an_infinite_share_and_one_that_is_not_reached_none():
    negative = model(
        "g (float[n, 8] x) => (float[n, 8] y) { h = Relu (x) a = Neg (h) r = Relu (x) s = Log (a) y = Add (s, r) }"
    )
    positive = model(
        "g (float[n, 8] x) => (float[n, 8] y) { h = Relu (x) a = Exp (h) r = Relu (x) s = Log (a) y = Add (s, r) }"
    )
    shares = effects(positive, negative, [{"x": X}], ["h", "a"])
    assert shares == {"h": 0.0, "a": math.inf}


def test_an_output_that_no_node_computes_has_no_effect_of_its_own():
    net = model("g (float[n, 8] x) => (float[n, 8] x, float[n, 8] y) { y = Relu (x) }")
    other = model("g (float[n, 8] x) => (float[n, 8] x, float[n, 8] y) { y = Abs (x) }")
    negative = np.minimum(X, 0)
    expected = (negative**2).sum() / (np.maximum(X, 0) ** 2).sum()
    assert effects(net, other, [{"x": X}], ["x", "y"]) == {"y": pytest.approx(expected, rel=1e-5)}


def test_where_numbers_decide_the_size_of_an_output_what_they_are_chosen_from_is_measured():
    body = "{ r = %s (x) p = NonZero (r) t = Transpose <perm = [1, 0]> (p) y = GatherND (x, t) }"
    net = model("g (float[n, 8] x) => (float[k] y) " + body % "Relu")
    other = model("g (float[n, 8] x) => (float[k] y) " + body % "Abs")
    expected = (np.minimum(X, 0) ** 2).sum() / (np.maximum(X, 0) ** 2).sum()
    assert effects(net, other, [{"x": X}], ["r", "y"]) == {"r": pytest.approx(expected, rel=1e-5)}


def test_a_layer_with_which_the_reference_fails_has_no_share():
    # What is looked up lies outside of the 64 rows.
    body = "{ r = %s (x, c) i = Cast <to = 7> (r) y = Gather (x, i) }"
    net = model("g (float[n, 8] x) => (float[n, 8, 8] y) " + body % "Min", c=np.float32(0.1))
    other = model("g (float[n, 8] x) => (float[n, 8, 8] y) " + body % "Div", c=np.float32(0.001))
    assert effects(net, other, [{"x": X}], ["r"]) == {}


def test_models_that_share_no_graph_have_no_effects():
    old = model("g (float[n, 8] x) => (float[n, 8] y) { y = Relu (x) }")
    new = model("g (float[n, 8] x) => (float[n, 8] y) { y = Relu (x) }")
    new.opset_import[0].version += 1
    assert effects(old, new, [{"x": X}], ["y"]) == {}


def test_few_feeds_are_run_where_layers_are_many(monkeypatch):
    monkeypatch.setattr(output_effects, "RUNS", 3)
    a = model("g (float[n, 8] x) => (float[n, 8] y) { a = Relu (x) y = Neg (a) }")
    b = model("g (float[n, 8] x) => (float[n, 8] y) { a = Identity (x) y = Neg (a) }")
    right, wrong = np.abs(X), -np.abs(X)
    assert effects(a, b, [{"x": right}, {"x": wrong}], ["a", "y"]) == {"a": 0.0, "y": 0.0}
    assert effects(a, b, [{"x": right}, {"x": wrong}], ["a"])["a"] == pytest.approx(1.0)


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
