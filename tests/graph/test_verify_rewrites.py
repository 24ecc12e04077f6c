"""Proofs, undoing what fails, and finding the one that spoils a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from layerline.graph.analysis import rounding_noise
from layerline.graph.fusion.fuse import Rewritten, fuse, guilty, rewrite, select
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on
from layerline.graph.fusion.rules import RULES, fold
from layerline.graph.fusion.verify_rewrites import prove as prove_firings
from layerline.pipeline.errors import ConfigError, StageError
from tests.forms import as_ir, proto
from tests.graph.fusing import fired, normal, ops, parse, prove, reason, run


def wrong(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    """Takes Relu for LeakyRelu: right for what is positive."""
    return tape.op("LeakyRelu", [node.inputs[0]], {"alpha": 0.1})


WRONG = on("wrong", "Relu")(wrong)


def shape_changing(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
    return tape.op("GlobalAveragePool", [node.inputs[0]])


MODEL = parse(
    "(float[N, 2, H, W] x) => (float[N, 2, H, W] y)",
    "a = Conv(x, w) b = Mul(a, k) r = Relu(b) c = Conv(r, w) y = Relu(c)",
    w=normal(2, 2, 1, 1),
    k=np.float32(2),
)


def test_a_firing_beyond_its_floor_is_undone_and_told() -> None:
    done = prove(MODEL, {"x": normal(1, 2, 3, 3)}, rules=(*RULES, WRONG), undone=True)
    assert {p.firing.site.value for p in done.undone} == {"r", "y"}
    assert all(p.firing.site.rule == "wrong" and p.error > 0.01 > p.tolerance for p in done.undone)
    # What is right stays, and the node keeps its old operator.
    assert ops(done.model) == ["Conv", "Relu", "Conv", "Relu"]
    assert "affine" in fired(done)


def test_a_wrong_rule_goes_unnoticed_only_where_it_is_right() -> None:
    model = parse("(float[N] x) => (float[N] y)", "a = Abs(x) y = Relu(a)")
    done = prove(model, {"x": normal(5)}, rules=(WRONG,))
    assert ops(done.model) == ["Abs", "LeakyRelu"]


def test_another_shape_is_no_rounding() -> None:
    rule = on("flat", "Relu")(shape_changing)
    done = prove(MODEL, {"x": normal(1, 2, 3, 3)}, rules=(rule,), undone=True)
    assert [p.error for p in done.undone] == [np.inf, np.inf]


def test_errors_hidden_by_broadcasting_are_seen() -> None:
    """(3, 1) against (3, 3), which only a run tells: a difference that broadcasts could be 0 everywhere."""
    rule = on("narrow", "Expand")(lambda node, tape, work: tape.op("Identity", [node.inputs[0]]))
    model = parse("(float[N, M] x) => (float[3, 3] y)", "e = Expand(x, s) y = Relu(e)", s=np.array([3, 3]))
    done = prove(model, {"x": normal(3, 1)}, rules=(rule,), undone=True)
    assert [p.error for p in done.undone] == [np.inf]


@pytest.mark.parametrize(
    ("x", "passes"),
    [([np.nan, 1.0], True), ([np.inf, -1.0], True), ([np.inf, 1.0], True), ([1.0, 2.0], True)],
)
def test_nan_and_inf_on_both_sides_are_equal(x: list[float], passes: bool) -> None:
    model = parse("(float[2] x) => (float[2] y)", "a = Identity(x) y = Add(a, a)")
    done = prove(model, {"x": np.array(x, np.float32)})
    assert all(p.passed for p in done.proofs) is passes


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_errors_of_very_small_and_very_large_values_are_seen(size: float) -> None:
    model = parse("(float[2] x) => (float[2] y)", "r = Relu(x) y = Mul(r, k)", k=np.float32(0.5))
    done = prove(model, {"x": np.array([-1, 1], np.float32) * np.float32(size)}, rules=(WRONG,), undone=True)
    assert [p.error for p in done.undone] == [pytest.approx(0.1, rel=1e-5)]


def test_nan_on_one_side_is_an_error() -> None:
    rule = on("log", "Relu")(lambda node, tape, work: tape.op("Sqrt", [node.inputs[0]]))
    model = parse("(float[2] x) => (float[2] y)", "r = Relu(x) y = Neg(r)")
    done = prove(model, {"x": np.array([-1, 1], np.float32)}, rules=(rule,), undone=True)
    assert [p.error for p in done.undone] == [np.inf]


@pytest.mark.parametrize("at", [0, 1, 700])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_a_folded_constant_with_another_nan_or_number_is_undone(
    at: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {np.float32: "float", np.float64: "double", np.float16: "float16"}[kind]
    model = parse(f"({name}[900] x) => ({name}[900] y)", "c = Neg(w) y = Add(x, c)", w=normal(900).astype(kind))
    for value in (np.nan, np.inf, 64.0):

        def spoilt(*args: Any, value: float = value, real: Any = fold.evaluate) -> dict[str, Any]:
            out = {k: v.copy() for k, v in real(*args).items()}
            out["c"][at] = value
            return out

        with monkeypatch.context() as patch:
            patch.setattr(fold, "evaluate", spoilt)
            done = fuse(model, [{"x": normal(900).astype(kind)}])
        assert [p.firing.site.value for p in done.undone] == ["c"] and ops(done.model) == ["Neg", "Add"]
    assert not fuse(model, [{"x": normal(900).astype(kind)}]).undone


def test_integers_must_be_equal() -> None:
    rule = on("off by one", "Neg")(lambda node, tape, work: tape.op("BitwiseNot", [node.inputs[0]]))
    model = parse("(int64[3] x) => (int64[3] y)", "n = Neg(x) y = Abs(n)", opset=18)
    assert len(prove(model, {"x": np.array([1, 2, 3])}, rules=(rule,), undone=True).undone) == 1


def test_floors_widen_what_a_firing_may_do() -> None:
    done = fuse(MODEL, [{"x": normal(1, 2, 3, 3)}], rules=(WRONG,), floors={"r": 1.0, "y": 1.0})
    assert [f.site.value for f in done.firings] == ["r", "y"]
    assert not done.undone


def test_a_model_that_cannot_run_is_an_error_of_the_model() -> None:
    model = parse("(float[2] x) => (float[2] y)", "z = Identity(x) y = Add(z, k)", k=normal(3))
    with pytest.raises(StageError, match="onnxruntime"):
        fuse(model, [{"x": normal(2)}])


def test_values_made_up_on_the_way_are_proved_by_the_next_known_one() -> None:
    body = "e = Expand(m, s) w = Where(e, zero, low) y = Add(x, w)"
    model = parse("(float[N, 2, 3, 3] x) => (float[N, 2, 3, 3] y)", body, m=np.array([[[[True, False, True]]]]),
                  s=np.array([1, 1, 3, 3]), zero=np.float32(0), low=np.float32(-1e9))  # fmt: skip
    done = prove(model, {"x": normal(2, 2, 3, 3)}, fold_limit=0)
    assert all(set(f.after) <= {"e", "w", "y"} for f in done.firings)


def test_bisecting_names_the_rule_and_the_place() -> None:
    model = parse(
        "(float[N] x) => (float[N] y)", "a = Identity(x) b = Sigmoid(a) r = Relu(b) s = Neg(r) t = Relu(s) y = Exp(t)"
    )
    feed = {"x": normal(5)}
    expected = run(model, feed)["y"]

    def good(some: Rewritten) -> bool:
        return np.allclose(run(some.model, feed)["y"], expected)

    firing = guilty(model, good, (*RULES, WRONG))
    assert firing is not None
    assert (firing.site.rule, firing.site.value) == ("wrong", "t")
    assert guilty(model, good) is None


def test_of_many_firings_inside_one_branch_only_the_wrong_one_is_undone() -> None:
    body = """y = If (c) <
        then_branch: graph = t () => (float[N] p) { a = Identity(x) b = Add(a, zero) r = Relu(b) p = Neg(r) },
        else_branch: graph = e () => (float[N] q) { d = Identity(x) f = Add(d, zero) q = Exp(f) }>"""
    model = parse("(float[N] x, bool c) => (float[N] y)", body, zero=np.float32(0))
    feeds = [{"x": normal(5), "c": np.array(c)} for c in (True, False)]
    done = prove(model, *feeds, rules=(*RULES, WRONG), undone=True)
    assert [(p.firing.site.rule, p.firing.site.value) for p in done.undone] == [("wrong", "r")]
    assert {"identity", "noop-arithmetic"} <= fired(done)


def test_rewriting_is_deterministic_and_can_stop_after_any_firing() -> None:
    whole = rewrite(MODEL)
    assert proto(rewrite(MODEL).model) == proto(whole.model)
    for limit in range(len(whole.firings) + 1):
        part = rewrite(MODEL, limit=limit)
        assert [f.site for f in part.firings] == [f.site for f in whole.firings[:limit]]
        before, after = (run(m, {"x": normal(1, 2, 3, 3)})["y"] for m in (MODEL, part.model))
        np.testing.assert_allclose(after, before, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    before = MODEL.SerializeToString(deterministic=True)
    rewrite(MODEL)
    assert MODEL.SerializeToString(deterministic=True) == before


def test_unknown_rule_is_told_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batchnorm'") as caught:
        select({"batch-norm": False})
    assert "affine" in caught.value.hint
    assert [r.name for r in select({"fold": False})] == [r.name for r in RULES if r.name != "fold"]


def test_rule_names_are_unique() -> None:
    assert len({r.name for r in RULES}) == len(RULES)


def test_proof_measures_what_it_says() -> None:
    """0.1 x instead of 0 for what is negative: the error is that of the definition."""
    model = parse("(float[N] x) => (float[N] y)", "y = Relu(x)")
    done = rewrite(model, (WRONG,))
    x = normal(100)
    [proof] = prove_firings(done.unfused, done.types, done.firings, [{"x": x}], {})
    expected = np.linalg.norm(0.1 * np.minimum(x, 0)) / np.linalg.norm(np.maximum(x, 0))
    assert proof.error == pytest.approx(expected, rel=1e-5)
    assert proof.feeds == 1


def test_a_sequence_out_of_a_branch_is_read_whole() -> None:
    branch = """{{ k = Constant <value = float[1] {{{}}}>() a = Add(x, k) q = SequenceConstruct(a, x) }}"""
    body = f"""s = If (t) <then_branch: graph = p () => (seq(float[2]) q) {branch.format(1)},
                       else_branch: graph = u () => (seq(float[2]) q) {branch.format(2)}>
      y = ConcatFromSequence <axis = 0> (s)"""
    done = fuse(parse("(float[2] x, bool t) => (float[4] y)", body), [{"x": normal(2), "t": np.array(True)}])
    assert [p.firing.site.rule for p in done.proofs].count("constants") == 2 and not done.undone


def test_noise_is_one_rounding_step_of_every_weight() -> None:
    moved = proto(rounding_noise.perturbed(as_ir(MODEL)))
    [(_, a)] = [(t.name, onnx.numpy_helper.to_array(t)) for t in MODEL.graph.initializer if t.name == "w"]
    [(_, b)] = [(t.name, onnx.numpy_helper.to_array(t)) for t in moved.graph.initializer if t.name == "w"]
    np.testing.assert_array_equal(np.abs(a - b), np.abs(np.spacing(np.minimum(np.abs(a), np.abs(b)))))
    assert proto(rounding_noise.perturbed(as_ir(MODEL))) == moved
    x = {"x": normal(1, 2, 3, 3)}
    difference = np.linalg.norm(run(moved, x)["y"] - run(MODEL, x)["y"]) / np.linalg.norm(run(MODEL, x)["y"])
    assert 1e-8 < difference < 1e-6


def test_noise_leaves_masks_zeros_and_sizes_alone() -> None:
    least = np.finfo(np.float32).min
    model = parse("(float[1, 1, 2, 2] x) => (float[] y)", "a = Add(x, mask) y = Resize(a, , scales)",
                  mask=np.array([0, least], np.float32), scales=np.array([1, 1, 2, 2], np.float32))  # fmt: skip
    kept = {
        t.name: onnx.numpy_helper.to_array(t).tolist()
        for t in proto(rounding_noise.perturbed(as_ir(model))).graph.initializer
    }
    assert kept["mask"] == [0, least]
    assert kept["scales"] == [1, 1, 2, 2]


@pytest.mark.parametrize("rows", [2, 300])
def test_noise_moves_a_stored_input_as_a_weight_only(rows: int) -> None:
    """Inside of the graph and beside it: nobody feeds it."""
    model = parse("(float[N, 2] x) => (float[N, M] y)", "y = MatMul(x, w)", w=normal(2, rows))
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [2, rows]))
    assert ops(rounding_noise.perturbed(as_ir(model))) == ["Mul", "MatMul"], "one step of x alone"


def test_what_is_drawn_at_random_is_named() -> None:
    body = """r = RandomNormal <shape = [2]>() a = Add(x, r) b = Relu(x)
      c = If (t) <then_branch: graph = p () => (float[2] q) { q = RandomUniform <shape = [2]>() },
                  else_branch: graph = u () => (float[2] v) { v = Identity(x) }> y = Add(a, c)"""
    model = parse("(float[2] x, bool t) => (float[2] y)", body)
    assert rounding_noise.drawn(as_ir(model)) == {
        "r": "RandomNormal",
        "a": "RandomNormal",
        "c": "RandomUniform",
        "y": "RandomNormal",
    }


@pytest.mark.parametrize(("training", "expected"), [(True, {"d": "Dropout", "y": "Dropout"}), (False, {})])
def test_dropout_draws_while_it_trains(training: bool, expected: dict[str, str]) -> None:
    model = parse(
        "(float[2] x) => (float[2] y)", "d = Dropout(x, r, t) y = Relu(d)", r=np.float32(0.5), t=np.array(training)
    )
    assert rounding_noise.drawn(as_ir(model)) == expected


def test_nothing_is_fused_without_a_feed() -> None:
    with pytest.raises(StageError, match="no feed"):
        fuse(MODEL, [])


def test_reasons_of_the_last_round_are_the_ones_that_count() -> None:
    """What declined at first and fired later is no decline."""
    body = "s = Shape(w) t = Gather(s, i) k = Expand(one, t2) c = Conv(x, w) y = Mul(c, k)"
    model = parse("(float[N, 2, H, W] x) => (float[N, 2, H, W] y)", body, w=normal(2, 2, 1, 1), i=np.array([0, 2]),
                  one=np.float32(3), t2=np.array([2, 1, 1]))  # fmt: skip
    done = prove(model, {"x": normal(1, 2, 3, 3)})
    assert ops(done.model) == ["Conv"]
    with pytest.raises(StopIteration):
        reason(done, "fold")


def test_every_rule_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    described = [row.split(" | ", 1) for row in rows if ".onnx`" not in row and ".json`" not in row]
    assert [name for name, _ in described] == [f"| `{rule.name}`" for rule in RULES]
    assert all(text.removesuffix(" |") for _, text in described)
