"""Rules that move or rename elements: a no-op goes, a chain becomes one, what is known is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from layerline.graph.fusion.fuse import fuse
from tests.forms import proto
from tests.graph.fusing import fired, normal, only, ops, parse, prove, reason, run

X = "(float[N, 3, 4] x)"
END = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("body", "rule", "tensors"),
    [
        ("z = Identity(x)", "identity", {}),
        ("z = Dropout(x)", "dropout", {}),
        ("z = Cast <to = 1>(x)", "noop-cast", {}),
        ("z = CastLike(x, one)", "noop-cast", {"one": np.float32(1)}),
        ("z = Reshape(x, s)", "noop-reshape", {"s": np.array([0, 3, 4])}),
        ("z = Reshape(x, s)", "noop-reshape", {"s": np.array([-1, 3, 4])}),
        ("z = Expand(x, s)", "noop-reshape", {"s": np.array([1, 3, 1])}),
        ("z = Transpose <perm = [0, 1, 2]>(x)", "noop-transpose", {}),
        ("z = Slice(x, a, e, s)", "noop-slice", {"a": np.array([0]), "e": np.array([END]), "s": np.array([1])}),
        ("z = Slice(x, a, e)", "noop-slice", {"a": np.array([0, 0]), "e": np.array([END, 3])}),
        ("z = Pad(x, p)", "noop-pad", {"p": np.zeros(6, np.int64)}),
        ("z = Concat <axis = 1>(x)", "noop-single", {}),
        ("z = Sum(x)", "noop-single", {}),
        ("z = Mul(x, k)", "noop-arithmetic", {"k": np.ones((1, 4), np.float32)}),
        ("z = Div(x, k)", "noop-arithmetic", {"k": np.float32(1)}),
        ("z = Sub(x, k)", "noop-arithmetic", {"k": np.zeros((3, 1), np.float32)}),
        ("z = Add(k, x)", "noop-arithmetic", {"k": np.float32(0)}),
        ("z = Pow(x, k)", "noop-arithmetic", {"k": np.float32(1)}),
    ],
)
def test_what_does_nothing_goes(body: str, rule: str, tensors: dict[str, Any]) -> None:
    done = prove(parse(f"{X} => (float[N, 3, 4] y)", f"{body} y = Relu(z)", **tensors), {"x": normal(2, 3, 4)})
    assert ops(done.model) == ["Relu"]
    assert rule in fired(done)


@pytest.mark.parametrize(
    ("body", "tensors"),
    [
        ("z = Cast <to = 10>(x) r = Cast <to = 1>(z)", {}),
        ("r = Reshape(x, s)", {"s": np.array([0, 4, 3])}),
        ("r = Expand(x, s)", {"s": np.array([2, 1, 1, 1])}),
        ("r = Transpose(x)", {}),
        ("r = Slice(x, a, e, s)", {"a": np.array([0]), "e": np.array([3]), "s": np.array([2])}),
        (
            "r = Slice(x, a, e, s, t)",
            {"a": np.array([-1]), "e": np.array([-END]), "s": np.array([1]), "t": np.array([-1])},
        ),
        ("r = Mul(x, k)", {"k": np.ones((2, 1, 1, 1), np.float32)}),
        ("r = Sub(k, x)", {"k": np.float32(0)}),
        ("r = Div(k, x)", {"k": np.float32(1)}),
        ("r = Pow(k, x)", {"k": np.float32(1)}),
    ],
)
def test_near_misses_stay(body: str, tensors: dict[str, Any]) -> None:
    model = parse(f"{X} => (float[] y)", f"{body} y = Relu(r)", **tensors)
    before = len(model.graph.node)
    assert len(proto(prove(model, {"x": normal(2, 3, 4)}).model).graph.node) == before


@pytest.mark.parametrize("x", ["input", "output"])
def test_graph_inputs_and_outputs_keep_their_names(x: str) -> None:
    """An Identity between an input and an output, or between two outputs, has to stay."""
    if x == "input":
        model = parse(f"{X} => (float[N, 3, 4] y)", "y = Identity(x)")
    else:
        model = parse(f"{X} => (float[N, 3, 4] z, float[N, 3, 4] y)", "z = Relu(x) y = Identity(z)")
    done = prove(model, {"x": normal(2, 3, 4)})
    assert ops(done.model)[-1] == "Identity"
    assert "y is a graph output and must stay apart from" in reason(done, "identity")


def test_value_before_an_identity_output_takes_its_name() -> None:
    done = prove(parse(f"{X} => (float[N, 3, 4] y)", "z = Relu(x) y = Identity(z)"), {"x": normal(2, 3, 4)})
    assert [n.output[0] for n in proto(done.model).graph.node] == ["y"]
    assert [(f.site.value, f.result) for f in done.firings] == [("y", "y")]


def test_a_node_of_the_same_module_hands_its_value_the_name_people_know() -> None:
    """The MatMul of a Linear whose bias is 0 becomes what the Linear was called."""
    model = parse("(float[N, 3, 4] x) => (float[N, 3, 2] y)", "m = MatMul(x, w) linear = Add(m, b) y = Relu(linear)",
                  w=normal(4, 2), b=np.zeros(2, np.float32))  # fmt: skip
    for node in model.graph.node[:2]:
        node.metadata_props.add(key="layerline.module", value="fc")
    done = prove(model, {"x": normal(2, 3, 4)})
    assert [n.output[0] for n in proto(done.model).graph.node] == ["linear", "y"]


def test_dropout_that_may_train_stays() -> None:
    model = parse(f"{X} => (float[N, 3, 4] y)", "y = Dropout(x, r, t)", r=np.float32(0), t=np.array(True))
    done = prove(model, {"x": normal(2, 3, 4)})
    assert ops(done.model) == ["Dropout"]
    assert "may be in training mode" in reason(done, "dropout")


def test_dropout_whose_mask_is_read_stays() -> None:
    done = prove(
        parse(f"{X} => (float[N, 3, 4] y, bool[N, 3, 4] m)", "z, m = Dropout(x) y = Relu(z)"), {"x": normal(2, 3, 4)}
    )
    assert ops(done.model) == ["Dropout", "Relu"]
    assert reason(done, "dropout") == "second output m of Dropout z is used"


@pytest.mark.parametrize(
    ("body", "tensors", "expected"),
    [
        ("a = Reshape(x, s) y = Reshape(a, t)", {"s": [-1], "t": [4, 6]}, ["Reshape"]),
        ("a = Flatten(x) b = Unsqueeze(a, t) y = Squeeze(b, t)", {"t": [2]}, ["Reshape"]),
        ("a = Unsqueeze(x, s) y = Reshape(a, t)", {"s": [0], "t": [-1, 12]}, ["Reshape"]),
        ("a = Transpose <perm = [2, 0, 1]>(x) y = Transpose <perm = [1, 2, 0]>(a)", {}, ["Identity"]),
        ("a = Transpose <perm = [2, 0, 1]>(x) y = Transpose <perm = [2, 0, 1]>(a)", {}, ["Transpose"]),
        ("a = Transpose(x) y = Transpose(a)", {}, ["Identity"]),
    ],
)
def test_chains_become_one(body: str, tensors: dict[str, list[int]], expected: list[str]) -> None:
    model = parse("(float[2, 3, 4] x) => (float[] y)", f"{body[::-1].replace('= y', '= z', 1)[::-1]} y = Relu(z)",
                  **{k: np.array(v, np.int64) for k, v in tensors.items()})  # fmt: skip
    done = prove(model, {"x": normal(2, 3, 4)})
    assert ops(done.model) == [*(o for o in expected if o != "Identity"), "Relu"]


@pytest.mark.parametrize("size", [2, 5])
def test_reshape_to_a_computed_shape_is_stored_with_0_and_minus_1(size: int) -> None:
    body = """s = Shape(x) n = Gather(s, i0) t = Gather(s, i1) u = Unsqueeze(n, a) v = Unsqueeze(t, a)
              to = Concat <axis = 0>(u, v, h) y = Reshape(x, to)"""
    model = parse("(float[batch, seq, 6] x) => (float[batch, seq, 2, 3] y)", body,
                  i0=np.array(0), i1=np.array(1), a=np.array([0]), h=np.array([2, 3]))  # fmt: skip
    done = prove(model, {"x": normal(2, 4, 6)}, {"x": normal(size, 7, 6)})
    assert ops(done.model) == ["Reshape"]
    [shape] = [onnx.numpy_helper.to_array(t).tolist() for t in proto(done.model).graph.initializer]
    assert shape == [0, 0, 2, 3]


def test_reshape_that_leaves_two_sizes_open_stays() -> None:
    model = parse("(float[batch, seq, 6] x, int64[2] to) => (float[] y)", "y = Reshape(x, to)")
    done = prove(model, {"x": normal(2, 4, 6), "to": np.array([8, 6])})
    assert ops(done.model) == ["Reshape"]
    assert "more than one size open" in reason(done, "reshape-target")


def test_shape_arithmetic_with_one_answer_is_folded() -> None:
    body = """s = Shape(x) c = Gather(s, i) f = Mul(c, two) e = Equal(f, eight) w = Where(e, f, c) u = Unsqueeze(w, a)
              to = Concat <axis = 0>(minus, u) y = Reshape(x, to)"""
    model = parse("(float[N, 4] x) => (float[] y)", body, i=np.array(1), two=np.array(2), eight=np.array(8),
                  a=np.array([0]), minus=np.array([-1]))  # fmt: skip
    done = prove(model, {"x": normal(6, 4)})
    assert ops(done.model) == ["Reshape"]


def test_declared_shapes_of_foreign_files_are_not_believed() -> None:
    """The file says that z has 4 columns; it has as many as the input."""
    model = parse("(float[N, M] x) => (int64[2] y)", "z = Relu(x) y = Shape(z)")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, [2, 4]))
    done = prove(model, {"x": normal(2, 4)}, {"x": normal(3, 5)})
    np.testing.assert_array_equal(run(done.model, {"x": normal(3, 5)})["y"], [3, 5])


@pytest.mark.parametrize("expand", [[2, 3, 4], [1, 3, 4], [3, 1]])
def test_expand_that_broadcasting_does_anyway_goes(expand: list[int]) -> None:
    model = parse(
        "(float[2, 3, 4] x, float[1, 4] k) => (float[2, 3, 4] y)", "e = Expand(k, s) y = Add(x, e)", s=np.array(expand)
    )
    done = prove(model, {"x": normal(2, 3, 4), "k": normal(1, 4)})
    assert ops(done.model) == ["Add"]


def test_expand_that_makes_the_result_larger_stays() -> None:
    model = parse(
        "(float[3, 4] x, float[4] k) => (float[2, 3, 4] y)", "e = Expand(k, s) y = Add(x, e)", s=np.array([2, 1, 1])
    )
    assert ops(prove(model, {"x": normal(3, 4), "k": normal(4)}).model) == ["Expand", "Add"]


def test_expand_sinks_through_scalars_and_goes() -> None:
    body = "e = Expand(m, s) w = Where(e, zero, low) y = Add(x, w)"
    model = parse("(float[N, 2, 3, 3] x, bool[1, 1, 1, 3] m) => (float[N, 2, 3, 3] y)", body,
                  s=np.array([1, 1, 3, 3]), zero=np.float32(0), low=np.float32(-1e9))  # fmt: skip
    done = prove(model, {"x": normal(2, 2, 3, 3), "m": np.array([[[[True, False, True]]]])})
    assert ops(done.model) == ["Where", "Add"]


@pytest.mark.parametrize("batch", ["N", "2"])
def test_axes_joined_moved_and_split_are_one_transpose(batch: str) -> None:
    body = "j = Reshape(x, a) t = Transpose <perm = [0, 2, 1]>(j) y = Reshape(t, b)"
    model = parse(f"(float[{batch}, 3, 5, 4] x) => (float[{batch}, 3, 4, 5] y)", body,
                  a=np.array([-1, 5, 4]), b=np.array([-1, 3, 4, 5]))  # fmt: skip
    done = prove(model, {"x": normal(2, 3, 5, 4)})
    assert ops(done.model) == ["Transpose"]
    assert list(proto(done.model).graph.node[0].attribute[0].ints) == [0, 1, 3, 2]


def test_axes_split_another_way_stay() -> None:
    body = "j = Reshape(x, a) t = Transpose <perm = [0, 2, 1]>(j) y = Reshape(t, b)"
    model = parse(
        "(float[2, 3, 5, 4] x) => (float[2, 4, 3, 5] y)", body, a=np.array([6, 5, 4]), b=np.array([2, 4, 3, 5])
    )
    assert ops(prove(model, {"x": normal(2, 3, 5, 4)}).model) == ["Reshape", "Transpose", "Reshape"]


def test_sequence_taken_apart_is_a_split() -> None:
    body = "s = SplitToSequence <axis = 1>(x, k) b = SequenceAt(s, one) a = SequenceAt(s, last) y = Add(a, b)"
    model = parse("(float[N, 6] x) => (float[N, 2] y)", body, k=np.array(2), one=np.array(1), last=np.array(-1))
    done = prove(model, {"x": normal(3, 6)})
    assert ops(done.model) == ["Split", "Add"]
    assert set(proto(done.model).graph.node[0].output) >= {"a", "b"}


def test_sequence_used_in_another_way_stays() -> None:
    model = parse(
        "(float[N, 6] x) => (int64 y)", "s = SplitToSequence <axis = 1>(x, k) y = SequenceLength(s)", k=np.array(2)
    )
    done = prove(model, {"x": normal(3, 6)})
    assert ops(done.model) == ["SplitToSequence", "SequenceLength"]
    assert "used other than by picking fixed pieces" in reason(done, "split-sequence")


def test_rules_switched_off_do_not_fire() -> None:
    model = parse(f"{X} => (float[N, 3, 4] y)", "z = Identity(x) w = Transpose <perm = [0, 1, 2]>(z) y = Relu(w)")
    assert ops(prove(model, {"x": normal(2, 3, 4)}, rules=only("identity")).model) == ["Transpose", "Relu"]


def picks(inside: str) -> onnx.ModelProto:
    body = f"""s = SplitToSequence <axis = 0>(x, k) {"p = SequenceAt(s, zero)" if inside == "one" else "p = Neg(x)"}
      r = If (c) <then_branch: graph = t () => (float[] ty) {{ ta = SequenceAt(s, one) ty = Relu(ta) }},
                  else_branch: graph = e () => (float[] ey) {{ ey = Neg(x) }}>"""
    return parse("(float[2, 3] x, bool c) => (float[] p, float[] r)", body, k=np.array([1, 1]), zero=np.array(0),
                 one=np.array(1))  # fmt: skip


@pytest.mark.parametrize("inside", ["one", "all"])
def test_sequence_picked_in_a_body_stays(inside: str) -> None:
    done = prove(picks(inside), *({"x": normal(2, 3), "c": np.array(c)} for c in (True, False)))
    assert "SplitToSequence" in ops(done.model)
    assert "is picked in the body of another node" in reason(done, "split-sequence")


@pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24), reason="it hands out no 8-bit floats: undone"
)
@pytest.mark.parametrize("saturate", [0, 1])
def test_what_becomes_of_numbers_beyond_an_8_bit_float_is_kept(saturate: int) -> None:
    body = f"b = CastLike <saturate = {saturate}>(x, l) y = Cast <to = 1>(b)"
    model = parse("(float16[N] x) => (float[N] y)", body, 20)
    model.graph.initializer.append(onnx.helper.make_tensor("l", onnx.TensorProto.FLOAT8E4M3FN, [1], [0.0]))
    done = fuse(model, [{"x": np.array([1, 2, 500, -600], np.float16)}])
    assert not done.undone
    assert ops(done.model) == ["Cast", "Cast"]
    assert [a.i for a in proto(done.model).graph.node[0].attribute if a.name == "saturate"] == [saturate]
