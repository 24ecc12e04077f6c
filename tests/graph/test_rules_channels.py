"""Channels that hold a constant leave the layers that make and read them; what can't be followed says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.forms import proto
from tests.graph.fusing import fired, normal, ops, parse, prove, reason, statistics


def pruned(*shape: int, gone: tuple[int, ...] = (1, 3), seed: int = 0) -> np.ndarray:
    """Weights whose output channels, on axis 0, are zero where they are gone."""
    weight = normal(*shape, seed=seed)
    weight[list(gone)] = 0
    return weight


def shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Sizes of what the model stores, by the names' beginnings."""
    return {t.name.partition("/")[0]: numpy_helper.to_array(t).shape for t in proto(model).graph.initializer}


NET = """
  a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) r = Relu (a) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
  m = Mul (p, s) d = Conv <group = 6, pads = [1, 1, 1, 1]> (m, wd) f = Flatten (d) y = Gemm <transB = 1> (f, w2, b2)
"""


def test_channels_go_from_all_that_they_pass_through() -> None:
    weights: dict[str, Any] = {
        "w1": pruned(6, 3, 3, 3), "b1": pruned(6, seed=1), "wd": normal(6, 1, 3, 3, seed=2),
        "s": normal(6, 1, 1, seed=3), "w2": normal(5, 24, seed=4), "b2": normal(5, seed=5),
    }  # fmt: skip
    done = prove(parse("(float[N, 3, 4, 4] x) => (float[N, 5] y)", NET, **weights), {"x": normal(2, 3, 4, 4)})
    assert fired(done) == {"channels"}
    assert shapes(done.model) == {
        "w1": (4, 3, 3, 3), "b1": (4,), "wd": (4, 1, 3, 3), "s": (4, 1, 1), "w2": (5, 16), "b2": (5,),
    }  # fmt: skip
    kept = numpy_helper.to_array(next(t for t in proto(done.model).graph.initializer if t.name.startswith("w1")))
    np.testing.assert_array_equal(kept, weights["w1"][[0, 2, 4, 5]])


@pytest.mark.parametrize(("pads", "cut"), [(0, True), (1, False)])
def test_a_constant_moves_into_the_next_bias_unless_that_layer_pads(pads: int, cut: bool) -> None:
    body = f"a = Conv (x, w1, b1) r = Sigmoid (a) y = Conv <pads = [{pads}, {pads}, {pads}, {pads}]> (r, w2)"
    weights = {"w1": pruned(4, 2, 1, 1), "b1": normal(4, seed=1), "w2": normal(3, 4, 3, 3, seed=2)}
    done = prove(parse("(float[N, 2, 5, 5] x) => (float[N, 3, H, W] y)", body, **weights), {"x": normal(2, 2, 5, 5)})
    assert (fired(done) == {"channels"}) is cut
    if not cut:
        assert "constant wherever it is read" in reason(done, "channels")
        return
    stored = {t.name: numpy_helper.to_array(t) for t in proto(done.model).graph.initializer}
    [bias] = [a for n, a in stored.items() if n == "w2/cut_bias"]
    held = 1 / (1 + np.exp(-weights["b1"].astype(np.float64)))
    np.testing.assert_allclose(bias, (weights["w2"].sum((2, 3)) * held)[:, [1, 3]].sum(1), rtol=1e-5)


RESIDUAL = "a = Conv (x, w1) r = Relu (a) c = Conv (r, w2) s = Add (r, c) t = Relu (s) y = Conv (t, w3)"


@pytest.mark.parametrize(("second", "left"), [((1, 3), 2), ((3,), 3), ((0,), 4)])
def test_a_residual_sum_loses_what_both_sides_lack(second: tuple[int, ...], left: int) -> None:
    weights = {
        "w1": pruned(4, 2, 1, 1),
        "w2": pruned(4, 4, 1, 1, gone=second, seed=1),
        "w3": normal(2, 4, 1, 1, seed=2),
    }
    model = parse("(float[N, 2, H, W] x) => (float[N, 2, H, W] y)", RESIDUAL, **weights)
    done = prove(model, {"x": normal(2, 2, 3, 3)}, {"x": normal(1, 2, 5, 4)})
    sizes = shapes(done.model)
    assert (sizes["w1"], sizes["w2"], sizes["w3"]) == ((left, 2, 1, 1), (left, left, 1, 1), (2, left, 1, 1))
    assert sorted(ops(done.model)) == ["Add", "Conv", "Conv", "Conv", "Relu", "Relu"]


