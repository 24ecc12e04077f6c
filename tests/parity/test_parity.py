"""Parity finds the first value that leaves its floor, says whose it is, and is not fooled by what looks right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare import noise_floor
from layerline.compare.region import EXPECTED, INPUTS
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.torch_export import Traced
from layerline.graph.io import module_identity, onnx_files
from layerline.parity.parity import Parity, parity
from layerline.parity.repro import reproduce
from layerline.parity.value_verdicts import Within
from tests.export.nets import Forward, Net, exported, probe
from tests.forms import as_ir, proto

Exported = tuple[Call, Axes, Traced]


@pytest.fixture(scope="module")
def net() -> Exported:
    torch.manual_seed(0)
    return exported(Net(), (torch.randn(2, 8),), {"x": {0: "n"}})


def check(net: Exported, change: Callable[[onnx.ModelProto], None] | None = None, **kwargs: object) -> Parity:
    """Parity of the exported net, its ONNX changed first."""
    call, axes, traced = net
    model = proto(traced.model)
    if change:
        change(model)
    probes = [probe(call), probe(call, axes, n=1), probe(call, axes, n=5)]
    return parity(replace(traced, model=as_ir(model)), probes, **kwargs)


def add_after(model: onnx.ModelProto, value: str, op: str, extra: np.ndarray | None = None) -> None:
    """Puts an operator behind the node that makes `value`, which it makes from now on."""
    index = next(i for i, n in enumerate(model.graph.node) if value in n.output)
    node = model.graph.node[index]
    node.output[:] = [f"{value} before" if o == value else o for o in node.output]
    inputs = [f"{value} before"]
    if extra is not None:
        model.graph.initializer.append(numpy_helper.from_array(extra, f"{value} extra"))
        inputs.append(f"{value} extra")
    added = helper.make_node(op, inputs, [value])
    added.metadata_props.extend(node.metadata_props)
    model.graph.node.insert(index + 1, added)


def test_a_true_export_passes_with_floors_and_paths(net: Exported) -> None:
    found = check(net)
    assert all(r.passed for r in found.rows) and all(g.passed for g in found.gates)
    assert [r.name for r in found.rows] == [
        v for n in proto(net[2].model).graph.node for v in n.output if v in net[2].nodes
    ]
    linear = next(r for r in found.rows if r.name == "linear_1")
    assert (linear.module, linear.op, linear.shape, linear.dtype) == ("blocks.1.linear", "Gemm", ("n", 8), "float32")
    assert linear.extra["source"] == "nets.py:26"
    assert 0 < linear.extra["floor"] < 1e-6
    assert linear.tolerance == noise_floor.tolerance(linear.extra["floor"])
    assert found.floors.keys() >= {r.name for r in found.rows}
    assert [g.name for g in found.gates] == ["module itself, example", "module itself, n=1", "module itself, n=5"]


@pytest.mark.parametrize("step", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("value", ["linear", "linear_1", "scores"])
def test_the_first_value_that_leaves_its_floor_is_named(net: Exported, value: str, step: float) -> None:
    found = check(net, lambda m: add_after(m, value, "Add", np.full(1, step, np.float32)))
    first = next(r for r in found.rows if not r.passed)
    assert first.name == value
    assert first.module == {"linear": "blocks.0.linear", "linear_1": "blocks.1.linear", "scores": "head"}[value]
    # A small error in front fades behind the norms; the outputs alone would not show it.
    assert all(g.passed for g in found.gates) == (value != "scores" and step == 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_sided_nan_fails_with_counts(net: Exported, bad: float) -> None:
    """T04."""
    extra = np.array([0, bad, 0, 0, 0], np.float32)
    found = check(net, lambda m: add_after(m, "scores", "Add", extra))
    row = next(r for r in found.rows if r.name == "scores")
    assert not row.passed
    assert (row.nonfinite_a, row.nonfinite_b, row.one_sided) == (0, 8, 8)  # a row of each of 2 + 1 + 5 samples
    assert "one-sided" in next(g.seen for g in found.gates if not g.passed)


@pytest.mark.parametrize("shift", [1, 4, 1000])
def test_wrong_indices_fail(net: Exported, shift: int) -> None:
    """T04: judged by the values they point at, a wrong class is as wrong as its score."""
    found = check(net, lambda m: add_after(m, "best", "Add", np.array([shift])))
    assert [r.name for r in found.rows if not r.passed] == ["best"]


@pytest.mark.parametrize("largest", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_near_ties_pass_whichever_wins(largest: int) -> None:
    """T04: two scores a rounding step apart; the other runtime ranks them the other way round."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x * 1.0
        return scores, scores.argmax(-1)

    x = torch.tensor([[0.5, 0.1, 0.2, 0.5]])
    x[0, largest] += 6e-8
    other = [3, 1, 2, 0]
    call, _, traced = exported(Forward(forward), (x,))
    model = proto(traced.model)
    index = next(i for i, n in enumerate(model.graph.node) if n.op_type == "ArgMax")
    node = model.graph.node[index]
    order = numpy_helper.from_array(np.array(other), "order")
    model.graph.initializer.append(order)
    swapped = helper.make_node("Gather", [node.input[0], "order"], ["swapped"], axis=1)
    model.graph.node.insert(index, swapped)
    # It ranks a permuted copy and says so in the copy's order: the best of the other two positions comes out.
    pick = helper.make_node("Gather", ["order", "position"], [node.output[0]])
    model.graph.node[index + 1].input[0] = "swapped"
    model.graph.node[index + 1].output[0] = "position"
    model.graph.node.insert(index + 2, pick)
    found = parity(replace(traced, model=as_ir(model)), [probe(call)])
    assert all(r.passed for r in found.rows) and all(g.passed for g in found.gates)


