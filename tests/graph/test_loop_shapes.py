"""Shapes inside bodies: relied on where every turn keeps them, whatever the file says of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.forms import proto
from tests.graph.fusing import fired, normal, ops, parse, prove, run


def inner(model: onnx.ModelProto) -> list[str]:
    """Operators in the body of one node."""
    [loop] = [n for n in proto(model).graph.node if n.op_type in ("Loop", "Scan")]
    [graph] = [a.g for a in loop.attribute if a.name == "body"]
    return [n.op_type for n in graph.node]


GROWING = """y, s = Loop (n, yes, x) <body: graph =
    b (int64 i, bool go, float[1, 4] v) => (bool stay, float[] w, int64[] r) {
    stay = Identity(go) w = Concat <axis = 0>(v, v) r0 = Shape(v) r = Identity(r0) }>"""


@pytest.mark.parametrize("declared", ["1, 4", "M, 4", "?, 4"])
def test_shape_of_what_grows_from_turn_to_turn_is_no_constant(declared: str) -> None:
    """The file says (1, 4), which is right in the first turn only."""
    body = GROWING.replace("float[1, 4] v", f"float[{declared}] v")
    model = parse("(float[1, 4] x, int64 n) => (float[] y, int64[] s)", body, yes=np.array(True))
    done = prove(model, {"x": normal(1, 4), "n": np.array(3)}, {"x": normal(1, 4), "n": np.array(1)})
    assert "shape-constants" not in fired(done)
    np.testing.assert_array_equal(run(done.model, {"x": normal(1, 4), "n": np.array(3)})["s"], [[1, 4], [2, 4], [4, 4]])


@pytest.mark.parametrize("size", ["2", "N"])
@pytest.mark.parametrize("declared", ["", "2, 4", "7, 9"])
def test_shape_that_every_turn_gives_back_is_known(size: str, declared: str) -> None:
    body = f"""y, s = Loop (n, yes, x) <body: graph = b (int64 i, bool go, float[{declared}] v)
        => (bool stay, float[] w, int64[] r) {{
          stay = Identity(go) w = Mul(v, two) h = Shape(v) r = Gather(h, one) }}>"""
    model = parse(f"(float[{size}, 4] x, int64 n) => (float[] y, int64[] s)", body, yes=np.array(True),
                  two=np.float32(2), one=np.array([1]))  # fmt: skip
    done = prove(model, {"x": normal(2, 4), "n": np.array(3)}, {"x": normal(2, 4), "n": np.array(0)})
    assert "shape-constants" in fired(done)
    assert "Shape" not in inner(done.model)


def test_two_that_change_places_keep_what_they_share() -> None:
    """(2, 4) and (3, 4) are carried crosswise: 4 stays, the other size doesn't."""
    body = """y, z, s, t = Loop (n, yes, x, x2) <body: graph = b (int64 i, bool go, float[2, 4] v, float[3, 4] w)
        => (bool stay, float[] v2, float[] w2, int64[] r, int64[] q) {
          stay = Identity(go) v2 = Relu(w) w2 = Relu(v) h = Shape(v) r = Gather(h, zero) q = Gather(h, one) }>"""
    model = parse("(float[2, 4] x, float[3, 4] x2, int64 n) => (float[] y, float[] z, int64[] s, int64[] t)", body,
                  yes=np.array(True), zero=np.array([0]), one=np.array([1]))  # fmt: skip
    feed = {"x": normal(2, 4), "x2": normal(3, 4), "n": np.array(3)}
    done = prove(model, feed)
    assert inner(done.model).count("Gather") == 1
    np.testing.assert_array_equal(run(done.model, feed)["s"].reshape(-1), [2, 3, 2])


def test_what_a_scan_hands_out_is_a_slice() -> None:
    body = """f, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = b (float[] s, float[] e)
        => (float[] s2, int64[] r) { s2 = Add(s, e) r0 = Shape(e) r = Mul(r0, two) }>(s0, x)"""
    model = parse("(float[3] s0, float[3, T] x) => (float[] f, int64[] y)", body, two=np.array([2]))
    done = prove(model, {"s0": normal(3), "x": normal(3, 5)}, {"s0": normal(3), "x": normal(3, 2)})
    assert "shape-constants" in fired(done)
    assert ops(done.model) == ["Scan"]
    np.testing.assert_array_equal(run(done.model, {"s0": normal(3), "x": normal(3, 2)})["y"], [[6], [6]])
