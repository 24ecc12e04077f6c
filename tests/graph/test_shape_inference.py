"""Shapes inside bodies: nothing is taken for granted, whatever the file says of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.fusing import fired, normal, parse, prove, run

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


def test_bodies_side_by_side_keep_their_own_shapes_under_one_name() -> None:
    turn = "<body: graph = b (int64 i, bool go, {0} v) => (bool stay, {0} w) {{ stay = Identity(go) w = Relu(v) }}>"
    text = f"""y = Loop (n, yes, x) {turn.format("float[N, 4]")}
    z = Loop (n, yes, x3) {turn.format("float[N, 4, 1]")}"""
    model = parse(
        "(float[N, 4] x, float[N, 4, 1] x3, int64 n) => (float[N, 4] y, float[N, 4, 1] z)", text, yes=np.array(True)
    )
    done = prove(model, {"x": normal(2, 4), "x3": normal(2, 4, 1), "n": np.array(3)})
    bodies = list(done.model.graph.subgraphs())
    assert [str(body.inputs[2].shape) for body in bodies] == ["[N,4]", "[N,4,1]"]