def test_rtol_and_atol_in_place_of_the_floor(net: Exported) -> None:
    def off(m: onnx.ModelProto) -> None:
        add_after(m, "scores", "Add", np.full(1, 1e-4, np.float32))

    assert all(r.passed for r in check(net, off, rule=Within(rtol=0.0, atol=1.1e-4)).rows)
    found = check(net, off, rule=Within(rtol=0.0, atol=0.9e-4))
    (row,) = (r for r in found.rows if not r.passed)
    assert (row.name, row.judged) == ("scores", "max_abs")
    assert row.extra["ratio"] == pytest.approx(1.1, abs=0.02)


def test_values_nan_on_both_sides_pass_and_are_flagged() -> None:
    """T04."""
    call, _, traced = exported(Forward(lambda x: torch.log(x)), (torch.tensor([1.0, -1.0, 2.0]),))
    found = parity(traced, [probe(call)])
    (row,) = found.rows
    assert row.passed and (row.nonfinite_a, row.nonfinite_b, row.one_sided) == (1, 1, 0)
    assert any("NaN or Inf in torch and in the ONNX alike" in n for n in found.notes)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(4),
        lambda: torch.bernoulli(torch.full((4,), 0.5)),
        pytest.param(lambda: torch.rand(4), marks=pytest.mark.slow),
        pytest.param(lambda: torch.randint(0, 9, (4,)), marks=pytest.mark.slow),
    ],
)
def test_random_operators_stay_random_and_are_named(draw: Callable[[], Tensor]) -> None:
    """T11: not folded to one draw; told as what they are, not as a mismatch."""
    call, _, traced = exported(Forward(lambda x: (x * 2, x + draw())), (torch.zeros(4),))
    session = OnnxRuntime().open(traced.model)
    runs = {tuple(session.run(call.feed)["output_1"].tolist()) for _ in range(40)}
    assert len(runs) > 1
    found = parity(traced, [probe(call)])
    assert all(r.passed for r in found.rows) and all(g.passed for g in found.gates)
    row = next(r for r in found.rows if r.name == "output_1")
    assert str(row.extra["nondeterministic"]).startswith("aten.") and row.tolerance is None
    assert next(r for r in found.rows if r.name == "output_0").tolerance is not None
    assert any(n.startswith("non-deterministic op aten.") for n in found.notes)


