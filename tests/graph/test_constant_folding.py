"""Constant folding, dead code, duplicates, and what lies in bodies and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from layerline.graph.analysis.ir_queries import constant
from tests.forms import proto
from tests.graph.fusing import fired, normal, only, ops, parse, prove, reason, run


def stored(model: onnx.ModelProto) -> dict[str, Any]:
    return {t.name: numpy_helper.to_array(t) for t in proto(model).graph.initializer}


def test_what_depends_on_constants_alone_is_computed_once() -> None:
    body = "t = Transpose <perm = [1, 0]>(w) s = Mul(t, k) y = MatMul(x, s)"
    model = parse("(float[N, 4] x) => (float[N, 2] y)", body, w=normal(2, 4), k=np.float32(3))
    done = prove(model, {"x": normal(3, 4)})
    assert ops(done.model) == ["MatMul"]
    np.testing.assert_allclose(stored(done.model)["s"], normal(2, 4).T * np.float32(3))


def test_axes_become_stored_tensors() -> None:
    """TensorRT wants the axes of a reduction as an initializer."""
    body = """a = Constant <value_int = 2>() b = Constant <value_int = 1>() d = Sub(b, a) e = Reshape(d, s)
              y = ReduceSum(x, e)"""
    done = prove(parse("(float[N, 3, 4] x) => (float[] y)", body, s=np.array([1])), {"x": normal(2, 3, 4)})
    assert ops(done.model) == ["ReduceSum"]
    assert proto(done.model).graph.node[0].input[1] in stored(done.model)


@pytest.mark.parametrize(("weights", "folded"), [(0, 2), (300_000, 3)])
def test_folded_constants_together_add_no_more_than_a_tenth_of_the_model(weights: int, folded: int) -> None:
    """Twelve tables of 40 kB, none of them beyond the limit of one: 100 kB in all, or a tenth of 1.2 MB of weights."""
    made = " ".join(f"k{i} = ConstantOfShape <value = float[1] {{{i + 2}}}>(s)" for i in range(12))
    total = " ".join(f"t{i} = Add({'x' if i == 0 else f't{i - 1}'}, k{i})" for i in range(12))
    model = parse("(float[10000] x) => (float[10000] y, float[] z)", f"{made} {total} y = Relu(t11) z = Neg(w)",
                  s=np.array([10_000]), w=normal(max(weights, 1)))  # fmt: skip
    del model.graph.output[1:]
    if not weights:
        del model.graph.node[-1]
    else:
        model.graph.output.add(name="z")
    done = prove(model, {"x": normal(10_000)}, rules=only("fold"), fold_limit=100_000)
    left = [o for o in ops(done.model) if o == "ConstantOfShape"]
    assert len(left) == 12 - folded
    assert "have added" in reason(done, "fold")


def test_graph_output_that_is_constant_keeps_its_name() -> None:
    model = parse("(float[N] x) => (float[N] y, float[2] z)", "z = Add(a, a) y = Relu(x)", a=normal(2))
    done = prove(model, {"x": normal(3)})
    assert sorted(ops(done.model)) == ["Constant", "Relu"]


@pytest.mark.parametrize(
    ("body", "tensors", "limit", "folded"),
    [
        ("k = Expand(one, s) y = Add(x, k)", {"one": np.float32(1), "s": np.array([300])}, 1000, False),
        ("k = Expand(one, s) y = Add(x, k)", {"one": np.float32(1), "s": np.array([300])}, 2000, True),
        ("k = Transpose(w) y = Reshape(k, s)", {"w": normal(300, 3), "s": np.array([-1])}, 0, True),
        ("k = ConstantOfShape <value = float[1] {2}>(s) y = Add(x, k)", {"s": np.array([300])}, 100, False),
    ],
)
def test_folding_that_makes_the_file_larger_is_capped(
    body: str, tensors: dict[str, Any], limit: int, folded: bool
) -> None:
    done = prove(
        parse("(float[300] x) => (float[] y)", body, **tensors), {"x": normal(300)}, rules=only(), fold_limit=limit
    )
    assert ("fold" in fired(done)) is folded
    if not folded:
        assert f"bytes to the file (fold_limit: {limit})" in reason(done, "fold")


def test_tied_weight_is_not_doubled_beyond_the_limit() -> None:
    """T37: a head that reads the embedding transposed."""
    body = "e = Gather(w, i) t = Transpose <perm = [1, 0]>(w) y = MatMul(e, t)"
    model = parse("(int64[N] i) => (float[N, 50] y)", body, w=normal(50, 8))
    feed = {"i": np.array([1, 3, 49])}
    assert ops(prove(model, feed, fold_limit=0).model) == ["Gather", "Transpose", "MatMul"]
    assert ops(prove(model, feed, fold_limit=10**6).model) == ["Gather", "MatMul"]


@pytest.mark.parametrize(
    "body",
    [
        "r = RandomNormal <shape = [4]>() y = Add(x, r)",
        "r = RandomUniform <shape = [4]>() y = Add(x, r)",
        "r = RandomNormalLike(k) y = Add(x, r)",
        "r = Bernoulli(half) y = Add(x, r)",
        "r = RandomUniformLike(k) s = Neg(r) t = Add(s, k) y = Add(x, t)",
        "t, m = Dropout(k, half1, yes) y = Add(x, t)",
    ],
)
def test_random_operators_are_drawn_anew_in_every_run(body: str) -> None:
    """T11."""
    model = parse("(float[4] x) => (float[4] y)", body, half=np.full(4, 0.5, np.float32), k=np.ones(4, np.float32),
                  half1=np.float32(0.5), yes=np.array(True))  # fmt: skip
    from layerline.backends.onnxruntime import OnnxRuntime
    from layerline.graph.fusion.fuse import fuse

    feed = {"x": np.zeros(4, np.float32)}
    done = fuse(model, [feed])
    assert any(n.op_type.startswith(("Random", "Bernoulli", "Dropout")) for n in proto(done.model).graph.node)
    session = OnnxRuntime().open(proto(done.model).SerializeToString())
    assert len({session.run(feed)["y"].tobytes() for _ in range(16)}) > 1


def test_two_random_nodes_are_not_one() -> None:
    model = parse(
        "() => (float[64] y)", "a = RandomNormal <shape = [64]>() b = RandomNormal <shape = [64]>() y = Sub(a, b)"
    )
    done = prove(parse("(float[64] x) => (float[64] z)", "z = Relu(x)"), {"x": normal(64)})
    assert done
    from layerline.graph.fusion.fuse import rewrite

    assert ops(rewrite(model).model) == ["RandomNormal", "RandomNormal", "Sub"]


def test_quantisation_of_weights_is_kept() -> None:
    model = parse("(float[N, 2] x) => (float[N, 2] y)", "w = DequantizeLinear(q, s) y = MatMul(x, w)",
                  q=np.array([[1, 2], [3, 4]], np.int8), s=np.float32(0.5))  # fmt: skip
    assert ops(prove(model, {"x": normal(3, 2)}).model) == ["DequantizeLinear", "MatMul"]


def test_dead_code_goes() -> None:
    model = parse("(float[N] x, float[N] unused) => (float[N] y)", "d = Exp(x) e = Add(d, k) y = Relu(x)", k=normal(1))
    done = prove(model, {"x": normal(3), "unused": normal(3)})
    assert ops(done.model) == ["Relu"]
    assert not proto(done.model).graph.initializer
    assert [i.name for i in proto(done.model).graph.input] == ["x", "unused"]


def test_equal_tensors_are_stored_once() -> None:
    body = "a = Conv(x, w1) b = Conv(a, w2) c = Conv(b, w3) y = Add(c, w4)"
    model = parse("(float[N, 2, H, W] x) => (float[N, 2, H, W] y)", body, w1=normal(2, 2, 1, 1), w2=normal(2, 2, 1, 1),
                  w3=normal(2, 2, 1, 1, seed=5), w4=normal(1, 2, 1, 1, seed=5))  # fmt: skip
    done = prove(model, {"x": normal(1, 2, 3, 3)}, rules=only("duplicate-initializers"))
    assert set(stored(done.model)) == {"w1", "w3", "w4"}


def test_merged_tensors_are_told() -> None:
    """Also in a body, against the graph around it; nothing is proved where the bytes are the same."""
    body = """d = Div(x, k3) a = Mul(d, k) y = If (c) <
      then_branch: graph = t () => (float[] ty) { b = Add(a, k3) ty = Mul(b, k2) },
      else_branch: graph = e () => (float[] ey) { ey = Sub(a, k2) }>"""
    model = parse("(float[N] x, bool c) => (float[] y)", body, k=np.float32(3), k2=np.float32(3), k3=np.float32(4))
    own = model.graph.node[2].attribute[0].g
    own.initializer.append(numpy_helper.from_array(np.float32(4), "own"))
    own.node[0].input[1] = "own"
    done = prove(
        model, *({"x": normal(3), "c": np.array(c)} for c in (True, False)), rules=only("duplicate-initializers")
    )
    merged = [f for f in done.firings if f.site.rule == "duplicate-initializers"]
    assert [(f.site.value, f.result, len(f.site.inside), f.after) for f in merged] == [
        ("k2", "k", 0, {}),
        ("own", "k3", 1, {}),
    ]
    assert [p.error for p in done.proofs if p.firing in merged] == [0.0, 0.0]


@pytest.mark.parametrize("apart", [1e-10, 1e-16, 0.0])
@pytest.mark.parametrize("kind", ["double", "float"])
def test_nodes_are_equal_to_the_last_bit_or_not_at_all(apart: float, kind: str) -> None:
    """Tensors print a few digits only."""
    dtype = np.float64 if kind == "double" else np.float32
    numbers = [np.array([v], dtype) for v in (1.0, 1.0 + apart)]
    model = parse(f"(int64[1] s) => ({kind}[?] y)", "y = Sub(c1, c0)")
    for index, number in enumerate(numbers):
        node = onnx.helper.make_node("ConstantOfShape", ["s"], [f"c{index}"], value=numpy_helper.from_array(number))
        model.graph.node.insert(index, node)
    done = prove(model, {"s": np.array([3])})
    assert ("duplicate-nodes" in fired(done)) is bool(numbers[0] == numbers[1])


def test_equal_nodes_are_computed_once() -> None:
    body = """a = Relu(x) b = Relu(x) c = Elu <alpha = 2.0>(x) d = Elu <alpha = 3.0>(x) s = Add(a, b) t = Add(c, d)
              y = Add(s, t)"""
    done = prove(parse("(float[N] x) => (float[N] y)", body), {"x": normal(5)})
    assert ops(done.model) == ["Relu", "Elu", "Elu", "Add", "Add", "Add"]


def test_two_equal_outputs_both_keep_their_names() -> None:
    done = prove(parse("(float[N] x) => (float[N] y, float[N] z)", "y = Relu(x) z = Relu(x)"), {"x": normal(5)})
    assert len(ops(done.model)) == 2


SQUEEZE = """s = Shape(x) d = Gather(s, one) c = Equal(d, one)
  y = If (c) <then_branch: graph = t () => (float[] ty) { ty = Squeeze(x, axes) },
              else_branch: graph = e () => (float[] ey) { ey = Identity(x) }>"""


@pytest.mark.parametrize("axis", [1, -2])
def test_squeeze_in_a_branch_keeps_its_axes(axis: int) -> None:
    """T10: the axes are an initializer of the graph around the branch."""
    model = parse("(float[N, M, 3] x) => (float[] y)", SQUEEZE, one=np.array(1), axes=np.array([axis]))
    done = prove(model, {"x": normal(2, 1, 3)}, {"x": normal(2, 2, 3)})
    assert ops(done.model).count("If") == 1


@pytest.mark.parametrize(("size", "expected"), [(1, ["Exp", "Relu"]), (2, ["Relu"])])
def test_branch_whose_condition_is_known_moves_out(size: int, expected: list[str]) -> None:
    body = SQUEEZE.replace("y = If", "z = If").replace("Squeeze(x, axes)", "Exp(x)") + " y = Relu(z)"
    model = parse(f"(float[N, {size}, 3] x) => (float[] y)", body, one=np.array(1))
    done = prove(model, {"x": normal(2, size, 3)})
    assert ops(done.model) == expected
    assert "constant-branch" in fired(done)


def test_branches_with_the_same_inner_names() -> None:
    body = """y = If (yes) <then_branch: graph = t () => (float[] o) { a = Mul(x, k) o = Exp(a) },
                            else_branch: graph = e () => (float[] o) { a = Add(x, k) o = Neg(a) }>"""
    model = parse("(float[N] x) => (float[] y)", body, yes=np.array(True), k=np.float32(2))
    done = prove(model, {"x": normal(3)})
    assert ops(done.model) == ["Mul", "Exp"]
    assert [n.output[0] for n in proto(done.model).graph.node][1] == "y"


def test_both_branches_share_an_outer_weight() -> None:
    """T20: W is read in both branches and by a Gather outside."""
    body = """r = Gather(w, i)
      z = If (c) <then_branch: graph = t () => (float[] ty) { tm = MatMul(x, w) ty = Add(tm, one) },
                  else_branch: graph = e () => (float[] ey) { em = MatMul(x, w) ey = Mul(em, two) }>
      y = Add(z, r)"""
    model = parse(
        "(float[N, 4] x, bool c, int64 i) => (float[] y)", body, w=normal(4, 4), one=np.float32(1), two=np.float32(2)
    )
    feeds = [{"x": normal(3, 4), "c": np.array(c), "i": np.array(2)} for c in (True, False)]
    done = prove(model, *feeds)
    assert ops(done.model)[:2] == ["Gather", "If"]
    inside = {f.site.rule for f in done.firings if f.site.inside}
    assert "affine" in inside
    # The proof of what fired inside is the If itself.
    assert all(set(f.after) == {"z"} for f in done.firings if f.site.inside)


def test_conv_and_batchnorm_inside_a_loop() -> None:
    body = """y = Loop (n, yes, x) <body: graph =
        b (int64 i, bool go, float[N, 2, 4, 4] v) => (bool stay, float[N, 2, 4, 4] out) {
          stay = Identity(go) c = Conv(v, w) out = BatchNormalization(c, g, h, g, g) }>"""
    given = {"w": normal(2, 2, 1, 1), "g": np.array([0.5, 1.5], np.float32), "h": np.zeros(2, np.float32)}
    model = parse("(float[N, 2, 4, 4] x, int64 n) => (float[N, 2, 4, 4] y)", body, yes=np.array(True), **given)
    done = prove(model, {"x": normal(1, 2, 4, 4), "n": np.array(3)}, {"x": normal(2, 2, 4, 4), "n": np.array(0)})
    [loop] = [n for n in proto(done.model).graph.node if n.op_type == "Loop"]
    assert "BatchNormalization" not in [n.op_type for n in loop.attribute[0].g.node]


FUNCTION = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
g (float[N, 3] x) => (float[N, 3] y) { z = own.shifted <by = 2.0>(x) y = Relu(z) }
<domain: "own", opset_import: ["": 17]> shifted <by> (a) => (b) {
  two = Constant <value_float: float = @by>() three = Constant <value = float {3}>()
  k = Mul(two, three) l = Identity(k) b = Add(a, l) }"""