def test_a_chain_of_blocks_stays_in_order() -> None:
    body = """a = Conv (x, w1) h = Conv (a, w2) i = Relu (h) c = Conv (i, w3) s = Add (a, c)
              u = Conv (s, w4) v = Relu (u) d = Conv (v, w5) t = Add (s, d) y = Conv (t, w6)"""
    weights = {
        "w1": pruned(4, 2, 1, 1), "w2": normal(3, 4, 1, 1, seed=1), "w3": pruned(4, 3, 1, 1, seed=2),
        "w4": normal(3, 4, 1, 1, seed=3), "w5": pruned(4, 3, 1, 1, seed=4), "w6": normal(2, 4, 1, 1, seed=5),
    }  # fmt: skip
    done = prove(parse("(float[N, 2, 3, 3] x) => (float[N, 2, 3, 3] y)", body, **weights), {"x": normal(2, 2, 3, 3)})
    assert shapes(done.model) == {
        "w1": (2, 2, 1, 1), "w2": (3, 2, 1, 1), "w3": (2, 3, 1, 1), "w4": (3, 2, 1, 1), "w5": (2, 3, 1, 1),
        "w6": (2, 2, 1, 1),
    }  # fmt: skip


def test_layers_of_sequences_lose_their_hidden_channels() -> None:
    body = "a = MatMul (x, w1) b = Add (a, b1) g = Relu (b) y = MatMul (g, w2)"
    first, bias = normal(3, 6), normal(6, seed=1)
    first[:, [0, 5]], bias[[0, 5]] = 0, 0
    weights = {"w1": first, "b1": bias, "w2": normal(6, 3, seed=2)}
    done = prove(parse("(float[N, T, 3] x) => (float[N, T, 3] y)", body, **weights), {"x": normal(2, 4, 3)})
    assert shapes(done.model) == {"w1": (3, 4), "b1": (4,), "w2": (4, 3)}


def test_a_batchnorm_that_stays_and_a_gate_are_cut_too() -> None:
    body = """a = Conv (x, w1) n = BatchNormalization (r, gamma, beta, mean, var) r = Relu (a)
              p = GlobalAveragePool (n) q = Conv (p, w2) g = Sigmoid (q) m = Mul (n, g) y = Conv (m, w3)"""
    body = body.replace("n = BatchNormalization (r, gamma, beta, mean, var) r = Relu (a)",
                        "r = Relu (a) n = BatchNormalization (r, gamma, beta, mean, var)")  # fmt: skip
    norm = statistics(4)
    for name in ("gamma", "beta"):
        norm[name][[1, 3]] = 0
    weights = {"w1": pruned(4, 2, 1, 1), "w2": normal(4, 4, 1, 1, seed=1), "w3": normal(2, 4, 1, 1, seed=2), **norm}
    done = prove(parse("(float[N, 2, 3, 3] x) => (float[N, 2, 3, 3] y)", body, **weights), {"x": normal(2, 2, 3, 3)})
    sizes = shapes(done.model)
    assert (sizes["w1"], sizes["w2"], sizes["w3"]) == ((2, 2, 1, 1), (2, 2, 1, 1), (2, 2, 1, 1))
    assert {sizes[n] for n in norm} == {(2,)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y = Conv (x, w1)", "y is an output of the model"),
        ("a = Conv (x, w1) y = Softmax <axis = 1> (a)", "Softmax y reads a"),
        ("a = Conv (x, w1) b = Concat <axis = 1> (a, x) y = Relu (b)", "Concat b reads a"),
        ("a = Conv (x, w1) s = Add (a, x) y = Conv (s, w2)", "x is an input of the model"),
        ("a = Conv (x, w1) t = Transpose <perm = [0, 2, 3, 1]> (a) y = Relu (t)", "Transpose t reads a"),
    ],
)
def test_what_can_not_be_cut_says_why(body: str, said: str) -> None:
    weights = {"w1": pruned(4, 4, 1, 1), **({"w2": normal(2, 4, 1, 1)} if "w2" in body else {})}
    done = prove(parse("(float[N, 4, 3, 3] x) => (float[N, ?, ?, ?] y)", body, **weights), {"x": normal(2, 4, 3, 3)})
    assert "channels" not in fired(done) and said in reason(done, "channels")


def test_a_layer_without_any_weight_left_keeps_a_channel() -> None:
    body = "a = Conv (x, w1) r = Relu (a) y = Conv (r, w2)"
    weights = {"w1": np.zeros((4, 2, 1, 1), np.float32), "w2": normal(3, 4, 1, 1)}
    done = prove(parse("(float[N, 2, 3, 3] x) => (float[N, 3, 3, 3] y)", body, **weights), {"x": normal(2, 2, 3, 3)})
    assert shapes(done.model) == {"w1": (1, 2, 1, 1), "w2": (3, 1, 1, 1)}