def test_a_draw_that_was_folded_is_a_failure() -> None:
    """T11."""
    call, _, traced = exported(Forward(lambda x: x + torch.randn(4)), (torch.zeros(4),))
    model = proto(traced.model)
    node = next(n for n in model.graph.node if n.op_type.startswith("Random"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), node.output[0]))
    model.graph.node.remove(node)
    found = parity(replace(traced, model=as_ir(model)), [probe(call)])
    (gate,) = (g for g in found.gates if not g.passed)
    assert gate.name.startswith("non-deterministic op") and "one draw" in gate.seen


def test_what_the_runtime_refuses_is_told_with_the_module(net: Exported) -> None:
    def fix(m: onnx.ModelProto) -> None:
        add_after(m, "scores", "Reshape", np.array([2, 5]))

    failed = [g for g in check(net, fix).gates if not g.passed]
    assert [g.name for g in failed] == ["module itself, n=1", "module itself, n=5"]
    assert all("can't run" in g.seen for g in failed)


@pytest.mark.parametrize("value", ["linear", "linear_1"])
def test_the_smallest_model_that_shows_it(net: Exported, tmp_path: Path, value: str) -> None:
    call, axes, traced = net
    model = proto(traced.model)
    add_after(model, value, "Add", np.full(1, 0.5, np.float32))
    changed, probes = replace(traced, model=as_ir(model)), [probe(call), probe(call, axes, n=5)]
    row = reproduce(changed, probes, parity(changed, probes).rows, tmp_path / "bug")
    assert row is not None and row.name == value
    cut, feed = onnx_files.read_model(tmp_path / "bug" / onnx_files.FILE), dict(np.load(tmp_path / "bug" / INPUTS))
    assert [n.op_type for n in cut.graph] == ["Gemm", "Add"]
    (seen,) = OnnxRuntime().open(cut).run(feed).values()
    np.testing.assert_allclose(seen - 0.5, np.load(tmp_path / "bug" / EXPECTED), rtol=1e-4, atol=1e-5)


def test_nothing_to_reproduce_where_all_is_good(net: Exported, tmp_path: Path) -> None:
    call, _, traced = net
    probes = [probe(call)]
    assert reproduce(traced, probes, parity(traced, probes).rows, tmp_path / "bug") is None
    assert not (tmp_path / "bug").exists()


def test_identity_survives_saving_and_no_path_does(net: Exported, tmp_path: Path) -> None:
    onnx_files.save(net[2].model, tmp_path)
    saved = onnx_files.read_model(tmp_path / onnx_files.FILE)
    assert module_identity.modules(saved)["layer_norm"] == "blocks.0.norm"
    assert module_identity.sources(net[2].model)["layer_norm"] == "nets.py:26" and not module_identity.sources(saved)
    blob = (tmp_path / onnx_files.FILE).read_bytes()
    assert str(Path(__file__).parent).encode() not in blob and b"site-packages" not in blob


def test_long_sums_may_round_as_sums_in_turn_do() -> None:
    """torch adds in pairs, onnxruntime one after the other: neither is wrong."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return torch.exp(x * 5).sum(), x.var(), torch.cumsum(x, -1), x.sum(-1), (x > 0).sum()

    call, _, traced = exported(Forward(forward), (torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)),))
    found = parity(traced, [probe(call)])
    assert all(r.passed for r in found.rows) and all(g.passed for g in found.gates)
    by_name = {r.name: r for r in found.rows}
    assert by_name["output_0"].extra["floor"] == pytest.approx(200_000**0.5 * 2**-24)
    assert by_name["exp"].extra["floor"] < 2e-6  # before the sum nothing is allowed
    assert by_name["output_4"].tolerance == 0.0  # integers add up exactly