def test_functions_are_inlined_with_their_constants() -> None:
    """T10: a constant folded inside a model-local function must not go missing."""
    model = parser.parse_model(FUNCTION)
    done = prove(model, {"x": normal(2, 3)})
    assert ops(done.model) == ["Add", "Relu"]
    assert "shifted" in done.notes[0]
    np.testing.assert_allclose(run(done.model, {"x": np.zeros((1, 3), "f")})["y"], 6)


def test_the_other_name_of_onnx_own_domain() -> None:
    model = parse("(float[N] x) => (float[N] y)", "z = Identity(x) y = Relu(z)")
    for node in model.graph.node:
        node.domain = "ai.onnx"
    model.opset_import[0].domain = "ai.onnx"
    assert ops(prove(model, {"x": normal(3)}).model) == ["Relu"]


def test_strings_are_left_alone() -> None:
    model = parse("(float[2] x) => (string[2] y)", 'a = Constant <value_strings = ["p", "q"]>() y = Identity(a)')
    done = prove(parse("(float[2] x) => (float[2] y)", "y = Relu(x)"), {"x": normal(2)})
    assert done
    from layerline.graph.fusion.fuse import rewrite

    assert "Constant" in ops(rewrite(model).model)


def test_a_constant_behind_a_chain_of_any_length() -> None:
    """Longer than Python's recursion limit."""
    first = ir.Node("", "Constant", [], attributes=[ir.AttrTensor("value", ir.tensor([2.5]))])
    last = ir.Node("", "Cast", first.outputs, attributes=[ir.AttrInt64("to", ir.DataType.DOUBLE)])
    for _ in range(3000):
        last = ir.Node("", "Identity", last.outputs)
    array = constant(last.outputs[0])
    assert array is not None and array.dtype == np.float64 and array.tolist() == [2.5]


def test_a_chain_that_ends_in_itself_is_no_constant() -> None:
    first = ir.Node("", "Identity", [None])
    second = ir.Node("", "Identity", first.outputs)
    first.replace_input_with(0, second.outputs[0])
    assert constant(second.outputs[0]) is None
