"""What jumps at a threshold is judged by how near its operand was; what follows from the jump is told, not excused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from layerline.compare.threshold_flips import behind, blamed, steps
from layerline.parity.parity import Parity, parity
from layerline.parity.value_verdicts import Within
from layerline.pipeline.report import LayerDiff, Report
from tests.export.nets import Forward, exported, probe
from tests.forms import as_ir, proto
from tests.parity.test_parity import Exported, add_after

NEXT = np.float32(1 + 2.0**-23)
"""A rounding step."""
BELOW = float(np.nextafter(np.float32(1), np.float32(0)))


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "sign": lambda v: torch.sign(v - 1.0),
    "greater": lambda v: v > 1.0,
    "greater_equal": lambda v: v >= 1.0,
    "less": lambda v: v < 1.0,
    "less_equal": lambda v: v <= v.flip(1) * 0 + 1.0,
    "equal": lambda v: v == 1.0,
    "whole": lambda v: v.to(torch.int64),
    "counted": lambda v: (v > 1.0).to(torch.int32),
    "not": lambda v: ~(v > 1.0),
    "and": lambda v: (v > 1.0) & (v < 9.0),
    "mask": lambda v: (v > 1.0).float().reshape(-1),
}
X = torch.tensor([[BELOW, 1.0, 1.5 * BELOW, 1.4997, 0.9997, 7.3]])


@pytest.fixture(scope="module")
def every() -> Exported:
    return exported(Forward(lambda x: {name: step(x * 1.0) for name, step in STEPS.items()}), (X,))


def changed(net: Exported, change: Callable[[onnx.ModelProto], None], rule: Within | None = None) -> Parity:
    """Parity with the ONNX changed."""
    call, _, traced = net
    model = proto(traced.model)
    change(model)
    return parity(replace(traced, model=as_ir(model)), [probe(call)], rule)


def times(factor: float) -> Callable[[onnx.ModelProto], None]:
    """The ONNX computes every operand that much larger."""

    def change(model: onnx.ModelProto) -> None:
        for value in [o for n in model.graph.node if n.op_type == "Mul" for o in n.output if o.startswith("mul")]:
            add_after(model, value, "Mul", np.full(1, factor, np.float32))

    return change


def by_name(found: Parity) -> dict[str, LayerDiff]:
    return {r.name: r for r in found.rows}


@pytest.mark.parametrize("rule", [None, Within(rtol=1e-3, atol=1e-5)])
def test_jumps_within_the_noise_of_their_operands_pass(every: Exported, rule: Within | None) -> None:
    found = changed(every, times(NEXT), rule)
    assert all(r.passed for r in found.rows) and all(g.passed for g in found.gates)
    rows = by_name(found)
    assert {name: rows[name].extra.get("flips", 0) for name in STEPS} == dict.fromkeys(STEPS, 1) | {
        "equal": 2,
        "sign": 2,
    }


def test_jumps_from_further_away_are_errors(every: Exported) -> None:
    found = changed(every, times(1.002))
    rows = by_name(found)
    assert not any(rows[name].passed for name in STEPS)
    assert not found.gates[0].passed


@pytest.mark.parametrize(
    ("step", "wrong"), [("round", "Floor"), ("floor", "Ceil"), ("ceil", "Round"), ("less", "Greater")]
)
def test_another_operator_is_an_error(every: Exported, step: str, wrong: str) -> None:
    """Though some elements lie on a threshold."""

    def change(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if n.output[0] == step).op_type = wrong

    found = changed(every, change)
    assert [r.name for r in found.rows if not r.passed] == [step]
    assert not found.gates[0].passed


def test_the_inputs_themselves_have_no_noise() -> None:
    call, _, traced = exported(Forward(lambda x: x > 1.0), (torch.tensor([[1.0, 2.0]]),))
    traced.model.graph[-1].op_type = "GreaterOrEqual"
    found = parity(traced, [probe(call)])
    assert not found.rows[-1].passed and not found.gates[0].passed


def test_what_follows_from_a_jump_fails_and_the_jump_is_known() -> None:
    net = exported(Forward(lambda x: torch.where(x * 1.0 > 1.0, x * 100, x)), (X,))
    found = changed(net, times(NEXT))
    rows = by_name(found)
    assert rows["gt"].passed and rows["gt"].extra["flips"] == 1
    assert not rows["output"].passed and not found.gates[0].passed
    told = next(r for r in blamed(found.rows, net[2].model.graph) if r.name == "output").extra["cause"]
    assert told == "it follows from a jump: 1 elements of gt (Greater) lie on the other side of a threshold"


def test_a_moved_index_is_named_where_what_is_read_there_differs() -> None:
    """As where bins beside the greatest are masked with -inf: the index is as good, what lies around it is not."""
    nodes = [
        helper.make_node("Mul", ["x", "one"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1),
        helper.make_node("Add", ["best", "two"], ["beside"]),
        helper.make_node("GatherElements", ["table", "beside"], ["read"], axis=1),
    ]
    graph = as_ir(helper.make_model(helper.make_graph(nodes, "g", [], []))).graph
    rows = [
        LayerDiff(name="scores", op="Mul", max_abs=1e-7, rel_l2=1e-7, tolerance=1e-6),
        LayerDiff(name="best", op="ArgMax", max_abs=2e-7, rel_l2=1e-7, judged="max_abs", tolerance=1e-6),
        LayerDiff(name="read", op="GatherElements", one_sided=2, tolerance=1e-6),
    ]
    found = blamed(rows, graph)
    assert found[:2] == tuple(rows[:2])
    expected = "it follows from a jump: best (ArgMax) points elsewhere, at values of scores that differ by up to 2e-07"
    assert found[2].extra["cause"] == expected
    assert expected in Report(stage="export", records=found).failure().what
    same = [replace(r, max_abs=0.0) for r in rows]
    assert blamed(same, graph) == tuple(same)


def test_what_a_value_is_computed_from() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
        helper.make_node("Relu", ["x"], ["b"]),
    ]
    graph = as_ir(helper.make_model(helper.make_graph([nodes[0], nodes[2], nodes[1]], "g", [], []))).graph
    assert behind(graph, "y", ["a", "x", "y"]) == ["a", "x"]
    assert behind(graph, "a", ["b"]) == []


def test_a_branch_is_computed_from_what_it_captures() -> None:
    branch = helper.make_graph([helper.make_node("Relu", ["j"], ["o"])], "t", [], [onnx.ValueInfoProto(name="o")])
    nodes = [
        helper.make_node("Round", ["x"], ["j"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    assert behind(as_ir(helper.make_model(helper.make_graph(nodes, "g", [], []))).graph, "y", ["j", "o"]) == ["j"]


def test_only_what_jumps_is_a_step() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Cast", ["x"], ["whole"], to=onnx.TensorProto.INT8),
        helper.make_node("Greater", ["x", "one"], ["more"]),
        helper.make_node("Cast", ["more"], ["again"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Reshape", ["again", "shape"], ["flat"]),
        helper.make_node("Add", ["again", "x"], ["sum"]),
    ]
    one = onnx.numpy_helper.from_array(np.float32(1), "one")
    found = steps(as_ir(helper.make_model(helper.make_graph(nodes, "g", [], [], [one]))).graph)
    assert [*found.by_value] == ["whole", "more", "again", "flat"]
    assert found.operands("flat") == {"again", "more", "x", "one"}
    assert found.constants.keys() == {"one"}
    loose = found.loose(
        "flat",
        {"x": np.float32([0.5, 1.0, 2.0]), "more": np.zeros(3, bool), "again": np.zeros(3), "flat": np.zeros(3)},
        lambda _: 1e-6,
    )
    assert loose is not None and loose.tolist() == [False, True, False]
