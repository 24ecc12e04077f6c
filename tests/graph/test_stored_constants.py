"""Proved constants are stored in the unfused model; nothing else about it changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.fusion.firing import After, Firing, Site
from layerline.graph.fusion.fuse import fuse, rewrite, select
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on
from layerline.graph.fusion.verify_rewrites import prove, reference, with_constants
from layerline.graph.io.ir_convert import as_ir
from tests.graph.fusing import normal, ops, parse

MODEL = parse(
    "(float[N, 30] x) => (float[N, 20] y, float[20, 30] kept)",
    """t = Transpose(w) h = Identity(t) z = MatMul(x, h) n = Shape(x) kept = Identity(w) a, b = Split(k)
       s = Add(a, b) y = Add(z, s)""",
    w=normal(20, 30),
    k=normal(40),
)


def test_what_is_computed_from_an_input_stays() -> None:
    tensors = {name: ir.tensor(normal(2)) for name in ("z", "n")} | {"h": ir.tensor(normal(30, 20))}
    out = with_constants(as_ir(MODEL), tensors)
    assert ops(out) == ["Transpose", "MatMul", "Shape", "Identity", "Split", "Add", "Add"]
    assert out.graph.initializers["h"].const_value.shape == (30, 20)


def test_a_node_is_replaced_only_whole() -> None:
    a = ir.tensor(normal(20))
    assert "Split" in ops(with_constants(as_ir(MODEL), {"a": a}))
    assert "Split" not in ops(with_constants(as_ir(MODEL), {"a": a, "b": a}))


def test_proved_constants_are_the_ones_the_model_computes() -> None:
    feeds = [{"x": normal(n, 30)} for n in (1, 3)]
    done = rewrite(MODEL, select({}))
    proofs = prove(done.unfused, done.types, done.firings, feeds, {})
    sooner = reference(done.unfused, proofs)
    assert all(p.passed for p in proofs) and {"t", "s"} <= sooner.graph.initializers.keys()
    for feed in feeds:
        before, after = (OnnxRuntime().open(m).run(feed) for m in (MODEL, sooner))
        assert all(np.array_equal(after[n], before[n]) for n in before)


def test_a_wrong_constant_is_not_taken_over() -> None:
    def spoiled(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
        return tape.initializer(ir.tensor(normal(30, 20)), "other")

    done = rewrite(MODEL, (on("spoiled", "Transpose")(spoiled),))
    proofs = prove(done.unfused, done.types, done.firings, [{"x": normal(1, 30)}], {})
    assert [p.passed for p in proofs] == [False] and "Transpose" in ops(reference(done.unfused, proofs))


@pytest.mark.parametrize(("zero", "expected"), [(1.0, ["Div"]), (0.0, ["Mul", "Div"])])
def test_what_holds_a_zero_is_computed(zero: float, expected: list[str]) -> None:
    """A proof that finds two equal has not seen the signs of their zeros, and what divides by them does."""
    model = parse("(float[N, 3] x) => (float[N, 3] y)", "c = Mul(w, k) y = Div(x, c)", w=np.float32([zero, -1, 2]),
                  k=np.float32(2))  # fmt: skip
    assert ops(reference(as_ir(model), fuse(model, [{"x": normal(2, 3)}]).proofs)) == expected


def test_what_another_firing_reads_stays() -> None:
    """`c` and `d` are one since duplicates went; the model itself reads `c` only for `h`, which is stored."""
    body = """c = Constant <value = float[4] {1.5, 2, 3, 4}>() d = Constant <value = float[4] {1.5, 2, 3, 4}>()
              h = Mul(w, c) z = Sub(x, h) m = MatMul(x, k) y = Add(m, d)"""
    model = parse("(float[N, 4] x) => (float[N, 4] y, float[N, 4] z)", body, w=normal(4), k=normal(4, 4))
    done = fuse(model, [{"x": normal(2, 4)}])
    assert not done.undone and ops(done.model) == ["Sub", "Gemm"]


def test_of_several_values_each_has_to_be_equal() -> None:
    """A proof tells the error of the one that is furthest beyond its tolerance."""
    model = parse("(float[3] x) => (float[3] y)", "a = Neg(w) b = Abs(w) c = Add(a, b) y = Add(x, c)", w=normal(3))
    right, off = -normal(3), np.abs(normal(3)) * np.float32(1 + 1e-6)
    after = {n: After(n, tensors={n: ir.tensor(value)}) for n, value in (("a", right), ("b", off))}
    firing = Firing(Site("two", "a"), "a", (), (), after)
    [proof] = prove(as_ir(model), {"a": 1, "b": 1}, [firing], [{"x": normal(3)}], {"b": 1.0})
    assert proof.error == 0.0 and proof.passed
    assert ops(reference(as_ir(model), [proof])) == ["Neg", "Abs", "Add", "Add"]
