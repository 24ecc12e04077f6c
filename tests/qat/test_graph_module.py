"""A graph as a torch module: the same values, the plan's places, gradients for weights, and what it refuses."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import Histogram
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import qdq, qdq_placement
from layerline.pipeline.errors import StageError
from layerline.qat import training
from layerline.qat.graph_module import GraphModule
from tests.forms import as_ir, proto

RNG = np.random.default_rng(0)
NET = """g (float[n, 3, 6, 6] x) => (float[n, 4] y) {
  a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
  r = Relu (a)
  c = Conv <pads = [1, 1, 1, 1], group = 4> (r, w2, b2)
  s = Add (c, r)
  m = Mul (s, half)
  k = Concat <axis = 1> (m, r)
  p = GlobalAveragePool (k)
  f = Flatten (p)
  v = Transpose (wf)
  l = MatMul (f, v)
  y = Add (l, bf)
}"""
SHAPES = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 1, 3, 3), "b2": (4,), "half": (4, 1, 1), "wf": (4, 8), "bf": (4,)}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
X = RNG.standard_normal((5, 3, 6, 6)).astype(np.float32)


def light(text=NET, **weights):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in (weights or WEIGHTS).items())
    return as_ir(model)


def plan_of(model, feed, rules=None):
    placement = qdq_placement.place(as_ir(model), rules)
    names = [wanted.name for wanted in placement.wanted if wanted.role == "activation"]
    values = {**feed, **OnnxRuntime().open(model, names).run(feed)}
    histograms = {name: Histogram() for name in names}
    for name, histogram in histograms.items():
        histogram.update(values[name])
    return qdq.make_plan(as_ir(model), placement, histograms, "minmax")


def places(plan):
    return {(value.name, *reader) for value in plan.values for reader in value.readers}


def places_in(model):
    """Who reads what behind a DequantizeLinear, by the name of the float value."""
    made = {o: node for node in proto(model).graph.node for o in node.output}
    found = set()
    for node in proto(model).graph.node:
        for index, name in enumerate(node.input):
            source = made.get(name)
            if source is not None and source.op_type == "DequantizeLinear":
                found.add((re.sub(r"/dequantized(_\d+)?$", "", name), node.output[0], index))
    return found


def test_it_computes_what_onnxruntime_does_and_trains_weights_and_biases_alone():
    model = light()
    module = GraphModule(model)
    (mine,) = module(torch.from_numpy(X))
    assert np.allclose(mine.detach().numpy(), OnnxRuntime().open(model).run({"x": X})["y"], rtol=1e-5, atol=1e-6)
    mine.sum().backward()
    trained = {name.rpartition(".")[2].rpartition("_")[0] for name, _ in module.named_parameters()}
    assert trained == {"w1", "b1", "w2", "b2", "wf", "bf"}
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_is_fake_quantised_is_what_the_plan_says_and_the_onnx_has():
    model = light()
    plan = plan_of(model, {"x": X})
    module = GraphModule(model, plan)
    quantized = qdq.apply(as_ir(model), plan)
    assert {v.name for v in plan.values} == {"x", "w1", "r", "w2", "m", "k", "f", "v"}
    assert set(module.quantized) == places(plan) == places_in(quantized)
    steps = {value.name: value.scales[0] for value in plan.values if value.role == "activation"}
    name, ratio = training.worst(module, quantized, [{"x": X}], steps)
    assert ratio < 0.01, name


def test_another_scale_is_more_than_a_step_away():
    model = light()
    plan = plan_of(model, {"x": X})
    values = tuple(
        dataclasses.replace(v, scales=(v.scales[0] * 3,)) if v.name == "r" else v for v in plan.values
    )  # fmt: skip
    quantized = qdq.apply(as_ir(model), dataclasses.replace(plan, values=values))
    name, ratio = training.worst(GraphModule(model, plan), quantized, [{"x": X}], {})
    assert name == "c" and ratio > 1


def test_values_that_share_a_scale_train_one():
    model = light()
    plan = plan_of(model, {"x": X})
    assert plan.value("m").shared == ("k", "r")
    module = GraphModule(model, plan, learned=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.from_numpy(X))[0].square().sum().backward()
    optimizer.step()
    scales = module.scales()
    assert scales["m", "int8"] == scales["k", "int8"] == scales["r", "int8"] != plan.value("m").scales[0]
    assert len(scales["w1", "int8"]) == 4


@pytest.mark.parametrize("formats", [{"c": "fp8", "l": "fp8"}, {"a": "fp8", "c": "fp8", "l": "fp8"}])
def test_fp8_is_quantised_as_onnxruntime_does_it_beside_int8(formats):
    model = raise_opset(light(), 19)
    plan = plan_of(model, {"x": X}, qdq_placement.Rules(formats=formats))
    module = GraphModule(model, plan, learned=True)
    quantized = qdq.apply(as_ir(model), plan)
    assert {v.dtype for v in plan.values if v.name in ("w2", "v")} == {"float8e4m3fn"}
    assert set(module.quantized) == places(plan) == places_in(quantized)
    name, ratio = training.worst(module, quantized, [{"x": X}], {})
    assert ratio < 0.01, name
    module(torch.from_numpy(X))[0].square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in module.quantizers.parameters())


def test_pruned_weights_stay_zero_and_the_others_move():
    pruned = WEIGHTS["w1"].copy()
    pruned.reshape(-1, 2)[::2] = 0  # half of them
    model = light(**{**WEIGHTS, "w1": pruned})
    module = GraphModule(model, plan_of(model, {"x": X}), learned=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.from_numpy(X))[0].square().sum().backward()
        optimizer.step()
    after = as_ir(module.trained(model)).graph.initializers["w1"].const_value.numpy()
    assert np.array_equal(after == 0, pruned == 0) and not np.allclose(after, pruned)
    # The graph keeps its names, and what is not trained its numbers.
    trained = module.trained(model)
    assert [n.output for n in proto(trained).graph.node] == [n.output for n in proto(model).graph.node]
    assert np.array_equal(as_ir(trained).graph.initializers["half"].const_value.numpy(), WEIGHTS["half"])


def test_an_operator_without_a_gradient_is_named_before_anything_is_trained():
    text = """g (float[4, n, 3] x) => (float[4, 1, n, 2] y) {
      l = MatMul (x, w)
      y, h, c = LSTM <hidden_size = 2, clip = 1.0> (l, a, b)
    }"""
    weights = {"w": (3, 3), "a": (1, 8, 3), "b": (1, 8, 2)}
    model = light(text, **{name: RNG.standard_normal(shape).astype(np.float32) for name, shape in weights.items()})
    with pytest.raises(StageError, match="no gradient for this LSTM") as error:
        training.check(model, [{"x": np.ones((4, 2, 3), np.float32)}])
    assert error.value.where == "y" and "mode: int8" in error.value.hint


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("op", "gates", "states"), [("LSTM", 4, 2), ("GRU <linear_before_reset = 1>", 3, 1), ("RNN", 1, 1)]
)
def test_recurrent_layers_are_those_of_onnxruntime_and_their_weights_are_trained(op, gates, states, direction):
    name, _, more = op.partition(" <")
    count = 2 if direction == "bidirectional" else 1
    attributes = ", ".join(filter(None, ["hidden_size = 5", f'direction = "{direction}"', more.rstrip(">")]))
    starts = ["h0", "c0"][:states]
    text = f"""g (float[7, n, 3] x) => (float[7, {count}, n, 5] y, float[{count}, n, 5] h) {{
      l = MatMul (x, v)
      y, h = {name} <{attributes}> (l, w, r, b, , {", ".join(starts)})
    }}"""
    shapes = {"v": (3, 3), "w": (count, gates * 5, 3), "r": (count, gates * 5, 5), "b": (count, 2 * gates * 5)}
    shapes.update(dict.fromkeys(starts, (count, 4, 5)))
    drawn = np.random.default_rng(5)
    model = light(text, **{key: drawn.standard_normal(size).astype(np.float32) for key, size in shapes.items()})
    x = drawn.standard_normal((7, 4, 3)).astype(np.float32)
    module = GraphModule(model)
    results = module(torch.from_numpy(x))
    expected = OnnxRuntime().open(model).run({"x": x})
    for result, key in zip(results, ("y", "h"), strict=True):
        np.testing.assert_allclose(result.detach(), expected[key], rtol=1e-4, atol=1e-5)
    results[0].square().sum().backward()
    gradients = {key.rpartition(".")[2].rpartition("_")[0]: p.grad for key, p in module.named_parameters()}
    assert set(gradients) == {"v", "w", "r", "b"}
    # The gradient by one weight of the state is the slope that finite differences give.
    wide = module.double()
    parameter = next(p for key, p in wide.named_parameters() if ".r_" in key)
    losses = []
    for change in (1e-4, -1e-4):
        with torch.no_grad():
            parameter[0, 1, 2] += change
            losses.append(float(wide(torch.from_numpy(x).double())[0].square().sum()))
            parameter[0, 1, 2] -= change
    assert float(gradients["r"][0, 1, 2]) == pytest.approx((losses[0] - losses[1]) / 2e-4, rel=1e-3, abs=1e-4)


def test_sequences_of_different_lengths_have_no_gradient():
    text = """g (float[4, 2, 3] x, int32[2] lengths) => (float[4, 1, 2, 2] y) {
      l = MatMul (x, w)
      y = RNN <hidden_size = 2> (l, a, b, , lengths)
    }"""
    weights = {"w": (3, 3), "a": (1, 2, 3), "b": (1, 2, 2)}
    model = light(text, **{name: RNG.standard_normal(shape).astype(np.float32) for name, shape in weights.items()})
    x = torch.ones(4, 2, 3)
    GraphModule(model)(x, torch.tensor([4, 4], dtype=torch.int32))[0].sum().backward()
    with pytest.raises(StageError, match="no gradient for this RNN"):
        GraphModule(model)(x, torch.tensor([4, 3], dtype=torch.int32))


BODIES = {
    "Scan": "Scan <num_scan_inputs = 1, body = b (float[3] s) => (float[3] t) { t = Relu (s) }> (l)",
    "If": """If (which) <then_branch = a () => (float[4, 3] p) { p = Mul (l, l) },
                         else_branch = b () => (float[4, 3] q) { q = Neg (l) }>""",
}


@pytest.mark.parametrize("op", BODIES)
def test_nodes_with_bodies_are_refused(op):
    text = f"g (float[4, 3] x, bool which) => (float[4, 3] y) {{ l = MatMul (x, w) y = {BODIES[op]} }}"
    with pytest.raises(StageError, match=f"no gradient for this {op}") as error:
        GraphModule(light(text, w=np.ones((3, 3), np.float32)))
    assert error.value.where == "y" and "mode: int8" in error.value.hint


def test_a_gru_whose_reset_gate_comes_first_has_no_gradient():
    text = "g (float[7, n, 3] x) => (float[7, 1, n, 5] y) { l = MatMul (x, v) y = GRU <hidden_size = 5> (l, w, r) }"
    shapes = {"v": (3, 3), "w": (1, 15, 3), "r": (1, 15, 5)}
    model = light(text, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    with pytest.raises(StageError, match="no gradient for this GRU"):
        GraphModule(model)(torch.ones(7, 2, 3))


def test_masks_positions_and_all_zero_weights_are_no_biases_and_not_pruned():
    text = """g (float[n, 3, 4] x) => (float[n, 3, 3] y) {
      t = Transpose <perm = [0, 2, 1]> (x)
      scores = MatMul (x, t)
      masked = Add (scores, mask)
      l = MatMul (masked, w)
      m = Add (l, positions)
      y = Add (m, bias)
    }"""
    shapes = {"mask": (3, 3), "w": (3, 3), "positions": (3, 3), "bias": (1, 1, 3)}
    weights = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    module = GraphModule(light(text, **{**weights, "w": np.zeros((3, 3), np.float32)}))
    names = {name.rpartition(".")[2].rpartition("_")[0] for name, _ in module.named_parameters()}
    assert names == {"w"} and not list(module.masks.buffers())


def test_weights_in_constants_are_trained_and_written_back():
    text = """g (float[n, 2] x) => (float[n, 2] y) {
      w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
      v = Transpose (w)
      y = MatMul (x, v)
    }"""
    model = light(text, unused=np.ones(1, np.float32))
    module = GraphModule(model)
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    results = OnnxRuntime().open(module.trained(model)).run({"x": np.eye(2, dtype=np.float32)})
    assert results["y"].tolist() == [[2, 6], [4, 8]]


def test_a_weight_that_is_a_mean_of_a_batch_norm_too_is_trained_where_it_is_a_weight():
    net = light("g (float[n, 3] x) => (float[n, 3] y) { a = Gemm (x, w, b) y = BatchNormalization (a, s, b, b, v) }",
                w=RNG.standard_normal((3, 3)).astype(np.float32), b=np.float32([1, 2, 3]), s=np.ones(3, np.float32),
                v=np.ones(3, np.float32))  # fmt: skip
    graph = GraphModule(net)
    x = RNG.standard_normal((4, 3)).astype(np.float32)
    [result] = graph(torch.from_numpy(x))
    result.square().sum().backward()
    np.testing.assert_allclose(result.detach(), OnnxRuntime().open(net).run({"x": x})["y"], rtol=1e-5, atol=1e-5)
    assert all(weight.grad is not None for weight in graph.weights.parameters())


def test_a_batch_of_a_size_that_the_graph_does_not_take_is_told():
    text = """g (float[4, 3] x) => (float[2, 2, 2] y) {
      l = MatMul (x, w)
      shape = Constant <value = int64[3] {2, 2, 2}> ()
      y = Reshape (l, shape)
    }"""
    module = GraphModule(light(text, w=np.ones((3, 2), np.float32)))
    with pytest.raises(StageError, match=r"Reshape fails in torch on \(5, 2\), \(3,\)") as error:
        module(torch.ones(5, 3))
    assert error.value.where == "y"


def test_operators_without_a_gradient_are_no_matter_where_none_passes():
    text = """g (float[n, 3] x) => (float[n, 2] y, int64[n, 2] which) {
      y = MatMul (x, w)
      none = IsInf (x)
      which = Cast <to = 7> (y)
    }"""
    model = light(text, w=RNG.standard_normal((3, 2)).astype(np.float32))
    training.check(model, [{"x": np.ones((4, 3), np.float32)}])


def test_a_value_that_torch_computes_otherwise_is_named():
    text = """g (float[n, 3] x) => (float[n, 2] y) {
      noise = RandomNormalLike (x)
      noisy = Add (x, noise)
      y = MatMul (noisy, w)
    }"""
    model = light(text, w=RNG.standard_normal((3, 2)).astype(np.float32))
    with pytest.raises(StageError, match="differ by") as error:
        training.check(model, [{"x": np.ones((4, 3), np.float32)}])
    assert error.value.where == "noise"


def test_other_formats_than_symmetric_int8_are_refused():
    model = light()
    plan = plan_of(model, {"x": X})
    other = dataclasses.replace(plan, values=(dataclasses.replace(plan.values[0], dtype="uint8", zero_point=128),))
    with pytest.raises(StageError, match="symmetric int8 and fp8, and the plan has uint8, zero point 128"):
        GraphModule(model, other)


def test_weights_in_half_precision_are_refused():
    text = """g (float16[n, 3] x) => (float16[n, 2] y) {
      y = MatMul (x, w)
    }"""
    model = light(text, w=RNG.standard_normal((3, 2)).astype(np.float16))
    with pytest.raises(StageError, match="needs float32 weights, and this one is float16") as error:
        GraphModule(model)
    assert error.value.where == "w"


def test_a_model_without_weights_is_refused():
    model = light("g (float[n, 3] x) => (float[n, 3] y) {\n y = Relu (x)\n}", unused=np.ones(1, np.float32))
    with pytest.raises(StageError, match="no output depends on a weight"):
        training.check(model, [{"x": np.ones((4, 3), np.float32)}])
