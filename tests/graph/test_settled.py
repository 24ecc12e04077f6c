"""Proved constants are stored in the unfused model; nothing else about it changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.backends.light import split
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.apply import rewrite, select
from layerline.graph.prove import prove, reference
from layerline.graph.rewrite import Rewriting
from layerline.graph.rule import on
from layerline.graph.settled import settled
from tests.graph.fusing import normal, ops, parse

MODEL = parse(
    "(float[N, 30] x) => (float[N, 20] y, float[20, 30] kept)",
    """t = Transpose(w) h = Identity(t) z = MatMul(x, h) n = Shape(x) kept = Identity(w) a, b = Split(k)
       s = Add(a, b) y = Add(z, s)""",
    w=normal(20, 30),
    k=normal(40),
)


def test_what_is_computed_from_an_input_or_is_an_output_stays() -> None:
    tensors = {name: ir.tensor(normal(2)) for name in ("z", "n")} | {"h": ir.tensor(normal(30, 20))}
    out = settled(split(MODEL), tensors)
    assert ops(out.model) == ["MatMul", "Shape", "Identity", "Split", "Add", "Add"]
    assert out.weights["h"].shape == (30, 20) and "t" not in out.weights


def test_a_node_is_replaced_only_whole() -> None:
    a = ir.tensor(normal(20))
    assert "Split" in ops(settled(split(MODEL), {"a": a}).model)
    assert "Split" not in ops(settled(split(MODEL), {"a": a, "b": a}).model)


def test_proved_constants_are_the_ones_the_model_computes() -> None:
    feeds = [{"x": normal(n, 30)} for n in (1, 3)]
    done = rewrite(MODEL, select({}))
    proofs = prove(done.unfused, done.types, done.firings, feeds, {})
    sooner = reference(done.unfused, proofs)
    assert all(p.passed for p in proofs) and not {"Transpose", "Split"} & set(ops(sooner.model))
    for feed in feeds:
        before, after = (OnnxRuntime().open(m).run(feed) for m in (MODEL, sooner))
        assert all(np.array_equal(after[n], before[n]) for n in before)


def test_a_wrong_constant_is_not_taken_over() -> None:
    def spoiled(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:
        return tape.initializer(ir.tensor(normal(30, 20)), "other")

    done = rewrite(MODEL, (on("spoiled", "another constant", ["Transpose"], spoiled),))
    proofs = prove(done.unfused, done.types, done.firings, [{"x": normal(1, 30)}], {})
    assert [p.passed for p in proofs] == [False] and "Transpose" in ops(reference(done.unfused, proofs).model)
