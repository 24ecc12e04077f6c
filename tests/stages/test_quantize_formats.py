"""Formats other than int8 in the quantize stage."""

import numpy as np
import pytest
from pydantic import ValidationError

from layerline.export.signature import Value
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import TaskError
from layerline.stages.quantize import Quantize
from tests.graph.test_qdq import builds
from tests.stages.test_quantize import CALIB, LABELLED, model, work  # noqa: F401 - a fixture
from tests.stages.test_quantize_search import formats, searched  # noqa: F401 - a fixture


def test_fp8_and_int8_layers_are_counted_and_the_artifact_is_what_was_measured(work):  # noqa: F811
    task = work(CALIB + LABELLED)
    report = Quantize(mode="fp8", layers={"y": "int8"}).run(task)
    assert report.passed, report.gates
    assert (report.metrics["fp8_products"], report.metrics["int8_products"]) == ("2 of 3", "1 of 3")
    assert report.metrics["output_sqnr_db"] > 20
    types = {row["value"]: row["type"] for row in report.tables["quantized"]}
    assert types == {
        "x": "float8e4m3fn", "w1": "float8e4m3fn", "r": "float8e4m3fn", "w2": "float8e4m3fn", "f": "int8", "wf": "int8",
    }  # fmt: skip
    assert onnx_files.load(task.out / onnx_files.FILE).opset_import[0].version >= 19


def test_fp8_with_the_rest_in_half_precision(work):  # noqa: F811
    report = Quantize(mode="fp8", rest="fp16").run(work(CALIB + LABELLED))
    assert report.passed, report.gates
    assert report.metrics["fp8_products"] == "3 of 3" and report.metrics["fp16_nodes"] > 0


def test_a_search_in_fp8_names_its_format(searched):  # noqa: F811
    report, _ = searched(mode="fp8")
    assert report.passed, report.gates
    assert set(formats(report).values()) == {"fp8"}
    assert report.tables["search"][0]["why"] == "the budget holds with it in fp8"


@pytest.mark.parametrize("mode", ["int4", "nvfp4"])
@pytest.mark.parametrize("task", ["", CALIB + LABELLED])
def test_weights_in_blocks_need_no_samples(work, mode, task):  # noqa: F811
    text = "g (float[n, 64] x) => (float[n, 4] y) { h = MatMul (x, w1) r = Relu (h) y = MatMul (r, w2) }"
    rng = np.random.default_rng(0)
    weights = {"w1": (64, 32), "w2": (32, 4)}
    net = model(text, **{k: rng.standard_normal(v).astype(np.float32) for k, v in weights.items()})
    feeds = [{"x": rng.standard_normal((n, 64)).astype(np.float32)} for n in (2, 1, 5)]
    # Inputs that vary together: of independent ones, so few samples teach a weight nothing that holds for others.
    task = (
        task.replace("return X", "return DATA")
        + """
draws = np.random.default_rng(0)
DATA = draws.standard_normal((40, 8)) @ draws.standard_normal((8, 64)) / 3 + 0.1 * draws.standard_normal((40, 64))
DATA = DATA.astype(np.float32)
"""
        * bool(task)
    )
    made = work(task, net, (Value(name="x", dtype="float32", shape=("n", 64)),), feeds)  # fmt: skip
    report = Quantize(mode=mode).run(made)
    assert report.passed, report.gates
    assert report.metrics[f"{mode}_products"] == "2 of 2" and report.metrics["quantized_activations"] == 0
    assert 12 < report.metrics["output_sqnr_db"] < 30
    assert report.metrics["bytes_after"] < 0.4 * report.metrics["bytes_before"]
    # Repairs need samples, of which the table says what they gained.
    if not task:
        with pytest.raises(TaskError, match="0 calibration samples"):
            Quantize(mode=mode, repairs=["gptq"]).run(made)
    else:
        repaired = Quantize(mode=mode, repairs=["gptq", "awq", "adaround"], min_db=0).run(made)
        rows = {row["repair"]: str(row["measured"]) for row in repaired.tables["repairs"]}
        assert [*rows] == ["awq", "adaround", "gptq"] and rows["adaround"] == "no layer that it is for"
        # A weight that loses by it on the held-out samples keeps the nearest steps.
        assert rows["gptq"].startswith("weights rounded anew: ")
        assert repaired.metrics["output_sqnr_db"] >= report.metrics["output_sqnr_db"]
    rest = Quantize(mode=mode, rest="fp16").run(made)
    assert rest.passed and rest.metrics["fp16_nodes"] > 0
    if task and mode == "nvfp4":
        for rest_type in ("fp32", "fp16"):
            fields = {"rest": rest_type, "bias_correction": True, "repairs": ["gptq"]}
            dynamic = Quantize(mode=mode, dynamic=True, **fields).run(made)
            assert dynamic.passed, dynamic.gates
            assert dynamic.metrics["nvfp4_products"] == "2 of 2" and dynamic.metrics["quantized_activations"] == 2
            assert 10 < dynamic.metrics["output_sqnr_db"] < 25
            artifact = onnx_files.load(made.out / onnx_files.FILE)
            assert [n.op_type for n in artifact.graph.node].count("TRT_FP4DynamicQuantize") == 2
            assert builds(artifact)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_target_of_its_own_rules_passes_the_gates(work, target):  # noqa: F811
    made = work(CALIB + LABELLED)
    report = Quantize(target=target, bias_correction=True).run(made)
    assert report.passed, report.gates
    assert report.metrics["int8_products"] == "3 of 3" and report.metrics["output_sqnr_db"] > 20
    assert {row["type"] for row in report.tables["quantized"]} == {"uint8", "int8"}


@pytest.mark.parametrize(
    "fields", [{"mode": "fp8", "target": "openvino"}, {"mode": "qat", "target": "openvino"},
               {"target": "onnxruntime", "layers": {"head": "nvfp4"}}, {"block_size": 64},
               {"mode": "int4", "block_size": 48}, {"mode": "nvfp4", "block_size": 32},
               {"mode": "int4", "dynamic": True}],
)  # fmt: skip
def test_formats_that_a_target_lacks_are_refused(fields):
    with pytest.raises(ValidationError, match=r"expected|should be"):
        Quantize(**fields)
