"""Foreign graphs: every node gets one name, every name a module path, every version one that is read."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, parser

from layerline.graph.io import onnx_files
from layerline.graph.io.opset import opset_of, raise_opset
from layerline.onnx_import.feeds import compared_numbers, table_rows
from layerline.onnx_import.normalize_import import adopt, module_path, name_nodes
from layerline.pipeline.errors import StageError
from tests.forms import as_ir, proto


@pytest.mark.parametrize(
    ("name", "op", "path"),
    [
        ("/layer1/conv1/Conv", "Conv", "layer1.conv1"),
        ("/layer1/layer1.0/conv1/Conv_3", "Conv", "layer1.0.conv1"),
        ("/encoder/layer/layer.0/attention/self/query/MatMul", "MatMul", "encoder.layer.0.attention.self.query"),
        ("/net/net.1/net.1.0/Relu", "Relu", "net.1.0"),
        ("/layer1/layer10/Add", "Add", "layer1.layer10"),
        ("/Add_2", "Add", ""),
        ("/a/Convolution", "Conv", "/a/Convolution"),
        ("layer1/conv1/Conv", "Conv", "layer1/conv1/Conv"),
        ("p2o.Conv.0", "Conv", "p2o.Conv.0"),
        ("Conv@0", "Conv", "Conv@0"),
        ("", "Conv", ""),
        ("If_0_then_branch__Inline_0__/decoder/decoder/1/Relu", "Relu", "If_0_then_branch.decoder.decoder.1"),
        ("If_0_else_branch__Inline_0__/stft/Unsqueeze_1", "Unsqueeze", "If_0_else_branch.stft"),
        ("If_0__Inline_12__/a/If_then_branch__Inline_3__/b/Conv", "Conv", "If_0.a.If_then_branch.b"),
        ("If_0_then_branch__Inline_0__Add_3", "Add", "If_0_then_branch__Inline_0__Add_3"),
    ],
)
def test_module_paths(name: str, op: str, path: str) -> None:
    assert module_path(name, op) == path


@given(st.lists(st.sampled_from(["", "a", "Relu_v1", "Relu_v2", "Relu_v1_2"]), min_size=1, max_size=8))
def test_every_node_gets_a_name_and_those_that_are_unique_stay(names: list[str]) -> None:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"], name=n) for i, n in enumerate(names)]
    model = as_ir(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    name_nodes(model)
    found = [n.name for n in model.graph]
    assert len(set(found)) == len(found) and "" not in found
    for name in set(names) - {""}:
        assert found[names.index(name)] == name, "the first of a name keeps it"
    before = list(found)
    assert name_nodes(model) == [] and [n.name for n in model.graph] == before


def test_weights_keep_their_order_and_bytes_when_raised() -> None:
    model = parser.parse_model(
        """<ir_version: 7, opset_import: ["" : 12]> g (float[n,600] x) => (float[n,2] y) {
          a = MatMul (x, big)
          b = Add (a, small)
          y = Softmax (b) }"""
    )
    for name, dims in (("big", (600, 2)), ("small", (2,))):
        values = [float(i) for i in range(dims[0] * (dims[1] if len(dims) > 1 else 1))]
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, dims, values))
    before = proto(onnx_files.canonical(model))
    raised = proto(raise_opset(before, 20))
    assert [i.name for i in raised.graph.input] == ["x"] and before == proto(onnx_files.canonical(model))
    kept = {t.name: t.raw_data for t in raised.graph.initializer}
    assert all(kept[t.name] == t.raw_data for t in before.graph.initializer)
    onnx.checker.check_model(raised, full_check=True)


def test_sequences_stay_sequences() -> None:
    model = parser.parse_model(
        """<ir_version: 7, opset_import: ["" : 12]>
        g (seq(float[n]) s, float[n] x) => (seq(float[n]) y) { y = SequenceInsert (s, x) }"""
    )
    raised = proto(raise_opset(model, 20))
    assert raised.graph.output[0].type.HasField("sequence_type") and raised.graph.input[0].type.HasField(
        "sequence_type"
    )


def test_what_the_graph_says_of_its_integers() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int64[n] ids, int64 rate, int64[n] free) => (float[n,4] y, bool z, bool w, int64[n] f)
        <int64 k = {16000}, int64[1] l = {7}> {
          c = Cast <to = 7> (ids)
          y = Gather (table, c)
          q = Gather (wide, ids)
          r = Reshape (rate, one)
          z = Equal (rate, k)
          w = Less (r, l)
          f = Identity (free) }"""
    )
    model.graph.initializer.extend(
        [
            helper.make_tensor("table", 1, (30, 4), [0.0] * 120),
            helper.make_tensor("wide", 1, (99, 1), [0.0] * 99),
            helper.make_tensor("one", 7, (1,), [1]),
        ]
    )
    graph = as_ir(model)
    assert [table_rows(graph, name) for name in ("ids", "rate", "free")] == [30, None, None]
    assert compared_numbers(graph, "rate") == (16000, 7) and compared_numbers(graph, "ids") == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnxs_own_models_are_the_same_after_raising() -> None:
    """Every node test of opset 11 to 19 that onnxruntime runs; its answers, to the last bit."""
    from onnx.backend.test.loader import load_model_tests

    from layerline.backends.onnxruntime import OnnxRuntime
    from layerline.graph.io.opset import opset_of

    compared = 0
    for case in load_model_tests(kind="node"):
        model = case.model
        if model is None or not 11 <= opset_of(model) < 20:
            continue
        feed = {i.name: a for i, a in zip(model.graph.input, case.data_sets[0][0], strict=False)}
        try:
            expected = OnnxRuntime().open(model).run(feed)
        except StageError:
            continue
        seen = OnnxRuntime().open(adopt(as_ir(model), 20).model).run(feed)
        for name, value in expected.items():
            several = value if isinstance(value, list) else [value]
            others = seen[name] if isinstance(value, list) else [seen[name]]
            for one, other in zip(several, others, strict=True):
                np.testing.assert_array_equal(other, one, err_msg=f"{case.name}: {name}")
        compared += 1
    assert compared > 700


def test_a_graph_without_a_name_is_raised() -> None:
    model = parser.parse_model(
        '<ir_version: 7, opset_import: ["" : 12]> g (float[n] x) => (float[n] y) { y = Exp (x) }'
    )
    model.graph.name = ""
    assert opset_of(raise_opset(model, 20)) == 20
